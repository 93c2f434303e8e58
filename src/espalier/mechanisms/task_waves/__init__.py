"""Tasks trained together in waves of ranks. After Spindle (arXiv 2409.03365)."""
