"""Acme's answer to "What if something breaks?". After Hu et al., NSDI 2024, arXiv 2403.07648."""
