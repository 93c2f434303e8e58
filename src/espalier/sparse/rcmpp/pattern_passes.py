"""Compiled for the CPU: passes over the entries of a pattern. Is it symmetric, which rows are equal, how wide is it?

Everything is unsigned: an index that cannot be negative spares numba the test for it, three times faster in such loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit, njit

ZERO, ONE = np.uint64(0), np.uint64(1)
MIXED, FOLDED = np.uint64(0xBF58476D1CE4E5B9), np.uint64(30)
"""A multiplier and shift of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
HALF = np.uint64(32)
BITS = np.uint64(63)


@njit
def mixed(node: Any) -> Any:
    """A number that looks random, the same for the same id."""
    value = (node + ONE) * MIXED
    return (value ^ (value >> FOLDED)) * MIXED


@jit("(uint64[::1], uint32[::1], uint32[::1], uint64[::1])")
def scan(indptr: Any, indices: Any, degree: Any, sums: Any) -> Any:
    """Writes each node's degree without self-loops and, if `sums` is as long, a sum of its row's mixed ids.

    Returns (asymmetry, disorder). asymmetry: sum over entries (u, v) of a(u)·b(v) - b(u)·a(v) modulo 2⁶⁴, for two
    mixtures a and b of an id: zero for a symmetric pattern, else zero by an accident of about 2⁻⁶⁰, at the price of
    a worse order. disorder: entries that do not ascend within their row.
    """
    asymmetry = ZERO
    disorder = ZERO
    entry = np.uint64(indptr[0])
    for node in range(np.uint64(len(degree))):
        stop = indptr[node + ONE]
        begin = entry
        first = ZERO
        second = ZERO
        loops = ZERO
        while entry < stop:
            other = np.uint64(indices[entry])
            value = mixed(other)
            first += value
            second += value >> HALF
            loops += np.uint64(other == node)
            entry += ONE
        for place in range(begin + ONE, max(stop, begin + ONE)):
            disorder += np.uint64(indices[place] <= indices[place - ONE])
        value = mixed(node)
        asymmetry += (value >> HALF) * first - value * second
        degree[node] = stop - begin - loops
        if len(sums) == len(degree):
            sums[node] = first
    return asymmetry, disorder


@jit("boolean(uint64[::1], uint32[::1])")
def repeats(indptr: Any, indices: Any) -> Any:
    """Whether any row names a node twice; rows in any order."""
    size = np.uint64(len(indptr)) - ONE
    seen = np.zeros(size, np.uint32)
    for node in range(size):
        begin = indptr[node]
        stop = indptr[node + ONE]
        bits = ZERO
        clash = False
        for entry in range(begin, stop):
            bit = ONE << (np.uint64(indices[entry]) & BITS)
            clash |= (bits & bit) != ZERO
            bits |= bit
        if clash:  # two ids agree in their last six bits: look closer
            for entry in range(begin, stop):
                if seen[indices[entry]] == node + ONE:
                    return True
                seen[indices[entry]] = node + ONE
    return False


@jit("(uint64[::1], uint32[::1])")
def united(indptr: Any, indices: Any) -> Any:
    """The rows of A + Aᵀ: each neighbour once, no self-loops. Returns (indptr, indices)."""
    size = np.uint64(len(indptr)) - ONE
    turned = np.zeros(len(indptr) + 1, np.uint64)
    for entry in range(np.uint64(len(indices))):
        turned[np.uint64(indices[entry]) + ONE + ONE] += ONE
    for node in range(size):
        turned[node + ONE] += turned[node]
    sources = np.empty(len(indices), np.uint32)
    for node in range(size):
        for entry in range(indptr[node], indptr[node + ONE]):
            place = np.uint64(indices[entry]) + ONE
            sources[turned[place]] = node
            turned[place] += ONE
    offsets = np.zeros(len(indptr), np.uint64)
    joined = np.empty(2 * len(indices), np.uint32)
    seen = np.zeros(size, np.uint32)
    filled = ZERO
    for node in range(size):
        stamp = np.uint32(node + ONE)
        seen[node] = stamp
        for entry in range(indptr[node], indptr[node + ONE]):
            other = indices[entry]
            if seen[other] != stamp:
                seen[other] = stamp
                joined[filled] = other
                filled += ONE
        for entry in range(turned[node], turned[node + ONE]):
            other = sources[entry]
            if seen[other] != stamp:
                seen[other] = stamp
                joined[filled] = other
                filled += ONE
        offsets[node + ONE] = filled
    return offsets, joined[:filled].copy()


@jit("(uint64[::1], uint32[::1])")
def ascending(indptr: Any, indices: Any) -> Any:
    """The ids of a symmetric pattern, ascending within each row."""
    filled = indptr.copy()
    turned = np.empty(len(indices), np.uint32)
    for node in range(np.uint64(len(indptr)) - ONE):
        for entry in range(indptr[node], indptr[node + ONE]):
            place = filled[indices[entry]]
            turned[place] = node
            filled[indices[entry]] = place + ONE
    return turned


@jit("uint64(uint32[::1], uint64[::1], boolean[::1])")
def twins(degree: Any, sums: Any, same: Any) -> Any:
    """Marks each node whose row names the same nodes as that of a node before it; returns how many there are.

    Rows are compared by length and by their sums of mixed ids (64 bits).
    """
    places = ONE
    while places < np.uint64(2 * len(degree)):
        places += places
    table = np.zeros(places, np.uint32)
    count = ZERO
    for node in range(np.uint64(len(degree))):
        place = (sums[node] ^ (sums[node] >> HALF)) & (places - ONE)
        while table[place] != ZERO:
            other = np.uint64(table[place]) - ONE
            if sums[other] == sums[node] and degree[other] == degree[node]:
                same[node] = True
                count += ONE
                break
            place = (place + ONE) & (places - ONE)
        if not same[node]:
            table[place] = node + ONE
    return count


@jit("(uint32[::1], uint32[::1], uint32[::1])")
def ranked(degree: Any, by_rank: Any, rank: Any) -> None:
    """Sorts the nodes by degree, then by id: `by_rank` [nodes], and each node's place in it, `rank`."""
    most = ZERO
    for node in range(np.uint64(len(degree))):
        most = max(most, np.uint64(degree[node]))
    places = np.zeros(most + ONE + ONE, np.uint64)
    for node in range(np.uint64(len(degree))):
        places[np.uint64(degree[node]) + ONE] += ONE
    for value in range(most):
        places[value + ONE] += places[value]
    for node in range(np.uint64(len(degree))):
        place = places[degree[node]]
        places[degree[node]] = place + ONE
        by_rank[place] = node
        rank[node] = place


@jit("(uint64[::1], uint32[::1], uint32[::1])")
def spread(indptr: Any, indices: Any, position: Any) -> Any:
    """(bandwidth, profile) of A + Aᵀ when node u stands at position[u]."""
    size = np.uint64(len(position))
    first = np.empty(size, np.uint32)
    bandwidth = ZERO
    profile = ZERO
    for place in range(size):
        first[place] = place
    for node in range(size):
        own_position = position[node]
        for entry in range(indptr[node], indptr[node + ONE]):
            there = position[indices[entry]]
            low = min(own_position, there)
            high = max(own_position, there)
            bandwidth = max(bandwidth, np.uint64(high - low))
            first[high] = min(first[high], low)
    for place in range(size):
        profile += place - np.uint64(first[place])
    return bandwidth, profile


@jit("uint64(uint64[::1], uint32[::1], uint32[::1], uint32[::1], uint64, uint64)")
def touched(indptr: Any, indices: Any, old: Any, new: Any, window: Any, page: Any) -> Any:
    """Sum over windows of `window` rows of the different pages of `page` columns that their entries lie on.

    Row `place` of the ordered matrix is row old[place]; its column c is the ordered matrix's column new[c].
    """
    unit = np.uint64(1)
    nodes = np.uint64(len(old))
    seen = np.zeros(nodes // page + unit, np.uint32)
    count = np.uint64(0)
    stamp = np.uint32(0)
    for place in range(nodes):
        stamp = np.uint32(place // window + unit)
        node = np.uint64(old[place])
        for entry in range(indptr[node], indptr[node + unit]):
            at = np.uint64(new[indices[entry]]) // page
            if seen[at] != stamp:
                seen[at] = stamp
                count += unit
    return count
