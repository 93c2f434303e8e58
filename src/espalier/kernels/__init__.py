"""How is one operation made fast? Plain references, and beside each the forms that beat it on some device and shape."""

from espalier.kernels.rtopk import rtopk

__all__ = ["rtopk"]
