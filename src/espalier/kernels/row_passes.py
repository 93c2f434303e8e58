"""Passes over one row of float32 at an address, on vectors of 16: the steps of searches in a row.

`n` is how many elements the row has; the lanes beyond its end are neither read nor counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import njit
from espalier.kernels.simd import (
    LANES,
    at_least,
    count_lanes,
    gather,
    larger,
    largest,
    load,
    load_bfloat16,
    load_float16,
    load_ints,
    load_part,
    plus,
    smaller,
    smallest,
    spread,
    store,
    store_part,
    times,
    total,
    unordered,
    where,
)

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""What the elements of a row in memory are."""
ALL = np.uint16(0xFFFF)
"""Mask of all lanes."""


@njit
def tail_lanes(n: int) -> Any:
    """Mask of the lanes that are left after the whole vectors of n elements."""
    return np.uint16((1 << (n % LANES)) - 1)


@njit
def reaching(row: int, n: int, step: int, threshold: Any) -> Any:
    """How many of the vectors' elements, one vector every `step` bytes, are at least the threshold."""
    least = spread(threshold)
    count, other = 0, 0
    at, end = row, row + 4 * (n - n % LANES)
    while at + 3 * step < end:  # a range would begin with a division
        count += count_lanes(at_least(load(at), least)) + count_lanes(at_least(load(at + step), least))
        other += count_lanes(at_least(load(at + 2 * step), least)) + count_lanes(at_least(load(at + 3 * step), least))
        at += 4 * step
    while at < end:
        count += count_lanes(at_least(load(at), least))
        at += step
    if n % LANES:
        tail = load_part(end, tail_lanes(n))
        count += count_lanes(at_least(tail, least) & tail_lanes(n))
    return count + other


@njit
def summary(row: int, n: int, step: int) -> Any:
    """Smallest and largest of those vectors' elements, their mean and deviation, and whether one is NaN.

    A NaN is neither smallest nor largest; beside infinities mean and deviation mean nothing.
    """
    low, high = spread(np.float32(np.inf)), spread(np.float32(-np.inf))
    total_one, total_other = spread(np.float32(0)), spread(np.float32(0))
    squares_one, squares_other = total_one, total_other
    strange = np.uint16(0)
    at, end = row, row + 4 * (n - n % LANES)
    count = 0
    while at + step < end:
        value, other = load(at), load(at + step)
        low, high = smaller(other, smaller(value, low)), larger(other, larger(value, high))
        total_one, total_other = plus(total_one, value), plus(total_other, other)
        squares_one, squares_other = plus(squares_one, times(value, value)), plus(squares_other, times(other, other))
        strange |= unordered(value, other)
        at += 2 * step
        count += 2 * LANES
    if at < end:
        value = load(at)
        low, high = smaller(value, low), larger(value, high)
        total_one, squares_one = plus(total_one, value), plus(squares_one, times(value, value))
        strange |= unordered(value, value)
        count += LANES
    if n % LANES:
        value = load_part(end, tail_lanes(n))
        low = smaller(where(tail_lanes(n), value, low), low)
        high = larger(where(tail_lanes(n), value, high), high)
        total_one, squares_one = plus(total_one, value), plus(squares_one, times(value, value))
        strange |= unordered(value, value)
        count += n % LANES
    mean = total(plus(total_one, total_other)) / np.float32(count)
    variance = total(plus(squares_one, squares_other)) / np.float32(count) - mean * mean
    return smallest(low), largest(high), mean, np.sqrt(max(variance, np.float32(0))), strange != 0


@njit
def drawn_in(row: int, n: int, low: Any, high: Any) -> Any:
    """Smallest and largest element of the row that is at least `low` and not at least `high`."""
    least, bound = spread(low), spread(high)
    smallest_in, largest_in = spread(np.float32(np.inf)), spread(np.float32(-np.inf))
    for j in range(0, n, LANES):
        valid = ALL if j + LANES <= n else tail_lanes(n)
        value = load_part(row + 4 * j, valid)
        inside = at_least(value, least) & ~at_least(value, bound) & valid
        smallest_in = smaller(where(inside, value, smallest_in), smallest_in)
        largest_in = larger(where(inside, value, largest_in), largest_in)
    return smallest(smallest_in), largest(largest_in)


@njit
def copied(source: int, n: int, kind: Any, row: int) -> None:
    """n elements, at least 16, as float32."""
    for j in range(0, n, LANES):
        at = min(j, n - LANES)  # the last vector may overlap the one before
        if kind == FLOAT32:
            store(row + 4 * at, load(source + 4 * at))
        elif kind == BFLOAT16:
            store(row + 4 * at, load_bfloat16(source + 2 * at))
        else:
            store(row + 4 * at, load_float16(source + 2 * at))


@njit
def gathered(row: int, k: int, columns: int, values: int) -> None:
    """Writes the row's values at k columns."""
    for j in range(0, k, LANES):
        valid = ALL if j + LANES <= k else tail_lanes(k)
        store_part(values + 4 * j, gather(row, load_ints(columns + 4 * j), valid), valid)
