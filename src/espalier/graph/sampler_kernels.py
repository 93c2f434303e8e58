"""Kernels of the neighbour sampler, in numba: draw, renumber, transpose. See `neighbor_sampler` for their use.

Random numbers are counter-based (Salmon et al., SC 2011): a hash of (seed, step, layer, node, draw), mixed as in
SplitMix64 (Steele et al., OOPSLA 2014), so no thread has a state. Loads numba; imported on first use.
"""

from __future__ import annotations

import numba
import numpy as np

from espalier.kernels.numba_compile import jit, njit

FEW = 48
"""Up to so many draws, looking through those already drawn (quadratic) beats passing over all neighbours."""

_INDEX = ("int32", "int64")


@njit
def mixed(value):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser: uint64 to uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


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


@jit(
    *(f"(int64[::1], int64[::1], {i}[::1], int64[::1], uint64, boolean, int64[::1], int64[::1])" for i in _INDEX),
    parallel=True,
)
def draw(nodes, indptr, indices, ptr, key, loops, found, edges):  # type: ignore[no-untyped-def]  # noqa: C901, PLR0913, PLR0917
    """Draws each node's edges without replacement: `found` are sources, `edges` their places in `indices` (-1: its
    loop, which comes first). Floyd's sampling where few are drawn, selection sampling (Knuth's S) where many are."""
    for at in numba.prange(len(nodes)):
        node, place, stop = nodes[at], ptr[at], ptr[at + 1]
        if loops:
            found[place] = node
            edges[place] = -1
            place += 1
        first = indptr[node]
        degree = indptr[node + 1] - first
        wanted = stop - place
        if wanted == degree:
            for j in range(degree):
                found[place + j] = indices[first + j]
                edges[place + j] = first + j
        elif wanted <= FEW:
            stream = mixed(key ^ mixed(np.uint64(node)))
            for j in range(wanted):
                top = degree - wanted + j
                chosen = below(stream, j, top + 1)
                for before in range(place, place + j):
                    if edges[before] == first + chosen:
                        chosen = top
                        break
                edges[place + j] = first + chosen
                found[place + j] = indices[first + chosen]
        else:
            stream = mixed(key ^ mixed(np.uint64(node)))
            taken = 0
            for j in range(degree):
                if taken < wanted and below(stream, j, degree - j) < wanted - taken:
                    found[place + taken] = indices[first + j]
                    edges[place + taken] = first + j
                    taken += 1


@jit("int64(int64[::1], int64, int64[::1], int32[::1])")
def number(found, known, nodes, place):  # type: ignore[no-untyped-def]
    """Replaces the nodes in `found` by their positions among `nodes`, appending new ones; how many there are then.

    `place` [nodes of the graph] holds the position of each of the first `known` nodes, and -1 elsewhere.
    """
    for at in range(len(found)):
        node = found[at]
        position = place[node]
        if position < 0:
            position = known
            place[node] = known
            nodes[known] = node
            known += 1
        found[at] = position
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
