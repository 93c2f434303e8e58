"""TorchGT: a graph transformer whose tokens are nodes, with attention over sparse patterns (arXiv 2407.14106)."""
