"""Row-wise top-k on the CPU: after RTop-K, arXiv 2409.00822, in numba on vectors of 16 floats.

A bracket of values is halved until exactly k elements of the row lie at or above its middle. Where we deviate:

- Every few steps the bracket is drawn in to the values that are really inside it. So ties, zeros after a ReLU and
  outliers end the search at once; bisection alone would need up to 280 steps.
- Long rows are searched twice: a sample of the row gives a threshold that a little more than k elements reach; these
  are packed, and the exact search runs on them alone.
- Elements at or above the bracket are kept first, the rest is filled from inside it, left to right: an early stop
  never loses the maximum (the paper's order can).
- A row with a NaN is searched in the order of torch: NaN above infinity.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import row_passes, simd
from espalier.kernels.numba_compile import jit, njit
from espalier.kernels.row_passes import ALL, FLOAT32, copied, drawn_in, gathered, reaching, summary, tail_lanes
from espalier.kernels.simd import (
    LANES,
    address,
    at_least,
    columns_from,
    count_lanes,
    load,
    load_ints,
    load_one,
    load_part,
    not_below,
    packed,
    spread,
    store,
    store_wide,
    unordered,
)

_LONG, _SAMPLED = 1024, 32
"""Rows from this width on are sampled, by this many vectors."""
_SHARE = 3
"""Sampling pays while at least this many elements come to each that is kept."""
_NARROW = 24
"""Rows up to this width, where sorted, are not searched: each element is compared with all."""
_FEW = 128
"""Up to here sorting by comparing each with all, 16 at a time, is faster than dealing."""
_SNAP_AFTER, _SNAP_EVERY = 8, 4
_LARGEST = np.float32(3.4028234663852886e38)  # finite float32
_NAN_KEY = np.int32(0x7FFFFFFF)


@njit
def _middle(low: Any, high: Any) -> Any:
    """Halfway between two float32, neither overflowing nor NaN for infinities."""
    half = np.float32(0.5)
    return half * max(low, -_LARGEST) + half * min(high, _LARGEST)


@njit
def _inside(low: Any, top: Any, share: Any) -> Any:
    """`share` of the way from low to top, but no nearer to either than a fiftieth."""
    return low + (top - low) * np.float32(min(max(share, 0.02), 0.98))


@njit
def _search(row: int, n: int, k: int, start: Any, limit: int) -> Any:
    """Bracket of the k-th largest of n elements, none NaN. `start` is the smallest, the largest, and a first guess.

    Returns `(low, high, need)`: k - need elements are at least `high`, and at least `need` are below it and at least
    `low`; they are all equal unless the `limit` of steps ended the search. With a limit the bracket is halved at every
    step; without one (negative) it begins at the guess and two of three steps go where the counts at both ends point.
    """
    low, top, middle = start
    high = np.float32(np.nan)  # which no element is at least
    reached, above = n, 0
    steps = 0
    while steps != limit:
        if not low < middle < top:
            middle = _middle(low, top)
        if not low < middle < top:  # nothing lies between the two
            if top in (low, high):
                break
            middle = top
        count = reaching(row, n, 4 * LANES, middle)
        steps += 1
        if count > k:
            low, reached = middle, count
        else:
            high = top = middle
            above = count
            if count == k:
                break
        if limit >= 0:
            middle = _middle(low, top)
            continue
        if steps >= _SNAP_AFTER and steps % _SNAP_EVERY == 0:
            low, top = drawn_in(row, n, low, high)
        aimed = _inside(low, top, (reached - k) / (reached - above))
        middle = _middle(low, top) if steps % 3 == 2 else aimed
    return low, high, k - above


@njit
def _with_the_top(row: int, n: int, k: int, top: Any, bracket: Any) -> Any:
    """A bracket that may still hold the maximum `top`, drawn together so that the maximum is kept before the rest."""
    low, high, need = bracket
    if np.isnan(high):
        count = reaching(row, n, 4 * LANES, top)
        if count <= k:
            high, need = top, k - count
        else:
            low = top
    return low, high, need


@njit
def _chosen(row: int, n: int, bracket: Any, names: Any, columns: int) -> None:
    """Writes the k columns (int32, with room for 16 more) in their order. `names` are theirs; 0: they are 0, 1, …"""
    low, high, need = bracket
    least, bound = spread(low), spread(high)
    to = columns
    for j in range(0, n, LANES):
        valid = ALL if j + LANES <= n else tail_lanes(n)
        value = load_part(row + 4 * j, valid)
        chosen = at_least(value, bound) & valid
        if need:
            inside = at_least(value, least) & ~chosen & valid
            while inside and need:
                bit = inside & (~inside + np.uint16(1))
                chosen |= bit
                inside ^= bit
                need -= 1
        store(to, packed(load_ints(names + 4 * j) if names else columns_from(j), chosen))
        to += 4 * count_lanes(chosen)


@njit
def _normal(share: Any) -> Any:
    """The value that this share of normal variates exceeds, to 0.02 (Tukey's lambda distribution at 0.14)."""
    return np.float32(4.91 * ((1 - share) ** 0.14 - share**0.14))


@njit
def _guess(row: int, n: int, k: int) -> Any:
    """A value that, judging by a sample, somewhat more than k of n elements reach."""
    stride = n // LANES // _SAMPLED
    size = _SAMPLED * stride * LANES
    expected = k * (_SAMPLED * LANES) / n
    rank = int(expected + 3 * np.sqrt(expected) + 2)  # three standard deviations of a Poisson count
    low, high, mean, deviation, _ = summary(row, size, 4 * LANES * stride)
    middle = mean + deviation * _normal((rank + rank // 8) / (_SAMPLED * LANES))
    for _ in range(12):
        if not low < middle < high:
            middle = _middle(low, high)
        count = reaching(row, size, 4 * LANES * stride, middle)
        if count < rank:
            high = middle
        else:
            low = middle
            if count <= rank + rank // 4:
                break
        middle = _middle(low, high)
    return low


@njit
def _candidates(row: int, n: int, threshold: Any, values: int, columns: int) -> Any:
    """Packs values and columns of the elements not below the threshold, NaNs among them. Returns how many."""
    least = spread(threshold)
    count = 0
    for j in range(0, n, LANES):
        valid = ALL if j + LANES <= n else tail_lanes(n)
        value = load_part(row + 4 * j, valid)
        chosen = not_below(value, least) & valid
        store(values + 4 * count, packed(value, chosen))
        store(columns + 4 * count, packed(columns_from(j), chosen))
        count += count_lanes(chosen)
    return count


@njit
def _keys(values: Any, n: int, keys: Any) -> None:
    """n int32 in the order of torch: NaN above infinity, and all NaNs equal."""
    bits = values.view(np.int32)
    for j in range(n):
        key = bits[j] ^ ((bits[j] >> np.int32(31)) & _NAN_KEY)
        keys[j] = _NAN_KEY if np.isnan(values[j]) else key


@njit
def _keys_reaching(keys: Any, n: int, least: Any) -> Any:
    """How many of the first n keys are at least `least`."""
    count = 0
    for j in range(n):
        count += keys[j] >= least
    return count


@njit
def _chosen_with_nans(row: Any, n: int, k: int, keys: Any, columns: Any) -> None:
    """As `_search` and `_chosen`, for a row with NaNs: it halves the range of all keys, of which there are 2³²."""
    _keys(row, n, keys)
    low, high = np.int64(-(1 << 31)), np.int64(1) << 31
    while high - low > 1:
        middle = (low + high) >> 1
        if _keys_reaching(keys, n, middle) >= k:
            low = middle
        else:
            high = middle
    need = k - _keys_reaching(keys, n, high)
    count = 0
    for j in range(n):
        if keys[j] >= high or (keys[j] == low and need > 0):
            need -= keys[j] == low
            columns[count] = j
            count += 1


@njit
def _ranked(values: int, k: int, columns: Any, seen: Any, to: Any) -> None:
    """Sorts few columns by falling value: each goes behind all larger and behind the equal ones that came before."""
    seen[:k] = 0  # how many went to the places that begin here
    for j in range(k):
        value = spread(load_one(values + 4 * j))
        place = 0
        for i in range(0, k, LANES):
            valid = ALL if i + LANES <= k else tail_lanes(k)
            place += count_lanes(~at_least(value, load(values + 4 * i)) & valid)
        to[place + seen[place]] = columns[j]
        seen[place] += 1
    columns[:k] = to[:k]


@njit
def _first_of_few(values: int, n: int, k: int, seen: Any, to: Any) -> bool:
    """As `_ranked` for a narrow row as a whole: writes its first k columns; False, and nothing, if there is a NaN."""
    if unordered(load(values), load(values + 4 * (n - LANES))):
        return False
    seen[:n] = 0
    for j in range(n):
        value = spread(load_one(values + 4 * j))
        place = 0
        for i in range(0, n, LANES):
            valid = ALL if i + LANES <= n else tail_lanes(n)
            place += count_lanes(~at_least(value, load(values + 4 * i)) & valid)
        to[min(place + seen[place], k)] = j  # there is room behind the last
        seen[place] += 1
    return True


@njit
def _dealt(values: Any, k: int, columns: Any, keys: Any, to: Any) -> None:
    """Sorts columns by falling value, NaN first: dealt into 256 heaps for each byte of their keys, the lowest first."""
    counts = np.zeros((4, 256), np.int64)
    _keys(values, k, keys[0].view(np.int32))
    for j in range(k):
        key = np.uint32(keys[0, j] ^ np.uint32(0x7FFFFFFF))  # rises, as an unsigned number, where the key falls
        keys[0, j] = key
        for byte in range(4):
            counts[byte, (key >> np.uint32(8 * byte)) & np.uint32(255)] += 1
    source, there, now, then = keys[0], keys[1], columns, to
    for byte in range(4):
        begins = counts[byte]
        shift = np.uint32(8 * byte)
        if begins[(source[0] >> shift) & np.uint32(255)] == k:
            continue
        total = 0
        for heap in range(256):
            total, begins[heap] = total + begins[heap], total
        for j in range(k):
            heap = (source[j] >> shift) & np.uint32(255)
            place = begins[heap]
            begins[heap] = place + 1
            there[place], then[place] = source[j], now[j]
        source, there, now, then = there, source, then, now
    columns[:k] = now[:k]


@njit
def _select(row: int, n: int, k: int, limit: int, score: Any, scratch: Any) -> bool:
    """Writes the columns of the k largest to the third address of `scratch`; False, and nothing, if there is a NaN."""
    values, columns, out = scratch
    if limit < 0 and n >= _LONG and _SHARE * k <= n:
        count = _candidates(row, n, _guess(row, n, k), values, columns)
        if count >= k:
            low, high, mean, _, strange = summary(values, count, 4 * LANES)
            if not strange:
                _chosen(values, count, _search(values, count, k, (low, high, mean), limit), columns, out)
            return not strange
    low, high, mean, deviation, strange = summary(row, n, 4 * LANES)
    if not strange:
        start = mean + deviation * score if limit < 0 else np.float32(np.nan)
        bracket = _search(row, n, k, (low, high, start), limit)
        if limit >= 0:
            bracket = _with_the_top(row, n, k, high, bracket)
        _chosen(row, n, bracket, np.int64(0), out)
    return not strange


@njit
def _rows(source: int, shape: Any, options: Any, begin: int, end: int, to: Any) -> None:
    """`select` of the rows from `begin` to before `end`."""
    _, n, k = shape
    kind, limit, ranked = options
    values, columns = to
    wide = np.empty(n + LANES, np.float32)
    candidates = np.empty(n + LANES, np.float32)
    names = np.empty(n + LANES, np.int32)
    columns_found = np.empty(k + LANES, np.int32)
    order = np.empty(k + LANES, np.int32)
    keys = np.empty((2, k), np.uint32)
    scratch = (address(candidates), address(names), address(columns_found))
    score = _normal(k / n)
    for r in range(begin, end):
        row = source + r * n * (4 if kind == FLOAT32 else 2)
        if kind != FLOAT32:
            copied(row, n, kind, address(wide))
            row = address(wide)
        done = False
        if ranked and n <= _NARROW and limit < 0:
            copied(row, n, np.int64(FLOAT32), address(candidates))
            done = _first_of_few(address(candidates), n, k, names, columns_found)
        plain = done or _select(row, n, k, limit, score, scratch)
        if not plain:
            copied(row, n, np.int64(FLOAT32), address(wide))
            _chosen_with_nans(wide, n, k, names, columns_found)
        if ranked and not done:
            gathered(row, k, address(columns_found), address(candidates))
            if plain and k <= _FEW:
                _ranked(address(candidates), k, columns_found, names, order)
            else:
                _dealt(candidates, k, columns_found, keys, order)
        for j in range(0, k, LANES):
            valid = ALL if j + LANES <= k else tail_lanes(k)
            store_wide(columns + 8 * (r * k + j), load_ints(address(columns_found) + 4 * j), valid)
        gathered(row, k, address(columns_found), values + 4 * r * k)


@jit(
    "(int64, UniTuple(int64, 3), UniTuple(int64, 3), int64, UniTuple(int64, 2))",
    parallel=True,
    uses=(simd, row_passes),
)
def select(source: int, shape: Any, options: Any, pieces: int, to: Any) -> None:
    """The k largest of every row. Addresses: to pass two arrays takes as long as to search a hundred rows.

    Args:
        source: address of the elements [rows, width], contiguous.
        shape: rows, width >= 16, k with 0 < k < width.
        options: what the elements are; how many times a row's bracket is halved (negative: until it is exact);
            whether the values shall fall (1) or the columns rise (0).
        pieces: how many runs of rows are shared out to threads.
        to: addresses of the values [rows, k], float32 (16-bit elements come out widened), and of their columns, int64.
    """
    for piece in numba.prange(pieces):
        _rows(source, shape, options, piece * shape[0] // pieces, (piece + 1) * shape[0] // pieces, to)


@jit("(int64, UniTuple(int64, 3), UniTuple(int64, 3), UniTuple(int64, 2))", uses=(simd, row_passes))
def select_alone(source: int, shape: Any, options: Any, to: Any) -> None:
    """`select` on the thread that calls it: waking others takes as long as to search 20,000 elements."""
    _rows(source, shape, options, 0, shape[0], to)


@njit
def _back(gradient: Any, columns: Any, begin: int, end: int, to: Any) -> None:
    for r in range(begin, end):
        to[r] = 0
        for j in range(columns.shape[1]):
            to[r, columns[r, j]] = gradient[r, j]


@jit("(float32[:, ::1], int64[:, ::1], int64, float32[:, ::1])", parallel=True)
def back(gradient: Any, columns: Any, pieces: int, to: Any) -> None:
    """The gradient of the rows [rows, width] from that of the values kept [rows, k]: zero at all other columns."""
    rows = to.shape[0]
    for piece in numba.prange(pieces):
        _back(gradient, columns, piece * rows // pieces, (piece + 1) * rows // pieces, to)
