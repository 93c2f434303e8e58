"""Compiled for the CPU: Cuthill-McKee traversals and the three node finders. Equal to the plain form, node for node.

After Hou, Liu and Zhu, arXiv 2409.04171. Everything is unsigned, as in pattern_passes.py. A byte per node says which
traversal saw it last, so that nothing is cleared between traversals. Rows about to be read are fetched ahead. Of nodes
with equal rows only the first is read.
"""
# ruff: noqa: C901, PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from espalier.kernels.numba_compile import fetch_line, intrinsic, jit, njit

ZERO, ONE, TWO, THREE = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
AHEAD = np.uint64(6)
"""How many nodes ahead a row is fetched: without that, shuffled grids of 10⁵ to 10⁶ nodes took 2 to 3 times as long."""
LISTED = np.uint64(8)
"""Nodes of a last level that are kept as further starts."""
LAST_STAMP = np.uint8(250)
"""Marks are bytes; before they overflow, those of the component are cleared."""
SLIGHT = np.uint64(16)
"""A walk that found a 16th more levels, or less, is at its end: going on cost a quarter to a half of the time on meshes
of 10⁵ nodes; over 88 real matrices and meshes, bandwidths and profiles were on average the same within 0.2 %."""
BI_CRITERIA, GEORGE_LIU, MIND = 0, 1, 2
EVERYTHING = np.uint64(2**63)
STRIDE = np.uint64(0x9E3779B1)
"""2³² over the golden ratio, odd: spreads the starts of further walks over the component."""


def _fetch(typing: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of array[index] without waiting for it."""

    def write(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        place = values[1] if values[1].type.width == 64 else builder.zext(values[1], ir.IntType(64))
        fetch_line(builder, builder.bitcast(builder.gep(data, [place]), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(array, index), write


fetch: Any = intrinsic(_fetch)


@njit
def by_key(order: Any, key: Any, begin: Any, stop: Any) -> None:
    """Sorts order[begin:stop] by key[begin:stop], and the keys with it: insertion for few, Shell's steps for many."""
    step: Any = ONE
    while THREE * (THREE * step + ONE) < stop - begin:
        step = THREE * step + ONE
    while step > ZERO:
        for place in range(begin + step, stop):
            node = order[place]
            value = key[place]
            at = place
            while at >= begin + step and key[at - step] > value:
                order[at] = order[at - step]
                key[at] = key[at - step]
                at -= step
            order[at] = node
            key[at] = value
        step //= THREE


@njit
def traverse(rows: Any, rank: Any, root: Any, work: Any, stamp: Any, size: Any, limit: Any) -> Any:
    """Cuthill-McKee from `root` over its component of at most `size` nodes, into the work's order.

    Once a level is wider than `limit`, nodes are no longer sorted within theirs: such an order will not be kept.

    Returns (nodes, depth, width, first): nodes reached, number of levels, nodes of the widest, where the last begins.
    """
    indptr, indices, same, any_same = rows
    order, key, mark, _ = work
    order[0] = root
    mark[root] = stamp
    depth, width, first, low, tail = ZERO, ZERO, ZERO, ZERO, ONE
    while low < tail:
        high = tail
        first = low
        depth += ONE
        width = max(width, high - low)
        if tail == size:
            break
        for head in range(low, high):
            if head + AHEAD < tail:
                fetch(indices, indptr[order[head + AHEAD]])
            node = np.uint64(order[head])
            if any_same and same[node] and head != ZERO:
                continue  # its twin came before it and left nothing
            begin = tail
            for entry in range(indptr[node], indptr[node + ONE]):
                other = indices[entry]
                if mark[other] != stamp:
                    mark[other] = stamp
                    fetch(indptr, other)
                    order[tail] = other
                    tail += ONE
            if width <= limit and tail - begin > ONE:
                for place in range(begin, tail):
                    key[place] = rank[order[place]]
                by_key(order, key, begin, tail)
        low = high
    return tail, depth, width, first


@njit
def reach(rows: Any, work: Any, size: Any) -> Any:
    """Bandwidth and profile of the reverse of the order of one component."""
    indptr, indices, _, _ = rows
    order, _, _, position = work
    for place in range(size):
        position[order[place]] = place
    bandwidth = ZERO
    profile = ZERO
    for place in range(size):
        node = np.uint64(order[place])
        last = np.uint32(place)
        for entry in range(indptr[node], indptr[node + ONE]):
            last = max(last, position[indices[entry]])
        further = np.uint64(last) - place
        bandwidth = max(bandwidth, further)
        profile += further
    return bandwidth, profile


@njit
def shortlist(order: Any, rank: Any, first: Any, size: Any, listed: Any, begin: Any) -> Any:
    """Writes the last level's nodes of least rank into `listed` from `begin`, in that order; returns how many."""
    stop = begin
    full = begin + LISTED
    for place in range(first, size):
        node = order[place]
        if stop == full and rank[listed[stop - ONE]] < rank[node]:
            continue
        stop = min(stop + ONE, full)
        at = stop - ONE
        while at > begin and rank[listed[at - ONE]] > rank[node]:
            listed[at] = listed[at - ONE]
            at -= ONE
        listed[at] = node
    return stop - begin


@njit
def score(rows: Any, work: Any, size: Any, width: Any, trials: Any) -> Any:
    """What the bi-criteria finder makes least: the width, or bandwidth times profile where there is time to measure."""
    if trials == ZERO:
        return np.float64(width)
    bandwidth, profile = reach(rows, work, size)
    return np.float64(bandwidth) * np.float64(profile)


@njit
def next_stamp(work: Any, size: Any, stamp: Any) -> Any:
    """A mark that no node of the component bears yet."""
    if stamp < LAST_STAMP:
        return np.uint8(stamp + np.uint8(1))
    order, _, mark, _ = work
    for place in range(size):
        mark[order[place]] = np.uint8(0)
    return np.uint8(1)


@njit
def component(rows: Any, rank: Any, root: Any, work: Any, out: Any, begin: Any, choice: Any) -> Any:
    """Orders the component of `root`, its node of least rank, into `out` from `begin`.

    Walks first, then trials of the nodes on the last two levels that the last walk reached. One loop, so that the
    traversal is compiled once. Returns (nodes, traversals, width of the kept traversal).
    """
    finder, restarts, trials = choice
    order = work[0]
    listed, counts = np.empty(2 * LISTED, np.uint32), np.zeros(2, np.uint64)
    best, kept_width, deepest, side = np.inf, ZERO, ZERO, ZERO
    size, stamp, start, done = np.uint64(len(out)) - begin, np.uint8(0), root, ZERO
    walk, trial, tried = ZERO, ZERO, ZERO
    by_width = finder == BI_CRITERIA and trials == ZERO and restarts == ONE
    sorted_: Any = False
    last = False
    while True:
        stamp = next_stamp(work, size, stamp)
        # The first start is seldom the best: its levels are counted, and only if it is, they are sorted at the end.
        limit = kept_width if by_width and not last else EVERYTHING
        size, depth, width, first = traverse(rows, rank, start, work, stamp, size, limit)
        done += ONE
        if width == ONE and size > ONE:  # a path from its end: there is no narrower order
            out[begin : begin + size] = order[:size]
            return size, done, width
        walking = walk < restarts
        enough = deepest // SLIGHT if finder == BI_CRITERIA else ZERO
        stops = finder == MIND or depth <= deepest + enough
        value = score(rows, work, size, width, trials) if finder == BI_CRITERIA else -np.float64(depth)
        eligible = finder == BI_CRITERIA or stops
        if last or (eligible and (value < best or (value == best and walking and finder == BI_CRITERIA))):
            best, kept_width, sorted_ = value, width, done > ONE or not by_width
            for place in range(size):
                out[begin + place] = order[place]
        if last:
            return size, done, kept_width
        if walking:
            side = ONE - side
            counts[side] = shortlist(order, rank, first, size, listed, side * LISTED)
            if not stops:
                deepest, start = depth, np.uint64(listed[side * LISTED])
                continue
            walk, deepest = walk + ONE, ZERO
            if walk < restarts:
                start = np.uint64(out[begin + walk * STRIDE % size])
                continue
        half = (side + trial // LISTED) % TWO
        if trial < LISTED + LISTED and trial % LISTED == counts[half]:
            trial, half = trial + LISTED - counts[half], ONE - half
        if tried == trials or trial == LISTED + LISTED:
            if sorted_:
                return size, done, kept_width
            last, start = True, root
            continue
        start = np.uint64(listed[half * LISTED + trial % LISTED])
        trial, tried = trial + ONE, tried + ONE


@jit(
    "(uint64[::1], uint32[::1], boolean[::1], boolean, uint32[::1], uint32[::1], uint32[::1], "
    "uint64, uint64, uint64, uint32[::1])"
)
def cuthill_mckee(
    indptr: Any,
    indices: Any,
    same: Any,
    any_same: Any,
    degree: Any,
    by_rank: Any,
    rank: Any,
    finder: Any,
    restarts: Any,
    trials: Any,
    out: Any,
) -> Any:
    """Orders all components, by their nodes of least rank. Returns (traversals, greatest width of those kept)."""
    nodes = len(degree)
    work = (
        np.empty(nodes, np.uint32),
        np.empty(nodes, np.uint32),
        np.zeros(nodes, np.uint8),
        np.empty(nodes if trials > ZERO else 0, np.uint32),
    )
    rows = (indptr, indices, same, any_same)
    choice = (finder, restarts, trials)
    done = ZERO
    widest = ZERO
    filled = ZERO
    for place in range(np.uint64(nodes)):
        root = np.uint64(by_rank[place])
        if degree[root] == ZERO:
            out[filled] = root
            filled += ONE
        elif work[2][root] == ZERO:
            size, traversals, width = component(rows, rank, root, work, out, filled, choice)
            filled += size
            done += traversals
            widest = max(widest, width)
    return done, widest
