"""Rows that cross between the parts of a graph, in few bits, late or as differences. After Sylvie (arXiv
2303.06825)."""
