"""Full-neighbour inference out of core: all nodes of a graph, layer by layer, the rows of every layer on disk.

A layer goes through the nodes in ascending ranges that fit into the memory allowed: the full-neighbour block of a range
is read through the sampler, the rows of its sources from the layer before, and the results are appended to the
layer's file. The rows done are committed with what is written, so that a run that was killed goes on where it stood.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from espalier.errors import UserError
from espalier.graph import base
from espalier.graph.base import Kept
from espalier.graph.data import Array
from espalier.graph.gnn import Gnn, Layer
from espalier.graph.neighbor_sampler import ALL, NeighborSampling
from espalier.store.base import Rows
from espalier.store.rows import RowFile, RowLayout
from espalier.units import show_size
from espalier.workload import to_device

Progress = Callable[[int, int], None]

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


class _State(msgspec.Struct, frozen=True):
    """What is done of the inference called `key`: all layers before `layer`, and `rows` of it."""

    key: str
    layer: int = 0
    rows: int = 0

    def save(self, folder: Path) -> None:
        fresh = folder / "inference.json.part"
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / "inference.json")


@torch.no_grad()
def infer(
    model: Gnn, sampler: NeighborSampling, features: Rows, folder: InferenceFolder, progress: Progress | None = None
) -> RowFile:
    """float32 [nodes, outputs] for all nodes with all their neighbours: rows of a file in `folder`. Raises UserError
    where they cannot be written there; called again, it goes on."""
    try:
        return _infer(model, sampler, features, folder, progress)
    except OSError as error:
        missing = show_size(_missing(model, sampler.nodes, folder))
        raise UserError(
            f"The rows of layers cannot be written to {folder.path}: {error.strerror}.",
            why=f"{missing} more are needed there",
            do="make room, and start it again: it goes on where it stood; or another store.path",
        ) from None


def _infer(
    model: Gnn, sampler: NeighborSampling, features: Rows, folder: InferenceFolder, progress: Progress | None
) -> RowFile:
    folder.path.mkdir(parents=True, exist_ok=True)
    state, depth, nodes = _state(model, features, folder), len(model.layers), sampler.nodes
    for at in range(state.layer, depth):
        for old in range(at - 1):
            folder.layer(old).unlink(missing_ok=True)
        rows = features if at == 0 else _results(model, at - 1, nodes, folder)
        layer = _LayerPass(model, at, sampler, rows)
        for done in layer.write(folder, state if state.layer == at else _State(state.key, at)):
            if progress is not None:
                progress(at * nodes + done, depth * nodes)
        _State(state.key, at + 1).save(folder.path)
    return _results(model, depth - 1, nodes, folder)


def _missing(model: Gnn, nodes: int, folder: InferenceFolder) -> int:
    """Bytes that the folder still has to take at once: the largest two layers to come, one after the other, without
    what is there."""
    sizes = [4 * nodes * _columns(model, at) for at in range(len(model.layers))]
    there = [path.stat().st_size if path.exists() else 0 for path in map(folder.layer, range(len(sizes)))]
    at = max((number for number, size in enumerate(there) if size), default=0)
    peak = max(sum(sizes[max(0, later - 1) : later + 1]) for later in range(at, len(sizes)))
    return max(0, peak - sum(there[max(0, at - 1) :]))


def _results(model: Gnn, at: int, nodes: int, folder: InferenceFolder) -> RowFile:
    return RowFile(folder.layer(at), RowLayout(nodes, torch.float32, (_columns(model, at),)))


def _kept(model: Gnn, at: int) -> int | None:
    """How many columns of layer `at`'s results are not zero, where MaxK leaves so few."""
    inner = 0 <= at < len(model.layers) - 1
    return model.options.k if inner and model.options.activation == "maxk" else None


def _columns(model: Gnn, at: int) -> int:
    """float32 numbers of a row on disk: k values and k columns where k are kept."""
    layer, kept = model.layers[at], _kept(model, at)
    assert isinstance(layer, Layer)
    return layer.outputs if kept is None else 2 * kept


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
        found = msgspec.json.decode(path.read_bytes(), type=_State)
        if found.key == key:
            return found
    for old in folder.path.glob("layer-*.rows"):
        old.unlink()
    return _State(key)


@dataclass(frozen=True)
class _LayerPass:
    """One layer over all nodes, reading `rows` of the layer before."""

    model: Gnn
    at: int
    sampler: NeighborSampling
    rows: Rows

    def write(self, folder: InferenceFolder, state: _State) -> Iterator[int]:
        """Appends the results to the layer's file from where it stands; yields the rows done."""
        size = 4 * _columns(self.model, self.at)
        with folder.layer(self.at).open("r+b" if state.rows else "wb") as file:
            file.truncate(state.rows * size)
            file.seek(state.rows * size)
            since = 0
            for start, stop in self._ranges(state.rows, folder.memory):
                found = self._results(start, stop)
                file.write(found.contiguous().numpy().data)
                since += found.nbytes
                if since >= COMMIT or stop == self.sampler.nodes:
                    file.flush()
                    os.fsync(file.fileno())
                    _State(state.key, self.at, stop).save(folder.path)
                    since = 0
                yield stop

    def _ranges(self, start: int, memory: int) -> Iterator[tuple[int, int]]:
        """Ranges of nodes whose blocks, sources and results take at most `memory` bytes."""
        layer, nodes = self.model.layers[self.at], self.sampler.nodes
        assert isinstance(layer, Layer)
        row = 4 * (self.rows.shape[0] + 2 * layer.inputs + 2 * layer.outputs)
        while start < nodes:
            ids = np.arange(start, min(start + _AHEAD, nodes))
            held = np.cumsum((self.sampler.degrees(ids) + 2) * (row + EDGE_BYTES))
            count = int(np.searchsorted(held, memory, side="right"))
            if not count:
                degree, needed = int(self.sampler.degrees(ids[:1])[0]), show_size(int(held[0]))
                raise UserError(
                    f"store.memory = {show_size(memory)} is too small to infer node {start}.",
                    why=f"it and its {degree:,} neighbours take {needed}",
                    do=f'store.memory = "{needed}" or more',
                )
            yield start, start + count
            start += count

    def _results(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, columns on disk]."""
        parameter = next(self.model.parameters())
        drawn = self.sampler.draw(np.arange(start, stop), (ALL,))
        block = to_device(drawn.blocks[0], parameter.device, parameter.dtype)
        found = self.model.step(self.at, block, self._sources(drawn.nodes))
        if isinstance(found, Kept):
            columns = found.columns.cpu().to(torch.int32).view(torch.float32)
            return torch.cat([found.values.cpu().float(), columns], 1)
        return found.cpu().float()

    def _sources(self, ids: Array) -> base.Rows:
        parameter, kept = next(self.model.parameters()), _kept(self.model, self.at - 1)
        rows = torch.empty(len(ids), *self.rows.shape, dtype=self.rows.dtype)
        self.rows.read(torch.from_numpy(ids), rows)
        if kept is None:
            return rows.to(device=parameter.device, dtype=parameter.dtype)
        columns = rows[:, kept:].contiguous().view(torch.int32).long()
        width = self.model.options.width
        assert width is not None
        return Kept(rows[:, :kept].to(parameter).contiguous(), columns.to(parameter.device), width)
