"""Cost of rounding: bytes that fitting steps, rounding and their gradients move. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple

FITTED, ROUNDED, ROUNDED_BACK = 90, 25, 25
"""What fitting the steps of rows, rounding, and the gradients of both take for a value of 4 bytes, as bytes that could
be read and written meanwhile. Measured once, rows of 30,000 x 64 and 200,000 x 32 on one and two threads of an AMD
EPYC: 56 to 131, 12 to 44, and 11 to 43."""
TEMPORARY = 6
"""Arrays of the values' size that backward makes besides."""


class RoundingBytes(NamedTuple):
    """Bytes moved forward and backward, saved until backward, and held besides at the worst moment."""

    moved: Any
    moved_back: Any
    saved: Any
    transient: Any


def cost(values: Any, size: int, fits: bool = False) -> RoundingBytes:
    """Of rounding so many `values` of `size` bytes in a pass (arrays allowed); `fits`: each row's step is fitted. Saved
    are rounded values beside those that they are of."""
    share = size / 4
    moved = (ROUNDED + FITTED * fits) * share * values
    return RoundingBytes(moved, ROUNDED_BACK * share * values, size * values, TEMPORARY * size * values)
