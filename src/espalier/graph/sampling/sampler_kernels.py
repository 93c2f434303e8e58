"""Kernels of the neighbour sampler, in numba: draw, renumber, transpose. See `neighbor_sampler` for their use.

Random numbers are counter-based (Salmon et al., SC 2011): a hash of (seed, step, layer, node, draw), mixed as in
SplitMix64 (Steele et al., OOPSLA 2014), so no thread has a state. Loads numba; imported on first use.
"""

from __future__ import annotations

import numba
import numpy as np

from espalier.kernels import split_mix
from espalier.kernels.numba_compile import jit, njit

FEW = 48
"""Up to so many draws, looking through those already drawn (quadratic) beats passing over all neighbours."""

_INDEX = ("int32", "int64")


mixed = njit(split_mix.mixed)


@njit
def below(key, draw, bound):  # type: ignore[no-untyped-def]
    """Draw number `draw` of the stream `key`, in [0, bound); bound below 2^32."""
    word = mixed(key + np.uint64(draw + 1) * np.uint64(0x9E3779B97F4A7C15))
    return np.int64(((word >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


@jit("(int64[::1], int64[::1], int64[::1], int64, boolean)")
def count(nodes, indptr, ptr, fanout, loops):  # type: ignore[no-untyped-def]
    """Fills `ptr` [len(nodes) + 1] with where each node's drawn edges begin."""
    total = 0
    for at in range(len(nodes)):
        ptr[at] = total
        degree = indptr[nodes[at] + 1] - indptr[nodes[at]]
        total += degree if fanout < 0 else min(degree, fanout)
        if loops:
            total += 1
    ptr[len(nodes)] = total


@njit
def choose(node, first, degree, place, stop, key, edges):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Fills `edges[place:stop]` with edges of `node`, `degree` from `first` on, drawn without replacement: by Floyd's
    sampling where few are drawn, by selection sampling (Knuth's S) where many are."""
    wanted = stop - place
    if wanted == degree:
        for j in range(degree):
            edges[place + j] = first + j
        return
    stream = mixed(key ^ mixed(np.uint64(node)))
    if wanted <= FEW:
        for j in range(wanted):
            top = degree - wanted + j
            chosen = below(stream, j, top + 1)
            for before in range(place, place + j):
                if edges[before] == first + chosen:
                    chosen = top
                    break
            edges[place + j] = first + chosen
        return
    taken = 0
    for j in range(degree):
        if taken < wanted and below(stream, j, degree - j) < wanted - taken:
            edges[place + taken] = first + j
            taken += 1


@jit(
    *(f"(int64[::1], int64[::1], {i}[::1], int64[::1], uint64, boolean, int64[::1], int64[::1])" for i in _INDEX),
    parallel=True,
    uses=(split_mix,),
)
def draw(nodes, indptr, indices, ptr, key, loops, sources, edges):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Draws each node's edges without replacement: `edges` are the places of `sources` in `indices` (-1: its
    loop, which comes first)."""
    for at in numba.prange(len(nodes)):
        node = nodes[at]
        place = ptr[at]
        stop = ptr[at + 1]
        if loops:
            sources[place] = node
            edges[place] = -1
            place += 1
        choose(node, indptr[node], indptr[node + 1] - indptr[node], place, stop, key, edges)
        for j in range(place, stop):
            sources[j] = indices[edges[j]]


@jit("(int64[::1], int64[::1], int64[::1], int64[::1], uint64, boolean, int64[::1])", parallel=True, uses=(split_mix,))
def positions(nodes, first, degree, ptr, key, loops, edges):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """The `edges` that `draw` finds, of nodes whose edges begin at `first`; reads none of their sources."""
    for at in numba.prange(len(nodes)):
        place = ptr[at]
        if loops:
            edges[place] = -1
            place += 1
        choose(nodes[at], first[at], degree[at], place, ptr[at + 1], key, edges)


@jit("int64(int64[::1], int64, int64[::1], int32[::1])")
def number(sources, known, nodes, place):  # type: ignore[no-untyped-def]
    """Replaces the nodes in `sources` by their positions among `nodes`, appending new ones; how many there are then.

    `place` [nodes of the graph] holds the position of each of the first `known` nodes, and -1 elsewhere.
    """
    for at in range(len(sources)):
        node = sources[at]
        position = place[node]
        if position < 0:
            position = known
            place[node] = known
            nodes[known] = node
            known += 1
        sources[at] = position
    return known


@njit
def slot_of(node, keys):  # type: ignore[no-untyped-def]
    """Where `node` stands, or would stand, in a hash table with linear probing; -1 marks free places."""
    mask = np.uint64(len(keys) - 1)
    slot = mixed(np.uint64(node)) & mask
    while keys[slot] >= 0 and keys[slot] != node:
        slot = (slot + np.uint64(1)) & mask
    return slot


@jit("int64(int64[::1], int64, int64[::1], int64[::1], int32[::1])", uses=(split_mix,))
def number_hashed(sources, known, nodes, keys, places):  # type: ignore[no-untyped-def]
    """What `number` does, with a hash table of the nodes met instead of a place for each node of the graph.

    `keys`, all -1, and `places` are the table: a power of two, larger than all nodes that may be met.
    """
    for at in range(known):
        slot = slot_of(nodes[at], keys)
        keys[slot] = nodes[at]
        places[slot] = at
    for at in range(len(sources)):
        node = sources[at]
        slot = slot_of(node, keys)
        if keys[slot] < 0:
            keys[slot] = node
            places[slot] = known
            nodes[known] = node
            known += 1
        sources[at] = places[slot]
    return known


@jit("(int64[::1], int64, int64, int32[::1])")
def mark(nodes, start, stop, place):  # type: ignore[no-untyped-def]
    """Notes the positions `start` to `stop` of `nodes` in `place`."""
    for at in range(start, stop):
        place[nodes[at]] = at


@jit("(int64[::1], int64, int32[::1])")
def forget(nodes, count, place):  # type: ignore[no-untyped-def]
    """Empties `place` again."""
    for at in range(count):
        place[nodes[at]] = -1


@jit(
    "(int64[::1], int64[::1], int64[::1], int64[::1], float32[::1], float32[::1], boolean, float32[::1])",
    parallel=True,
)
def weigh(ptr, sources, edges, full, weights, root, loops, out):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """The weight of each drawn edge: its own (1 without `weights`), times `root` of both ends where that is given, the
    sum over a target's drawn edges standing for all of its `full` edges (loops stand for themselves)."""
    for at in numba.prange(len(ptr) - 1):
        drawn = ptr[at + 1] - ptr[at] - (1 if loops else 0)
        share = np.float32(full[at]) / np.float32(drawn) if drawn > 0 else np.float32(0)
        for j in range(ptr[at], ptr[at + 1]):
            value = np.float32(1)
            if edges[j] >= 0:
                value = share
                if len(weights):
                    value *= weights[edges[j]]
            if len(root):
                value *= root[at] * root[sources[j]]
            out[j] = value
