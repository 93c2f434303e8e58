"""Neighbour sampler: draws a few in-neighbours per layer for each seed, anew at every step.

After GraphSAGE (arXiv 1706.02216, algorithm 2), without replacement. What is drawn for a node depends on (seed, step,
layer, node) alone: batches are the same for any number of threads, ranks and micro-batches. Weights of drawn edges are
scaled so that their sum stands for all of the node's edges, which makes sums unbiased, and exact at full fan-out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from espalier.graph.data.graph import Array, Graph
from espalier.graph.networks.base import Forms, MessageBlock, MessageBlocks

ALL = -1
"""As a fan-out: every neighbour."""


class Drawn(NamedTuple):
    """A neighbourhood: the global ids of its nodes (seeds first), and the blocks from features to seeds."""

    nodes: Array
    blocks: MessageBlocks


class Hop(NamedTuple):
    """The edges drawn for one layer.

    Attributes:
        ptr: int64 [targets + 1]; sources: int64 [edges], positions among the nodes met.
        edges: int64 [edges], places among the graph's edges; -1 for a loop.
        known: nodes met so far.
    """

    ptr: Array
    sources: Array
    edges: Array
    known: int


@dataclass(frozen=True)
class Style:
    """What a network wants of its blocks: loops, and how edges are scaled (`symmetric`, `mean`, `none`)."""

    loops: bool
    scale: str


class NeighborSampling(Protocol):
    """A sampler: of a graph in memory (`Sampler`) or on disk (`diskgnn.topology.DiskSampler`)."""

    style: Style

    @property
    def nodes(self) -> int:
        """How many nodes there are."""

    def degrees(self, nodes: Array) -> Array:
        """int64: edges into each of `nodes`."""

    @property
    def source_bytes(self) -> int:
        """Bytes that are read from disk for the source of an edge; 0: it is in memory."""

    def sources(self, start: int, stop: int) -> Array:
        """Where all edges into the nodes `[start, stop)` come from."""

    def draw(self, seeds: Array, fanouts: Sequence[int], seed: int = 0, step: int = 0) -> Drawn:
        """See Sampler.draw."""


class Sampler:
    """Draws neighbourhoods of one graph. Has state: a table of the nodes met, empty between calls, under a lock."""

    source_bytes = 0

    def __init__(self, graph: Graph, style: Style) -> None:
        self.graph = graph
        self.style = style
        self.indptr = np.ascontiguousarray(graph.indptr, np.int64)
        self.indices = graph.indices
        self._lock = threading.Lock()

    @cached_property
    def _place(self) -> Array:
        return np.full(self.graph.nodes, -1, np.int32)

    @cached_property
    def root(self) -> Array:
        """float32 [nodes]: one over the root of each node's (weighted) degree, its loop included."""
        return symmetric_root(self.graph)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.graph.nodes

    def degrees(self, nodes: Array) -> Array:
        """int64: edges into each of `nodes`."""
        return self.indptr[nodes + 1] - self.indptr[nodes]

    def sources(self, start: int, stop: int) -> Array:
        return self.indices[self.indptr[start] : self.indptr[stop]]

    def draw(self, seeds: Array, fanouts: Sequence[int], seed: int = 0, step: int = 0) -> Drawn:
        """The neighbourhood of `seeds`.

        Args:
            seeds: int64 [seeds].
            fanouts: neighbours per node, the layer next to the seeds first; `ALL` takes every one.
            seed, step: with the layer and the node, all that the draw depends on.

        Returns:
            nodes, seeds first, in the order in which they were met; one block per layer, farthest first.
        """
        from espalier.graph.sampling import sampler_kernels

        with self._lock:
            nodes = np.empty(self._capacity(len(seeds), fanouts), np.int64)
            nodes[: len(seeds)] = seeds
            sampler_kernels.mark(nodes, 0, len(seeds), self._place)
            hops = []
            known = len(seeds)
            try:
                for layer, fanout in enumerate(fanouts):
                    hop = self._hop(nodes, known, fanout, stream(seed, step, layer))
                    hops.append((hop, known))
                    known = hop.known
            finally:
                sampler_kernels.forget(nodes, known, self._place)
        nodes = nodes[:known]
        return Drawn(nodes, named(tuple(self._block(hop, targets, nodes) for hop, targets in reversed(hops)), nodes))

    def _capacity(self, seeds: int, fanouts: Sequence[int]) -> int:
        most = seeds
        for fanout in fanouts:
            most = self.graph.nodes if fanout < 0 else most * (fanout + 1)
            most = min(most, self.graph.nodes)
        return most + seeds  # a seed may be named twice

    def _hop(self, nodes: Array, known: int, fanout: int, key: int) -> Hop:
        from espalier.graph.sampling import sampler_kernels

        targets = nodes[:known]
        ptr = np.empty(known + 1, np.int64)
        sampler_kernels.count(targets, self.indptr, ptr, fanout, self.style.loops)
        sources = np.empty(int(ptr[-1]), np.int64)
        edges = np.empty(int(ptr[-1]), np.int64)
        loops = self.style.loops
        sampler_kernels.draw(targets, self.indptr, self.indices, ptr, np.uint64(key), loops, sources, edges)
        after = sampler_kernels.number(sources, known, nodes, self._place)
        return Hop(ptr, sources, edges, int(after))

    def _block(self, hop: Hop, targets: int, nodes: Array) -> MessageBlock:
        graph = self.graph
        sources = nodes[: hop.known]
        root = self.root[sources] if self.style.scale == "symmetric" else np.zeros(0, np.float32)
        degrees = Degrees(self.degrees(nodes[:targets]), root)
        return message_block(hop, self.style, degrees, graph.weights, graph.edge_features)


def named(blocks: Sequence[MessageBlock], nodes: Array) -> MessageBlocks:
    """The blocks of a neighbourhood, told which `nodes` their sources are."""
    ids = torch.from_numpy(nodes)
    return tuple(block._replace(nodes=ids[: block.sources]) for block in blocks)


class Degrees(NamedTuple):
    """Of nodes of a hop: all edges of its targets int64 [targets]; one over the root of each source's degree, its loop
    included, float32 [sources], where edges are scaled by it."""

    full: Array
    root: Array


def message_block(
    hop: Hop, style: Style, degrees: Degrees, weights: Array | None = None, edge_features: Array | None = None
) -> MessageBlock:
    """The drawn edges of `hop` with the weights that `style` gives them."""
    features = None
    if edge_features is not None and not style.loops:
        features = torch.from_numpy(edge_features[hop.edges])
    left = None
    if style.scale == "mean" and weights is None:
        counts = np.diff(hop.ptr)
        left = torch.from_numpy((1 / np.maximum(counts, 1)).astype(np.float32))
    return MessageBlock(
        torch.from_numpy(hop.ptr),
        torch.from_numpy(hop.sources),
        hop.known,
        Forms(),
        weights=_weights(hop, style, degrees, weights),
        left=left,
        features=features,
    )


def _weights(hop: Hop, style: Style, degrees: Degrees, weights: Array | None) -> torch.Tensor | None:
    from espalier.graph.sampling import sampler_kernels

    if weights is None and style.scale == "mean":
        return None
    edge_weights = np.zeros(0, np.float32) if weights is None else weights
    drawn = np.diff(hop.ptr) - (1 if style.loops else 0)
    if weights is None and style.scale == "none" and bool((drawn == degrees.full).all()):
        return None
    out = np.empty(len(hop.sources), np.float32)
    sampler_kernels.weigh(hop.ptr, hop.sources, hop.edges, degrees.full, edge_weights, degrees.root, style.loops, out)
    if style.scale == "mean":  # a weighted mean: over the weights of what was drawn
        sums = _row_sums(out, hop.ptr)
        out /= np.repeat(np.where(sums == 0, 1, sums), np.diff(hop.ptr)).astype(np.float32)
    return torch.from_numpy(out)


def _row_sums(values: Array, ptr: Array) -> Array:
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return total[ptr[1:]] - total[ptr[:-1]]


def stream(seed: int, step: int, layer: int) -> int:
    """The number of a stream of random numbers, 64 bits; the multipliers are SplitMix64's constants."""
    word = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + (layer + 1) * 0x94D049BB133111EB
    return word & 0xFFFF_FFFF_FFFF_FFFF


SUMMED = 1 << 22
"""Weights that are summed at once; they may lie on disk."""


def symmetric_root(graph: Graph) -> Array:
    """float32 [nodes]: (1 + the weights of the edges into a node) ^ -1/2, as GCN wants it; negative sums are an error
    of the data and count as 0."""
    total = graph.degrees().astype(np.float64) if graph.weights is None else _weight_sums(graph.weights, graph.indptr)
    total = total + 1
    return np.where(total > 0, 1 / np.sqrt(np.maximum(total, 1e-30)), 0).astype(np.float32)


def _weight_sums(weights: Array, indptr: Array) -> Array:
    """float64 [nodes]: as `_row_sums`, to the bit, a piece of the edges at a time."""
    begins = np.zeros(len(indptr))
    before = 0.0
    for at in range(0, len(weights), SUMMED):
        total = np.cumsum(np.concatenate([[before], weights[at : at + SUMMED]]), dtype=np.float64)
        rows = slice(*(int(np.searchsorted(indptr, edge, side="right")) for edge in (at - 1, at + len(total) - 1)))
        begins[rows] = total[indptr[rows] - at]
        before = float(total[-1])
    return np.diff(begins)


def whole(graph: Graph, style: Style) -> MessageBlock:
    """All edges of `graph` as one block of `nodes` targets and as many sources, rows ascending."""
    indptr = graph.indptr
    indices = graph.indices
    weights = graph.weights
    features = graph.edge_features
    if style.loops:
        indptr, indices, weights = with_loops(graph)
        features = None
    left = right = None
    if style.scale == "symmetric":
        left = right = torch.from_numpy(symmetric_root(graph))
    elif style.scale == "mean":
        sums = np.diff(indptr).astype(np.float64) if weights is None else _row_sums(weights, indptr)
        left = torch.from_numpy((1 / np.where(sums == 0, 1, sums)).astype(np.float32))
    return MessageBlock(
        torch.from_numpy(np.ascontiguousarray(indptr, np.int64)),
        torch.from_numpy(np.asarray(indices)),
        graph.nodes,
        Forms(),
        weights=None if weights is None else torch.from_numpy(np.asarray(weights)),
        left=left,
        right=right,
        features=None if features is None else torch.from_numpy(np.asarray(features)),
    )


def with_loops(graph: Graph) -> tuple[Array, Array, Array | None]:
    """(indptr, indices, weights) of `graph` with an edge of weight 1 from every node to itself, rows ascending."""
    nodes = graph.nodes
    targets = graph.targets()
    smaller = np.bincount(targets[graph.indices < targets], minlength=nodes)
    indptr = graph.indptr + np.arange(nodes + 1)
    loops = indptr[:-1] + smaller
    other = np.ones(graph.edges + nodes, bool)
    other[loops] = False
    indices = np.empty(graph.edges + nodes, graph.indices.dtype)
    indices[loops] = np.arange(nodes)
    indices[other] = graph.indices
    weights = None
    if graph.weights is not None:
        weights = np.ones(graph.edges + nodes, np.float32)
        weights[other] = graph.weights
    return indptr, indices, weights
