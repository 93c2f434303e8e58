"""Widths of rows: how many bits the values of a row have, and what rows take: one width for all, or by in-degree.

A2Q and MEGA learn theirs (`mechanisms.few_bits.bit_allocator.BitAllocator`), rows that cross between parts of a
graph have one by the place of
their node's in-degree among those for the same peer (Sylvie's later version, ICDE 2024), and packed rows on disk have
one for all. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

LEVELS = (1, 2, 4, 8)
"""Bits that the shares of rows by degree have: of equal size, the lowest degrees first, from the fewest bits on."""
_SHARES = 256
"""A share is a byte: so many parts of all rows."""


class RowWidths(NamedTuple):
    """Rows by the bits of their values, NumPy arrays or tensors that broadcast: `bits` of each kind of row, and
    `counts`, how many rows it has. The last dim is that of kinds."""

    bits: Any
    counts: Any

    def total(self, row_bytes: Callable[[Any], Any]) -> Any:
        """Bytes of all rows, where a row of so many bits takes `row_bytes` of it."""
        return (row_bytes(self.bits) * self.counts).sum(-1)


def uniform(bits: int, rows: Any) -> RowWidths:
    """All `rows` with so many bits; an array of numbers of rows has a `RowWidths` for each."""
    return RowWidths(np.array([bits]), np.asarray(rows)[..., None])


def levels(least: int) -> tuple[int, ...]:
    """Bits of the shares where the lowest degrees have `least`: (1, 2, 4, 8), (2, 4, 8), (4, 8) or (8,)."""
    return LEVELS[LEVELS.index(least) :]


def by_degree(least: int, rows: Any) -> RowWidths:
    """As many rows of each of `levels(least)` as `widths_of` gives of so many."""
    widths = np.array(levels(least))
    ends = -(-np.asarray(rows, np.int64)[..., None] * _firsts(len(widths)) // _SHARES)
    return RowWidths(widths, np.diff(ends, axis=-1))


def shares(degrees: Any) -> Any:
    """uint8 [rows]: 256 times the share of rows that come before in the order of degrees; ties in their order."""
    rows = len(degrees)
    place = np.empty(rows, np.int64)
    place[np.argsort(degrees, kind="stable")] = np.arange(rows)
    return (place * _SHARES // max(1, rows)).astype(np.uint8)


def widths_of(least: int, share: Any) -> Any:
    """uint8 [rows]: bits of rows of those `shares`."""
    widths = np.array(levels(least), np.uint8)
    return widths[np.asarray(share, np.int64) * len(widths) // _SHARES]


def _firsts(many: int) -> Any:
    """The least share of each of so many levels, and one beyond the last."""
    return -(-_SHARES * np.arange(many + 1) // many)
