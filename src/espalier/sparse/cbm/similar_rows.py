"""Kernels that find similar rows and join them to a tree: intersections, MinHash, minimum spanning tree.

Rows are sets of columns; h(u, v) = d_u + d_v - 2·|u ∩ v| is the length of their difference. A pair is worth listing
where writing one row as its difference from the other saves more than `alpha` entries: 2·|u ∩ v| - d_u > alpha for the
child v, or the same with u and v exchanged.
"""

# ruff: noqa: C901, PLR0912, PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

import numba
import numpy as np

from espalier.kernels.numba_compile import jit


@jit("(uint64[::1], uint32[::1], uint64[::1], uint32[::1], int64, int64, int64)")
def overlaps(indptr, indices, column_ptr, column_rows, first, last, alpha):  # type: ignore[no-untyped-def]
    """All pairs u < v, first <= v < last, worth listing: (u, v, h). Counts the rows of A·Aᵀ one by one (Gustavson).

    `column_ptr`, `column_rows`: the rows of each column, ascending. Unsigned, since an id that might be negative costs
    a test at every use.
    """
    rows = len(indptr) - 1
    shared = np.zeros(rows, np.int32)
    met = np.empty(rows, np.int32)
    us = np.empty(1024, np.int32)
    vs = np.empty(1024, np.int32)
    hs = np.empty(1024, np.int32)
    pairs = 0
    unit = np.uint64(1)
    for row in range(first, last):
        v = np.uint64(row)
        count = 0
        for e in range(indptr[v], indptr[v + unit]):
            for t in range(column_ptr[indices[e]], column_ptr[indices[e] + unit]):
                u = column_rows[t]
                if u >= v:
                    break
                if shared[u] == 0:
                    met[count] = u
                    count += 1
                shared[u] += 1
        length = np.int64(indptr[v + unit] - indptr[v])
        for m in range(count):
            u = np.uint64(met[m])
            there = np.int64(indptr[u + unit] - indptr[u])
            if 2 * shared[u] - min(length, there) > alpha:
                if pairs == len(us):
                    us = np.concatenate((us, np.empty_like(us)))
                    vs = np.concatenate((vs, np.empty_like(vs)))
                    hs = np.concatenate((hs, np.empty_like(hs)))
                us[pairs] = u
                vs[pairs] = v
                hs[pairs] = length + there - 2 * shared[u]
                pairs += 1
            shared[u] = 0
    return us[:pairs].copy(), vs[:pairs].copy(), hs[:pairs].copy()


@jit("(uint32[:, ::1], int64[::1], int32[::1], uint64[::1])", parallel=True)
def signatures(least, indptr, indices, factors):  # type: ignore[no-untyped-def]
    """least[v, k]: the least hash of row v's columns under the k-th hash function (multiply and shift); MinHash."""
    for v in numba.prange(len(indptr) - 1):
        for k in range(len(factors)):
            smallest = np.uint32(0xFFFFFFFF)
            for e in range(indptr[v], indptr[v + 1]):
                mixed = np.uint64(indices[e] + 1) * factors[k]
                mixed ^= mixed >> np.uint64(29)
                smallest = min(smallest, np.uint32((mixed * factors[k]) >> np.uint64(32)))
            least[v, k] = smallest


@jit("(int64[::1], int32[::1], int32[::1], uint32[:, ::1], int64, int64, int64, int64, int64)")
def near(indptr, indices, order, least, window, first, last, alpha, columns):  # type: ignore[no-untyped-def]
    """Pairs worth listing among rows at most `window` places apart in `order`, places first to last: (u, v, h).

    Only pairs of which at least a quarter of the signatures agree are compared entry by entry.
    """
    stamp = np.full(columns, -1, np.int32)
    room = (last - first) * window
    us = np.empty(room, np.int32)
    vs = np.empty(room, np.int32)
    hs = np.empty(room, np.int32)
    count = 0
    for place in range(first, last):
        v = order[place]
        length = indptr[v + 1] - indptr[v]
        marked = False
        for other in range(place + 1, min(place + 1 + window, len(order))):
            u = order[other]
            agree = 0
            for k in range(least.shape[1]):
                agree += least[u, k] == least[v, k]
            if 4 * agree < least.shape[1]:
                continue
            if not marked:
                for e in range(indptr[v], indptr[v + 1]):
                    stamp[indices[e]] = v
                marked = True
            there = indptr[u + 1] - indptr[u]
            shared = 0
            for e in range(indptr[u], indptr[u + 1]):
                shared += stamp[indices[e]] == v
            if 2 * shared - min(length, there) > alpha:
                us[count] = min(u, v)
                vs[count] = max(u, v)
                hs[count] = length + there - 2 * shared
                count += 1
    return us[:count].copy(), vs[:count].copy(), hs[:count].copy()


@jit("int32[::1](int64[::1], int32[::1], int32[::1], int32[::1])")
def spanning_tree(degrees, us, vs, hs):  # type: ignore[no-untyped-def]
    """The parent of each row in a minimum spanning tree of the pairs and a root -1 at distance `degrees` of each row.

    Kruskal's algorithm; lengths are small integers, so they are sorted by counting. At equal length the root wins.
    """
    rows, pairs = len(degrees), len(us)
    longest = 0
    for v in range(rows):
        longest = max(longest, degrees[v])
    starts = np.zeros(2 * longest + 3, np.int64)
    for p in range(pairs):
        if hs[p] < longest:
            starts[2 * hs[p] + 2] += 1
    for v in range(rows):
        starts[2 * degrees[v] + 1] += 1
    for key in range(len(starts) - 1):
        starts[key + 1] += starts[key]
    sorted_ = np.empty(starts[-1], np.int64)  # a pair's number, or pairs + the row that the root is joined to
    for v in range(rows):
        sorted_[starts[2 * degrees[v]]] = pairs + v
        starts[2 * degrees[v]] += 1
    for p in range(pairs):
        if hs[p] < longest:
            sorted_[starts[2 * hs[p] + 1]] = p
            starts[2 * hs[p] + 1] += 1
    group = np.arange(rows + 1)
    ends = np.empty((rows, 2), np.int64)
    taken = 0
    for s in range(len(sorted_)):
        p = sorted_[s]
        a, b = (p - pairs, rows) if p >= pairs else (np.int64(us[p]), np.int64(vs[p]))
        left, right = a, b
        while group[left] != left:
            group[left] = group[group[left]]
            left = group[left]
        while group[right] != right:
            group[right] = group[group[right]]
            right = group[right]
        if left != right:
            group[left] = right
            ends[taken, 0], ends[taken, 1] = a, b
            taken += 1
    near_ptr = np.zeros(rows + 2, np.int64)
    for t in range(taken):
        near_ptr[ends[t, 0] + 1] += 1
        near_ptr[ends[t, 1] + 1] += 1
    for v in range(rows + 1):
        near_ptr[v + 1] += near_ptr[v]
    neighbours, filled = np.empty(2 * taken, np.int64), near_ptr.copy()
    for t in range(taken):
        for side in range(2):
            neighbours[filled[ends[t, side]]] = ends[t, 1 - side]
            filled[ends[t, side]] += 1
    parent = np.full(rows + 1, -2, np.int32)
    queue = np.empty(rows + 1, np.int64)
    queue[0], head, tail = rows, 0, 1
    parent[rows] = -1
    while head < tail:
        at = queue[head]
        head += 1
        for t in range(near_ptr[at], near_ptr[at + 1]):
            child = neighbours[t]
            if parent[child] == -2:
                parent[child] = -1 if at == rows else at
                queue[tail] = child
                tail += 1
    return parent[:rows].copy()


@jit("int32[::1](int32[::1])")
def preorder(parent):  # type: ignore[no-untyped-def]
    """The rows with each parent before its children and each subtree in one piece; -1 is the root."""
    rows = len(parent)
    first = np.full(rows + 1, -1, np.int64)
    following = np.full(rows, -1, np.int64)
    for v in range(rows - 1, -1, -1):
        above = parent[v] if parent[v] >= 0 else rows
        following[v] = first[above]
        first[above] = v
    order = np.empty(rows, np.int32)
    stack = np.empty(rows + 1, np.int64)
    placed = 0
    height = 0
    if rows:
        stack[0] = first[rows]
        height = 1
    while height:
        v = stack[height - 1]
        if v < 0:
            height -= 1
            continue
        stack[height - 1] = following[v]
        order[placed] = v
        placed += 1
        stack[height] = first[v]
        height += 1
    return order[:placed].copy()
