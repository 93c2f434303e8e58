"""Kernels that write rows as differences from their parents, read them back, and cut the tree to pieces of work."""

# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

import numba
import numpy as np

from espalier.kernels.numba_compile import jit, njit


@njit
def _walk(indices, start, end, other, last, plus, at, minus, below):  # type: ignore[no-untyped-def]
    """Merges two ascending lists: what only the first has goes to `plus`, only the second to `minus`; the new ends."""
    while start < end or other < last:
        if other == last or (start < end and indices[start] < indices[other]):
            if len(plus):
                plus[at] = indices[start]
            at += 1
            start += 1
        elif start == end or indices[other] < indices[start]:
            if len(minus):
                minus[below] = indices[other]
            below += 1
            other += 1
        else:
            start += 1
            other += 1
    return at, below


@jit("(int64[::1], int32[::1], int32[::1], int32[::1], int64[::1], int64[::1])", parallel=True)
def measure(indptr, indices, order, parent, more, less):  # type: ignore[no-untyped-def]
    """more[p], less[p]: what row order[p] has more and less than its parent."""
    nothing = np.empty(0, np.int32)
    for p in numba.prange(len(order)):
        v = order[p]
        above = parent[v]
        start, end = (indptr[above], indptr[above + 1]) if above >= 0 else (np.int64(0), np.int64(0))
        more[p], less[p] = _walk(indices, indptr[v], indptr[v + 1], start, end, nothing, 0, nothing, 0)


@jit(
    "(int64[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1])",
    parallel=True,
)
def write(indptr, indices, order, parent, plus_ptr, plus, minus_ptr, minus):  # type: ignore[no-untyped-def]
    """Fills `plus` and `minus` at the offsets of each row of `order`."""
    for p in numba.prange(len(order)):
        v = order[p]
        above = parent[v]
        start, end = (indptr[above], indptr[above + 1]) if above >= 0 else (np.int64(0), np.int64(0))
        _walk(indices, indptr[v], indptr[v + 1], start, end, plus, plus_ptr[p], minus, minus_ptr[p])


@jit("(int32[::1], int32[::1], int32[::1], int32[::1], int64[::1])")
def restored_degrees(order, parent, plus_ptr, minus_ptr, degrees):  # type: ignore[no-untyped-def]
    """The entries of every row [rows]."""
    for p in range(len(order)):
        more = (plus_ptr[p + 1] - plus_ptr[p]) - (minus_ptr[p + 1] - minus_ptr[p])
        degrees[order[p]] = more + (degrees[parent[p]] if parent[p] >= 0 else 0)


@jit("(int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int64[::1], int32[::1])")
def restore(order, parent, plus_ptr, plus, minus_ptr, minus, indptr, indices):  # type: ignore[no-untyped-def]
    """The entries of every row, ascending, at the offsets `indptr`."""
    for p in range(len(order)):
        v = order[p]
        at = indptr[v]
        above = parent[p]
        entry = indptr[above] if above >= 0 else np.int64(0)
        end = indptr[above + 1] if above >= 0 else np.int64(0)
        more = plus_ptr[p]
        less = minus_ptr[p]
        while entry < end or more < plus_ptr[p + 1]:
            if entry < end and less < minus_ptr[p + 1] and indices[entry] == minus[less]:
                entry += 1
                less += 1
            elif entry < end and (more == plus_ptr[p + 1] or indices[entry] < plus[more]):
                indices[at] = indices[entry]
                at += 1
                entry += 1
            else:
                indices[at] = plus[more]
                at += 1
                more += 1


@jit("int32[::1](int32[::1], int32[::1], int64[::1], int64)")
def cut_branches(order, parent, weights, most):  # type: ignore[no-untyped-def]
    """The parents when every subtree that weighs `most` by itself hangs at the root; `weights` [rows] of each row."""
    heavy = weights.copy()
    parents = parent.copy()
    for p in range(len(order) - 1, -1, -1):
        v = order[p]
        if parents[v] >= 0:
            if heavy[v] >= most:
                parents[v] = -1
            else:
                heavy[parents[v]] += heavy[v]
    return parents
