"""What the store costs: pages, bytes and seconds of reads and writes, from a disk's measured figures. Imports no torch.

Counts may be NumPy arrays: one call then prices many layouts.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np

from espalier.machine import disk as probe
from espalier.machine.cluster import Disk

Number = Any
"""A number, or an array of numbers."""
PAGE = probe.PAGE
"""What offsets, addresses and sizes of direct transfers are multiples of."""


def pages(size: int) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE) * PAGE


def pages_of_row(row_bytes: int, stride: int = 0) -> float:
    """Pages that a row touches, averaged over the rows of a table with `stride` bytes from row to row (0: dense)."""
    step = gcd(stride or row_bytes, PAGE)
    begins = np.arange(0, PAGE, step)
    return float(np.mean((begins + row_bytes - 1) // PAGE + 1)) if row_bytes else 0.0


def pages_of_rows(count: Number, rows: Number, row_bytes: int, stride: int = 0) -> Number:
    """Pages that `count` different rows touch, drawn uniformly from a table of `rows`; each page counts once."""
    step = stride or row_bytes
    table = np.maximum(1.0, np.asarray(rows) * step / PAGE)
    each = pages_of_row(row_bytes, stride) * np.asarray(rows) / table  # rows that touch one page
    low = np.floor(each)
    left_out = 1.0 - np.asarray(count) / np.maximum(1, rows)
    untouched = (1 + low - each) * left_out**low + (each - low) * left_out ** (low + 1)
    return table * (1.0 - untouched)


def read_seconds(disk: Disk, size: Number, reads: Number = 1) -> Number:
    """Seconds for `reads` reads of `size` bytes in all, many in flight: exact for pages and for long reads alike."""
    overhead = max(0.0, 1 / (disk.iops_parallel or disk.iops) - PAGE / disk.read)
    return np.asarray(reads) * overhead + np.asarray(size) / disk.read


def write_seconds(disk: Disk, size: Number) -> Number:
    """Seconds for writing `size` bytes in sequence."""
    return np.asarray(size) / disk.write
