"""What if something breaks? Acme's answer: evidence first. After Hu et al., NSDI 2024, arXiv 2403.07648."""
