"""Tools for tests, ours and users': many ranks on one CPU, faults, slow links."""
