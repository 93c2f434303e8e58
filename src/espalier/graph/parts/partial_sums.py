"""Partial sums at the boundary: of two parts one side sends rows, the other receives sums, whichever are fewer.

After SuperGNN (arXiv 2411.16025, pre- and post-aggregation). The edges from part i to part j are a bipartite graph. Its
minimum vertex cover (König: as large as a maximum matching) has sources, whose rows cross as before, and targets, for
each of which one row crosses: the weighted sum over its sources that are not in the cover. Every edge is served once,
and no fewer rows could do. It is exact to rounding, and what crosses are rows, so that few bits and late rows work as
they do without. Layers that weigh edges by attention, or keep columns (MaxK), need rows and cannot take sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from scipy import sparse
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from espalier.graph.data.graph import Array, selected
from espalier.graph.networks.base import Forms, MessageBlock
from espalier.graph.parts.halo import Boundary, Halo
from espalier.recipe.offsets import offsets_of


class Cover(NamedTuple):
    """What crosses from one part to another.

    Attributes:
        sources, targets: nodes of the cover, ascending.
        edges: places of the edges whose source is not in it, by target, ascending.
    """

    sources: Array
    targets: Array
    edges: Array


def cover(sources: Array, targets: Array, places: Array) -> Cover:
    """The minimum vertex cover of edges `sources[e]` -> `targets[e]`, which lie at `places[e]` of the whole graph."""
    left, u = np.unique(sources, return_inverse=True)
    right, v = np.unique(targets, return_inverse=True)
    ones = np.ones(len(u), np.int8)
    graph = sparse.csr_array((ones, (u, v)), shape=(len(left), len(right)))
    mate_of_left = maximum_bipartite_matching(graph, perm_type="column")  # the right node of each left one, or -1
    mate_of_right = np.full(len(right), -1)
    matched = mate_of_left >= 0
    mate_of_right[mate_of_left[matched]] = np.flatnonzero(matched)
    seen_left = ~matched
    seen_right = np.zeros(len(right), bool)
    front = np.flatnonzero(seen_left)
    while len(front):  # alternating paths from unmatched left nodes
        reached = np.unique(graph[front].indices)
        reached = reached[~seen_right[reached]]
        seen_right[reached] = True
        front = mate_of_right[reached]
        front = front[(front >= 0) & ~seen_left[front]]
        seen_left[front] = True
    chosen = ~seen_left
    rest = np.flatnonzero(seen_left[u])
    rest = rest[np.lexsort((places[rest], targets[rest]))]
    return Cover(left[chosen], right[seen_right], places[rest])


Covers = dict[tuple[int, int], Cover]
"""By (owner, receiver)."""


def covers(block: MessageBlock, cut: Boundary) -> Covers:
    """By (owner, receiver) of a whole graph's block that is cut, where an edge leads from one to the other."""
    indptr = block.indptr.numpy()
    indices = block.indices.numpy()
    target = np.repeat(np.arange(len(cut.parts)), np.diff(indptr))
    owner = cut.parts[indices].astype(np.int64)
    receiver = cut.parts[target].astype(np.int64)
    crossing = np.flatnonzero(owner != receiver)
    pair = owner[crossing] * cut.ranks + receiver[crossing]
    order = np.argsort(pair, kind="stable")
    crossing = crossing[order]
    by_pair = {}
    if not len(crossing):
        return {}
    names, firsts = np.unique(pair[order], return_index=True)
    for name, places in zip(names.tolist(), np.split(crossing, firsts[1:]), strict=True):
        by_pair[divmod(name, cut.ranks)] = cover(indices[places], target[places], places)
    return by_pair


def crossing_rows(every: Covers, ranks: int) -> Array:
    """int64 [ranks, ranks]: rows and sums that rank i sends rank j."""
    counts = np.zeros((ranks, ranks), np.int64)
    for pair, pair_cover in every.items():
        counts[pair] = len(pair_cover.sources) + len(pair_cover.targets)
    return counts


def summing(
    block: MessageBlock,
    cut: Boundary,
    rank: int,
    group: dist.ProcessGroup | None = None,
    every: Covers | None = None,
) -> tuple[Halo, MessageBlock]:
    """What `rank` sees of the whole graph's `block`: a halo that sends rows and sums, and its block of the first layer,
    as `Halo.by_layer` takes it. A sum is a source of its own, with one edge of weight 1. `every`: see `covers`."""
    plain = Halo.of(block.indptr, block.indices, cut, rank, group)
    every = every or covers(block, cut)
    place = np.zeros(len(cut.parts), np.int64)
    place[plain.owned.numpy()] = np.arange(len(plain.owned))
    sends, matrix = _sent(block, cut, (rank, place), every)
    nothing = Cover(*(np.zeros(0, np.int64),) * 3)
    theirs = [every.get((peer, rank), nothing) for peer in range(cut.ranks)]
    outer = np.concatenate([part for pair_cover in theirs for part in (pair_cover.sources, pair_cover.targets)])
    summed = np.concatenate([np.arange(len(a) + len(b)) >= len(a) for a, b, _ in theirs])
    halo, weights = _edges(plain, block, (outer, summed), theirs)
    halo = replace(
        halo,
        sends=sends,
        receives=tuple(len(pair_cover.sources) + len(pair_cover.targets) for pair_cover in theirs),
        sums=matrix,
    )
    right = block.right
    if right is not None:
        right = torch.cat([right[halo.owned], torch.where(torch.from_numpy(summed), 1.0, right[halo.outer])])
    left = selected(block.left, halo.owned)
    made = MessageBlock(halo.indptr, halo.indices.to(block.indices.dtype), halo.sources, Forms(), weights, left, right)
    return halo, made


def _sent(
    block: MessageBlock, cut: Boundary, rank_places: tuple[int, Array], every: Covers
) -> tuple[tuple[Tensor, ...], sparse.csr_array]:
    """For each peer the own node of every row (of a sum: its first), and the matrix that makes all rows of own ones."""
    rank, place = rank_places
    sends, rows, columns, values, count = [], [], [], [], 0
    for peer in range(cut.ranks):
        pair_cover = every.get((rank, peer))
        if pair_cover is None:
            sends.append(torch.zeros(0, dtype=torch.int64))
            continue
        sources = block.indices.numpy()[pair_cover.edges].astype(np.int64)
        target = np.searchsorted(block.indptr.numpy(), pair_cover.edges, side="right") - 1
        at = np.searchsorted(pair_cover.targets, target)
        first = place[sources[np.searchsorted(at, np.arange(len(pair_cover.targets)))]]
        sends.append(torch.from_numpy(np.concatenate([place[pair_cover.sources], first])))
        weight = np.ones(len(pair_cover.edges))
        for scale, which in ((block.weights, pair_cover.edges), (block.right, sources)):
            weight = weight if scale is None else weight * scale.numpy()[which]
        rows += [count + np.arange(len(pair_cover.sources)), count + len(pair_cover.sources) + at]
        columns += [place[pair_cover.sources], place[sources]]
        values += [np.ones(len(pair_cover.sources)), weight]
        count += len(pair_cover.sources) + len(pair_cover.targets)
    made = [np.concatenate(part) if part else np.zeros(0, np.int64) for part in (values, rows, columns)]
    shape = (count, int((cut.parts == rank).sum()))
    return tuple(sends), sparse.csr_array((made[0], (made[1], made[2])), shape=shape)


def _edges(
    plain: Halo, block: MessageBlock, outside: tuple[Array, Array], theirs: list[Cover]
) -> tuple[Halo, Tensor | None]:
    """The halo with its edges: those between own nodes, from rows that cross, and from sums; and their weights."""
    outer, summed = outside
    owned = len(plain.owned)
    target = np.repeat(np.arange(owned), plain.indptr.diff().numpy())
    places = plain.edges.numpy()
    local = plain.indices.numpy()
    served = np.concatenate([pair_cover.edges for pair_cover in theirs])
    direct = ~np.isin(places, served)
    node = plain.nodes.numpy()[local]
    most = max(int(ids.max(initial=0)) for ids in (plain.owned.numpy(), node, outer))
    position = np.full(most + 1, -1)
    position[plain.owned.numpy()] = np.arange(owned)
    position[outer[~summed]] = owned + np.flatnonzero(~summed)
    sums = np.flatnonzero(summed)
    to = np.concatenate([target[direct], np.searchsorted(plain.owned.numpy(), outer[sums])])
    source = np.concatenate([position[node[direct]], owned + sums])
    place = np.concatenate([places[direct], np.full(len(sums), -1)])
    order = np.lexsort((source, to))
    indptr = offsets_of(np.bincount(to, minlength=owned))
    edges, indices, starts = (torch.from_numpy(array) for array in (place[order], source[order], indptr))
    weights = None
    if block.weights is not None:
        weights = torch.where(edges < 0, 1.0, block.weights[edges.clamp(min=0)])
    made = replace(plain, outer=torch.from_numpy(outer), edges=edges, indices=indices, indptr=starts)
    return replace(made, degrees=plain.indptr.diff()), weights
