"""Offsets of rows that lie one after the other, as in CSR."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def offsets_of(counts: ArrayLike) -> NDArray[np.int64]:
    """[rows + 1]: where each row begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64, copy=False)
