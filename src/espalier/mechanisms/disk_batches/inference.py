"""Full-neighbour inference out of core: all nodes of a graph, layer by layer, the rows of every layer on disk.

A layer goes through the nodes in ascending ranges that fit into the memory allowed: the full-neighbour block of a range
is read through the sampler, the rows of its sources from the layer before, and the results are written to the layer's
file: by node, or, where that takes fewer bytes, by the ranges of the next layer, each with the rows that it will read
(`graph.data.condensed_file`). The rows done are committed with what is written, so that a run that was killed goes on
where it stood.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from espalier.graph.data import condensed_file
from espalier.graph.data.condensed_file import CondensedLayout, CondensedRows, Foretold
from espalier.graph.data.graph import Array, Progress
from espalier.graph.networks import base
from espalier.graph.networks.base import Kept
from espalier.graph.networks.gnn import Gnn, Layer
from espalier.graph.sampling.neighbor_sampler import ALL, NeighborSampling
from espalier.mechanisms.disk_batches.features import rows_of
from espalier.parallel.workload import to_device
from espalier.recipe import cache_dir
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size
from espalier.store.base import Rows
from espalier.store.direct_io import reserve
from espalier.store.rows import RowFile, RowLayout

EDGE_BYTES = 100
"""Of an edge of a block, at most: its place, source and weight, and its part of the hash table of the sources."""
COMMIT = 64 << 20
"""Bytes written between two commits."""
_AHEAD = 1 << 16  # nodes whose degrees are read at once


@dataclass(frozen=True)
class InferenceFolder:
    """Where the rows of the layers lie, and how much memory making them may take.

    Attributes:
        memory: bytes for a range of nodes, its sources and its results.
        identity: of the graph and its features; what was begun with another one is begun anew.
    """

    path: Path
    memory: int
    identity: str = ""

    def layer(self, at: int) -> Path:
        """The file of a layer's results."""
        return self.path / f"layer-{at}.rows"

    def layout(self, at: int) -> Path:
        """Where they lie in it, if they are condensed; no such file: by node."""
        return self.path / f"layer-{at}.layout"


class _State(msgspec.Struct, frozen=True):
    """What is done of the inference called `key`: all layers before `layer`, and `rows` of it."""

    key: str
    layer: int = 0
    rows: int = 0

    def save(self, folder: Path) -> None:
        cache_dir.write_atomic(folder / "inference.json", msgspec.json.encode(self))


@torch.no_grad()
def infer(
    model: Gnn, sampler: NeighborSampling, features: Rows, folder: InferenceFolder, progress: Progress | None = None
) -> RowFile:
    """float32 [nodes, outputs] for all nodes with all their neighbours: rows of a file in `folder`. Raises UserError
    where they cannot be written there; called again, it goes on."""
    with cache_dir.writing(folder.path, "name another store.path", partial(_missing, model, sampler.nodes, folder)):
        return _infer(model, sampler, features, folder, progress)


def _infer(
    model: Gnn, sampler: NeighborSampling, features: Rows, folder: InferenceFolder, progress: Progress | None
) -> RowFile:
    folder.path.mkdir(parents=True, exist_ok=True)
    state = _state(model, features, folder)
    depth = len(model.layers)
    nodes = sampler.nodes
    for at in range(state.layer, depth):
        for old in range(at - 1):
            folder.layer(old).unlink(missing_ok=True)
        with nullcontext(features) if at == 0 else _results(model, at - 1, nodes, folder) as rows:
            layer = _LayerPass(model, at, sampler, rows)
            layout = _layout(model, at, sampler, folder)
            for done in layer.write(folder, state if state.layer == at else _State(state.key, at), layout):
                if progress is not None:
                    progress(at * nodes + done, depth * nodes)
        _State(state.key, at + 1).save(folder.path)
        for old in range(at):
            folder.layout(old).unlink(missing_ok=True)
    results = _results(model, depth - 1, nodes, folder)
    assert isinstance(results, RowFile)
    return results


def _missing(model: Gnn, nodes: int, folder: InferenceFolder) -> int:
    """Bytes that the folder still has to take at once: the largest two layers to come, one after the other, without
    what is there."""
    sizes = [_layer_bytes(model, at, nodes, folder) for at in range(len(model.layers))]
    there = [path.stat().st_size if path.exists() else 0 for path in map(folder.layer, range(len(sizes)))]
    at = max((number for number, size in enumerate(there) if size), default=0)
    peak = max(sum(sizes[max(0, later - 1) : later + 1]) for later in range(at, len(sizes)))
    return max(0, peak - sum(there[max(0, at - 1) :]))


def _layer_bytes(model: Gnn, at: int, nodes: int, folder: InferenceFolder) -> int:
    """Of the file of a layer's results."""
    layout = _known_layout(model, at, folder)
    return 4 * nodes * _columns(model, at) if layout is None else int(layout.offsets[-1])


def _results(model: Gnn, at: int, nodes: int, folder: InferenceFolder) -> RowFile | CondensedRows:
    layout = _known_layout(model, at, folder)
    if layout is not None:
        return CondensedRows(folder.layer(at), layout, torch.float32)
    return RowFile(folder.layer(at), RowLayout(nodes, torch.float32, (_columns(model, at),)))


def _known_layout(model: Gnn, at: int, folder: InferenceFolder) -> CondensedLayout | None:
    path = folder.layout(at)
    return CondensedLayout.read(path, 4 * _columns(model, at)) if path.exists() else None


def _layout(model: Gnn, at: int, sampler: NeighborSampling, folder: InferenceFolder) -> CondensedLayout | None:
    """How the results of a layer lie in its file, by the ranges in which the next one reads them; None: by node."""
    if at + 1 == len(model.layers):
        return None
    if not folder.layout(at).exists():
        starts = _starts(model, at + 1, sampler, folder.memory)
        if not condensed_file.foretell(sampler, starts, 4 * _columns(model, at)).pays:
            return None
        ranges = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        CondensedLayout.write(
            folder.layout(at), starts, (condensed_file.outside_sources(sampler, *bounds) for bounds in ranges)
        )
    return _known_layout(model, at, folder)


def foretold(model: Gnn, sampler: NeighborSampling, memory: int) -> list[Foretold]:
    """What the rows of each layer but the first take, by node and condensed: see `condensed_file.foretell`."""
    estimates = []
    for at in range(1, len(model.layers)):
        starts = _starts(model, at, sampler, memory)
        estimates.append(condensed_file.foretell(sampler, starts, 4 * _columns(model, at - 1)))
    return estimates


def least_memory(model: Gnn, degree: int) -> int:
    """Bytes that a node of this degree takes."""
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]
    row = max(4 * (3 * max(layer.inputs, layer.outputs) + 2 * layer.outputs + layer.inputs) for layer in layers)
    return (degree + 2) * (row + EDGE_BYTES)


def _starts(model: Gnn, at: int, sampler: NeighborSampling, memory: int) -> Array:
    """int64 [ranges + 1]: the ranges of a layer but the first."""
    columns = _columns(model, at - 1)
    return np.array([0, *(stop for _, stop in _ranges(model, at, sampler, (columns, memory)))], np.int64)


def _ranges(
    model: Gnn, at: int, sampler: NeighborSampling, budget: tuple[int, int], start: int = 0
) -> Iterator[tuple[int, int]]:
    """Ranges of nodes whose blocks, sources and results take at most so many bytes. `budget`: columns of a row that the
    layer reads, and the bytes."""
    layer, nodes, (columns, memory) = model.layers[at], sampler.nodes, budget
    assert isinstance(layer, Layer)
    row = 4 * (columns + 2 * layer.inputs + 2 * layer.outputs)
    while start < nodes:
        ids = np.arange(start, min(start + _AHEAD, nodes))
        sizes = np.cumsum((sampler.degrees(ids) + 2) * (row + EDGE_BYTES))
        count = int(np.searchsorted(sizes, memory, side="right"))
        if not count:
            degree = int(sampler.degrees(ids[:1])[0])
            needed = show_size(int(sizes[0]))
            raise UserError(
                f"store.memory = {show_size(memory)} is too small to infer node {start}.",
                why=f"it and its {degree:,} neighbours take {needed}",
                do=f'store.memory = "{needed}" or more',
            )
        yield start, start + count
        start += count


def _kept(model: Gnn, at: int) -> int | None:
    """How many columns of layer `at`'s results are not zero, where MaxK leaves so few."""
    inner = 0 <= at < len(model.layers) - 1
    return model.options.k if inner and model.options.activation == "maxk" else None


def _columns(model: Gnn, at: int) -> int:
    """float32 numbers of a row on disk: k values and k columns where k are kept."""
    layer = model.layers[at]
    top_k = _kept(model, at)
    assert isinstance(layer, Layer)
    return layer.outputs if top_k is None else 2 * top_k


def _state(model: Gnn, features: Rows, folder: InferenceFolder) -> _State:
    digest = xxhash.xxh3_128(
        f"{folder.identity} {folder.memory} {len(features)} {features.shape} {model.options}".encode()
    )
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    key = digest.hexdigest()
    path = folder.path / "inference.json"
    if path.exists():
        state = msgspec.json.decode(path.read_bytes(), type=_State)
        if state.key == key:
            return state
    for old in folder.path.glob("layer-*"):
        old.unlink()
    return _State(key)


@dataclass(frozen=True)
class _LayerPass:
    """One layer over all nodes, reading `rows` of the layer before."""

    model: Gnn
    at: int
    sampler: NeighborSampling
    rows: Rows

    def write(self, folder: InferenceFolder, state: _State, layout: CondensedLayout | None) -> Iterator[int]:
        """Writes the results to the layer's file, from the rows done on; yields the rows done."""
        size = 4 * _columns(self.model, self.at)
        with folder.layer(self.at).open("r+b" if state.rows else "wb") as file:
            if layout is None:
                file.truncate(state.rows * size)
            elif not state.rows:
                reserve(file.fileno(), int(layout.offsets[-1]))
            since = 0
            budget = (self.rows.shape[0], folder.memory)
            for start, stop in _ranges(self.model, self.at, self.sampler, budget, state.rows):
                results = self._results(start, stop).contiguous()
                since += self._put(file.fileno(), results, start, layout)
                if since >= COMMIT or stop == self.sampler.nodes:
                    os.fsync(file.fileno())
                    _State(state.key, self.at, stop).save(folder.path)
                    since = 0
                yield stop

    def _put(self, file: int, results: Tensor, start: int, layout: CondensedLayout | None) -> int:
        """Writes the rows from `start` on; the bytes written."""
        if layout is None:
            condensed_file.write_at(file, results, start * results[0].nbytes)
            return results.nbytes
        written = 0
        for offset, chosen in layout.pieces(start, len(results)):
            rows = results[torch.from_numpy(chosen)]
            condensed_file.write_at(file, rows, offset)
            written += rows.nbytes
        return written

    def _results(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, columns on disk]."""
        parameter = next(self.model.parameters())
        drawn = self.sampler.draw(np.arange(start, stop), (ALL,))
        block = to_device(drawn.blocks[0], parameter.device, parameter.dtype)
        out = self.model.step(self.at, block, self._sources(drawn.nodes))
        if isinstance(out, Kept):
            columns = out.columns.cpu().to(torch.int32).view(torch.float32)
            return torch.cat([out.values.cpu().float(), columns], 1)
        return out.cpu().float()

    def _sources(self, ids: Array) -> base.Rows:
        parameter = next(self.model.parameters())
        top_k = _kept(self.model, self.at - 1)
        rows = rows_of(self.rows, ids)
        if top_k is None:
            return rows.to(device=parameter.device, dtype=parameter.dtype)
        columns = rows[:, top_k:].contiguous().view(torch.int32).long()
        width = self.model.options.width
        assert width is not None
        return Kept(rows[:, :top_k].to(parameter).contiguous(), columns.to(parameter.device), width)
