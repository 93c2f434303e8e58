"""Blocks of the codec `sparse`, and how much smaller it makes a gradient of which few values are not zero."""

from __future__ import annotations

BLOCK = 64
"""Values of a block: their bits are a word."""


def ratio(share: float, run: float = 1.0, element_bytes: int = 4) -> float:
    """Raw over encoded bytes where `share` of the values are not zero, in runs of `run` at places of no order."""
    blocks = 1 - (1 - min(1.0, share)) ** (BLOCK / run)
    return element_bytes / (1 / (8 * BLOCK) + 8 * blocks / BLOCK + element_bytes * min(1.0, share))
