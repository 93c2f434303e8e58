"""Topology out of core: neighbour sampling where the edges lie on disk.

What a node draws depends on (seed, step, layer, node) and its degree alone, so the places of the drawn edges are known
before any edge is read: a layer reads two entries of `indptr` for each new node and then the pages that hold drawn
edges, each once however many batches are sampled together (hyperbatches, after AGNES, arXiv 2601.01473). Batches equal
the in-memory sampler's bitwise. Memory holds the batches and a hash table of their nodes, nothing of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.graph.data.graph import Array, Graph
from espalier.graph.sampling.neighbor_sampler import (
    Degrees,
    Drawn,
    Hop,
    Style,
    message_block,
    named,
    stream,
    symmetric_root,
)
from espalier.mechanisms.disk_batches.features import array_header, rows_of
from espalier.recipe.errors import UserError
from espalier.recipe.offsets import offsets_of
from espalier.store.base import Rows
from espalier.store.io_queue import IoQueue
from espalier.store.rows import RowFile, RowLayout


@dataclass(frozen=True)
class Topology:
    """Edges by target (compressed sparse columns) as rows of a store: `indptr` int64 [nodes + 1], `indices` int32 or
    int64 [edges], where there are any `weights` float32 [edges] and `edge_features` float32 [edges, columns]."""

    indptr: Rows
    indices: Rows
    weights: Rows | None = None
    edge_features: Rows | None = None

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """How many directed edges there are, each way counted."""
        return len(self.indices)

    def rows(self, nodes: Array) -> tuple[Array, Array]:
        """int64: where the edges into each of `nodes` begin, and how many there are."""
        ends = _values(self.indptr, np.stack([nodes, nodes + 1], 1).reshape(-1)).reshape(-1, 2)
        return np.ascontiguousarray(ends[:, 0]), ends[:, 1] - ends[:, 0]

    def sources(self, edges: Array) -> Array:
        """int64: the node from which each of `edges` (places in `indices`) comes."""
        return _values(self.indices, edges)


def _rows(rows: Rows, ids: Array) -> Array:
    return rows_of(rows, ids).numpy()


def _values(rows: Rows, ids: Array) -> Array:
    """int64 [ids]: single numbers."""
    return _rows(rows, ids).astype(np.int64, copy=False)


def mapped_file(array: Array | None) -> Path | None:
    """The `.npy` file that `array` is a mapping of, whole; None: it is in memory."""
    mapped = array if array is None or isinstance(array, np.memmap) else array.base
    if array is None or not isinstance(mapped, np.memmap) or mapped.shape != array.shape:
        return None
    return Path(str(mapped.filename)) if str(mapped.filename).endswith(".npy") else None


def edge_bytes(graph: Graph) -> int:
    """Bytes of a graph's edges, with their weights and features."""
    arrays = (graph.indptr, graph.indices, graph.weights, graph.edge_features)
    return sum(0 if array is None else array.nbytes for array in arrays)


def stays_on_disk(graph: Graph, memory: int) -> bool:
    """Whether the edges are sampled where they lie: in files, and larger than `memory` bytes."""
    return mapped_file(graph.indptr) is not None and edge_bytes(graph) > memory


def disk_sampler(graph: Graph, style: Style, memory: int) -> DiskSampler:
    """A sampler of a graph whose edges are mapped from files, with `memory` bytes of buffers."""
    files = [mapped_file(array) for array in (graph.indptr, graph.indices, graph.weights, graph.edge_features)]
    queue = IoQueue()
    each = max(1 << 16, memory // len(files))
    opened = [None if file is None else _open(file, queue, each) for file in files]
    indptr, indices, weights, edge_features = opened
    assert indptr is not None
    assert indices is not None
    root = symmetric_root(graph) if style.scale == "symmetric" and weights is not None else None
    return DiskSampler(Topology(indptr, indices, weights, edge_features), style, root)


def _open(path: Path, queue: IoQueue, memory: int) -> Rows:
    """Numbers of an .npy file."""
    with path.open("rb") as file:
        shape, _, dtype = array_header(file)
        offset = file.tell()
    whole: dict[np.dtype[Any], torch.dtype] = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
    kinds = whole if path.stem in ("indptr", "indices") else {np.dtype(np.float32): torch.float32}
    if dtype not in kinds or len(shape) != (2 if path.stem == "edge_features" else 1):
        names = " or ".join(kind.name for kind in kinds)
        raise UserError(f"{path} holds {dtype} {list(shape)}.", do=f"give {names} numbers, one for each edge")
    return RowFile(path, RowLayout(shape[0], kinds[dtype], tuple(shape[1:]), offset), queue, memory)


@dataclass(eq=False)
class DiskSampler:
    """Draws neighbourhoods of a topology in a store, of one batch or of many at once.

    `root`: float32 [nodes], see `neighbor_sampler.symmetric_root`; needed where edges with weights are scaled by it.
    """

    topology: Topology
    style: Style
    root: Array | None = None

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.topology.nodes

    def degrees(self, nodes: Array) -> Array:
        """int64: edges into each of `nodes`."""
        return self.topology.rows(nodes)[1]

    @property
    def source_bytes(self) -> int:
        return self.topology.indices.row_bytes

    def sources(self, start: int, stop: int) -> Array:
        return self.topology.sources(np.arange(*_values(self.topology.indptr, np.array([start, stop]))))

    def draw(self, seeds: Array, fanouts: Sequence[int], seed: int = 0, step: int = 0) -> Drawn:
        """The neighbourhood of `seeds`, as `Sampler.draw` gives it."""
        return self.draw_together([seeds], fanouts, seed, [step])[0]

    def draw_together(
        self, seeds: Sequence[Array], fanouts: Sequence[int], seed: int, steps: Sequence[int]
    ) -> list[Drawn]:
        """What `draw` gives for each of `seeds` with its step; every page is read once for all of them in a layer."""
        batches = [_Batch(np.asarray(ids, np.int64)) for ids in seeds]
        for layer, fanout in enumerate(fanouts):
            self._learn_degrees(batches)
            edges = [
                batch.choose(fanout, stream(seed, step, layer), self.style.loops)
                for batch, step in zip(batches, steps, strict=True)
            ]
            joined = np.concatenate(edges)
            drawn = joined >= 0
            sources = np.full(len(joined), -1, np.int64)
            sources[drawn] = self.topology.sources(joined[drawn])
            cuts = np.cumsum([len(batch_edges) for batch_edges in edges])[:-1]
            for batch, batch_sources in zip(batches, np.split(sources, cuts), strict=True):
                batch.add(batch_sources)
        if self.style.scale == "symmetric" and self.root is None:
            self._learn_degrees(batches)
        return [batch.drawn(self.style, self.topology, self.root) for batch in batches]

    def _learn_degrees(self, batches: Sequence[_Batch]) -> None:
        fresh = [batch.nodes[len(batch.degree) :] for batch in batches]
        first, degree = self.topology.rows(np.concatenate(fresh))
        cuts = np.cumsum([len(nodes) for nodes in fresh])[:-1]
        for batch, starts, count in zip(batches, np.split(first, cuts), np.split(degree, cuts), strict=True):
            batch.first = np.concatenate([batch.first, starts])
            batch.degree = np.concatenate([batch.degree, count])


class _Batch:
    """One batch while it is drawn. Has state: its nodes so far, seeds first, and its hops, the nearest first."""

    def __init__(self, seeds: Array) -> None:
        self.nodes = seeds
        self.first = np.zeros(0, np.int64)
        self.degree = np.zeros(0, np.int64)
        self._hops: list[tuple[Hop, int]] = []

    def choose(self, fanout: int, key: int, loops: bool) -> Array:
        """int64: places of the next layer's edges, -1 for loops."""
        from espalier.graph.sampling import sampler_kernels

        counts = (self.degree if fanout < 0 else np.minimum(self.degree, fanout)) + int(loops)
        self._ptr = offsets_of(counts)
        self._edges = np.empty(int(self._ptr[-1]), np.int64)
        sampler_kernels.positions(self.nodes, self.first, self.degree, self._ptr, np.uint64(key), loops, self._edges)
        return self._edges

    def add(self, sources: Array) -> None:
        """Ends the layer: `sources` of the chosen edges, -1 for loops, which come first of a target's."""
        from espalier.graph.sampling import sampler_kernels

        known = len(self.nodes)
        loops = sources < 0
        sources[loops] = self.nodes[: int(loops.sum())]
        room = known + len(sources)
        nodes = np.empty(room, np.int64)
        nodes[:known] = self.nodes
        slots = 1 << (2 * room).bit_length()
        keys = np.full(slots, -1, np.int64)
        places = np.empty(slots, np.int32)
        after = int(sampler_kernels.number_hashed(sources, known, nodes, keys, places))
        self.nodes = nodes[:after].copy()
        self._hops.append((Hop(self._ptr, sources, self._edges, after), known))

    def drawn(self, style: Style, topology: Topology, roots: Array | None) -> Drawn:
        """The batch as it is handed on, with the weights and features of its edges."""
        root = np.zeros(0, np.float32) if roots is None else roots[self.nodes]
        if style.scale == "symmetric" and roots is None:
            root = (1 / np.sqrt(self.degree.astype(np.float64) + 1)).astype(np.float32)
        blocks = []
        for hop, targets in reversed(self._hops):
            places = hop.edges[hop.edges >= 0]  # of the drawn edges alone is read, and then they are numbered by it
            known = [
                None if rows is None else _rows(rows, places) for rows in (topology.weights, topology.edge_features)
            ]
            numbered = hop._replace(edges=np.where(hop.edges >= 0, np.cumsum(hop.edges >= 0) - 1, -1))
            block = message_block(numbered, style, Degrees(self.degree[:targets], root[: hop.known]), *known)
            blocks.append(block)
        return Drawn(self.nodes, named(tuple(blocks), self.nodes))
