"""Compiled for small graphs: from each component's first node and from one far from it, the narrower order is kept.

A traversal tells the bandwidth by the way: a node's furthest neighbour behind it is the last one that it reached first,
and where it reached none, the distance from the node that reached the last one is greater. So the second traversal ends
as soon as it is no better. The first node of a component is the first of least degree in NumPy's argsort: the start of
SciPy's reverse Cuthill-McKee, whose bandwidth is therefore never smaller.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit, njit
from espalier.sparse.rcmpp import pattern_passes
from espalier.sparse.rcmpp.pattern_passes import mixed

ZERO, ONE, TWO, THREE, HALF = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(32)
FEW = np.uint64(24)
"""Children up to here are sorted by insertion."""
READY, ASYMMETRIC, WRONG = 0, 1, 2


@jit("(int64[::1], int64[::1], int32[::1], int32[::1])")
def shortened(indptr: Any, indices: Any, short_indptr: Any, short_indices: Any) -> Any:
    """Both arrays in int32; whether no number was too large for it."""
    lost = np.int64(0)
    for at in range(len(indptr)):
        short_indptr[at] = np.int32(indptr[at])
        lost |= indptr[at] ^ np.int64(short_indptr[at])
    for at in range(len(indices)):
        short_indices[at] = np.int32(indices[at])
        lost |= indices[at] ^ np.int64(short_indices[at])
    return lost == 0


@jit("(int32[::1], int32[::1], int32[::1])", uses=(pattern_passes,))
def prepare(indptr: Any, indices: Any, degree: Any) -> Any:
    """Writes each node's degree, self-loops left out, of rows that ascend. Returns what the pattern is.

    READY: symmetric, as `pattern_passes.scan` finds it out; ASYMMETRIC, or a row does not ascend; WRONG: no square
    matrix.
    """
    nodes = np.uint64(len(degree))
    entries = np.uint64(len(indices))
    wrong = indptr[0] != 0 or np.uint64(indptr[nodes]) != entries
    for node in range(nodes):
        wrong |= indptr[node + ONE] < indptr[node]
    largest = np.uint32(0)
    falls = ZERO
    for entry in range(entries):
        largest = max(largest, np.uint32(indices[entry]))  # a negative id is a large one
    if wrong or (entries and largest >= nodes):
        return WRONG
    for entry in range(ONE, max(ONE, entries)):
        falls += np.uint64(indices[entry] <= indices[entry - ONE])
    asymmetry = ZERO
    for node in range(nodes):
        begin = np.uint64(indptr[node])
        stop = np.uint64(indptr[node + ONE])
        first = ZERO
        second = ZERO
        loops = ZERO
        for entry in range(begin, stop):
            other = np.uint64(indices[entry])
            value = mixed(other)
            first += value
            second += value >> HALF
            loops += np.uint64(other == node)
        if ZERO < begin < stop:  # it may fall from row to row
            falls -= np.uint64(indices[begin] <= indices[begin - ONE])
        value = mixed(node)
        asymmetry += (value >> HALF) * first - value * second
        degree[node] = stop - begin - loops
    return ASYMMETRIC if asymmetry or falls else READY


@njit
def sort_many(order: Any, degree: Any, key: Any, begin: Any, stop: Any) -> None:
    """Sorts order[begin:stop] by degree, then by id, with Shell's steps."""
    for place in range(begin, stop):
        key[place] = (np.uint64(degree[order[place]]) << HALF) | np.uint64(order[place])
    step: Any = ONE
    while THREE * (THREE * step + ONE) < stop - begin:
        step = THREE * step + ONE
    while step > ZERO:
        for place in range(begin + step, stop):
            value = key[place]
            at = place
            while at >= begin + step and key[at - step] > value:
                key[at] = key[at - step]
                at -= step
            key[at] = value
        step //= THREE
    for place in range(begin, stop):
        order[place] = np.uint32(key[place] & np.uint64(0xFFFFFFFF))


@njit
def traverse(rows: Any, degree: Any, root: Any, work: Any, stamp: Any, begin: Any, least: Any) -> Any:
    """Cuthill-McKee from `root` into the work's order from `begin`; ends where the bandwidth is `least` or more.

    Returns (bandwidth, width, first, stop): of the widest level, where the last begins, and where the order ends.
    """
    indptr, indices = rows
    order, key, mark = work
    order[begin] = root
    mark[root] = stamp
    bandwidth, width, first, low, tail = ZERO, ZERO, begin, begin, begin + ONE
    while low < tail and bandwidth < least:
        high = tail
        first = low
        width = max(width, high - low)
        for head in range(low, high):
            node = np.uint64(order[head])
            reached = tail
            for entry in range(np.uint64(indptr[node]), np.uint64(indptr[node + ONE])):
                other = np.uint64(np.uint32(indices[entry]))
                order[tail] = other  # there is room for one more; no branch that would be guessed wrongly
                tail += np.uint64(mark[other] != stamp)
                mark[other] = stamp
            if tail == reached:
                continue
            bandwidth = max(bandwidth, tail - ONE - head)
            if tail - reached > FEW:
                sort_many(order, degree, key, reached, tail)
                continue
            for place in range(reached + ONE, tail):
                child = order[place]
                at: Any = place
                while at > reached and degree[order[at - ONE]] > degree[child]:
                    order[at] = order[at - ONE]
                    at -= ONE
                order[at] = child
        low = high
    return bandwidth, width, first, tail


@jit("(int32[::1], int32[::1], int32[::1], int64[::1], int32[::1])", uses=(pattern_passes,))
def narrower(indptr: Any, indices: Any, degree: Any, roots: Any, out: Any) -> Any:
    """Orders all components, by the first of their nodes in `roots`, and reverses all. Returns (traversals, width)."""
    nodes = np.uint64(len(degree))
    order = np.empty(nodes + ONE, np.uint32)
    second = np.empty(nodes + ONE, np.uint32)
    key = np.empty(nodes, np.uint64)
    mark = np.zeros(nodes, np.uint8)
    rows = (indptr, indices)
    begin = ZERO
    done = ZERO
    widest = ZERO
    for place in range(nodes):
        root = np.uint64(roots[place])
        if mark[root]:
            continue
        if degree[root] == 0:
            order[begin] = root
            begin += ONE
            continue
        least, width, first, stop = traverse(rows, degree, root, (order, key, mark), np.uint8(1), begin, nodes)
        done += ONE
        far = np.uint64(order[first])
        for at in range(first, stop):
            node = np.uint64(order[at])
            if degree[node] < degree[far] or (degree[node] == degree[far] and node < far):
                far = node
        if least > ONE:  # less there is not, where there is an entry
            levels = traverse(rows, degree, far, (second, key, mark), np.uint8(2), begin, least)
            done += ONE
            if levels[0] < least:
                width = levels[1]
                order[begin:stop] = second[begin:stop]
        widest = max(widest, width)
        begin = stop
    for place in range(nodes):
        out[nodes - ONE - place] = order[place]
    return done, widest
