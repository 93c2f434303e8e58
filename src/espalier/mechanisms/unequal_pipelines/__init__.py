"""Pipelines of unequal stages on unequal machines. After FlashFlex (arXiv 2409.01143)."""
