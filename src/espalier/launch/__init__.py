"""Launch: starts and supervises the ranks of a run."""
