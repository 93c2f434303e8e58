"""State file of an optimizer node: master parameters, both moments of AdamW and the copy that workers pull.

The files of a node are its checkpoint: two generations of every entry (store/generations.py), of which a crash leaves
one whole step. Each chunk has two entries, `<chunk>/parameters` in the form that is pulled and `<chunk>/moments` with
what AdamW needs besides; one more is for `TOTALS`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from espalier.parallel.layer_client import Fill
from espalier.plan.axes.node_layout import LayerChunk, NodeJob
from espalier.store.cost import pages
from espalier.store.direct_io import aligned, bytes_of
from espalier.store.generations import Generations
from espalier.store.state_folder import open_or_create

TOTALS = "totals"
"""Entry: what all ranks were told of the step that led to this one, for a rank that has not read it."""
_TOLD = struct.Struct("<qq")
"""Its step, and how many bytes follow."""
_LAYOUT = 2
"""Version of the entries."""
PULLED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of parameters on the wire."""


@dataclass(frozen=True)
class StateEntries:
    """Where a job's chunks lie in a state, and in which form."""

    job: NodeJob

    def sizes(self) -> dict[str, int]:
        """Bytes of every entry."""
        sizes: dict[str, int] = {}
        for chunk in self.job.all_chunks:
            sizes[f"{chunk.name}/parameters"] = chunk.elements * self.width
            sizes[f"{chunk.name}/moments"] = chunk.elements * self.moments
        sizes[TOTALS] = pages(4096 + 32 * sum(len(layer.tensors) for layer in self.job.layers))
        return sizes

    @property
    def width(self) -> int:
        """Bytes of a parameter as it is pulled."""
        return PULLED[self.job.pull].itemsize

    @property
    def moments(self) -> int:
        """Bytes of an element's other state: two moments, and the master where it is not what is pulled."""
        return 8 if self.job.pull == "fp32" else 12


def keep_totals(state: Generations, job: NodeJob, step: int, totals: bytes) -> None:
    """Writes what all ranks were told of the step that leads to `step`, for a rank that has not read it. What does not
    fit is left out: that rank makes the step again."""
    buffer = aligned(StateEntries(job).sizes()[TOTALS])
    room = buffer.numel() - _TOLD.size
    content = totals if len(totals) <= room else b""
    head = _TOLD.pack(step, len(content))
    bytes_of(buffer)[: len(head) + len(content)] = head + content
    state.write(TOTALS, buffer)


def totals_of(state: Generations, job: NodeJob) -> bytes:
    """What was kept of the step that led to that of `state`; empty where nothing was."""
    buffer = aligned(StateEntries(job).sizes()[TOTALS])
    state.read(TOTALS, buffer)
    step, size = _TOLD.unpack_from(bytes_of(buffer))
    return bytes(bytes_of(buffer)[_TOLD.size : _TOLD.size + size]) if step == state.step else b""


def fill(state: Generations, job: NodeJob, values: Fill) -> None:
    """Writes the first parameters, with moments of zero, and commits them as step 0."""
    buffers = ChunkState(job.largest, StateEntries(job))
    for number, layer in enumerate(job.layers):
        whole = torch.empty(layer.numel)
        values(number, whole)
        for chunk in job.chunks[number]:
            buffers.open(chunk)
            buffers.master.copy_(whole[chunk.start : chunk.stop])
            buffers.first.zero_()
            buffers.second.zero_()
            buffers.write(state)
    keep_totals(state, job, 0, b"")
    state.commit(0)


def open_state(
    where: Path | Sequence[Path], job: NodeJob, values: Fill, others: Mapping[str, int] | None = None
) -> Generations:
    """The state in a folder (or striped over folders on several disks): see `store.state_folder`. Where there is none,
    one with the first `values`. `others`: bytes of further entries, not written yet."""
    folders = [where] if isinstance(where, Path) else list(where)
    layout = msgspec.json.encode([job.layers, job.pull, job.chunk, _LAYOUT])
    sizes = StateEntries(job).sizes() | dict(others or {})
    first = partial(fill, job=job, values=values)
    return open_or_create(folders, layout, sizes, first, "the state of an optimizer node")


def open_sums(folder: Path, job: NodeJob) -> Generations:
    """A file in `folder`, made anew, for the gradients of a step until it is decided: an entry for each chunk. They
    need not survive the process, so there is one generation, and nothing of it is committed."""
    sizes = {chunk.name: 4 * chunk.elements for chunk in job.all_chunks}
    return Generations.create(folder / "sums", sizes, generations=1)


def read_layer(state: Generations, job: NodeJob, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Master parameters and both moments of a layer, flat, as they were committed."""
    parameters, first, second = (torch.empty(job.layers[number].numel) for _ in range(3))
    for chunk in job.chunks[number]:
        buffers = ChunkState(chunk.elements, StateEntries(job))
        buffers.open(chunk)
        buffers.read(state)
        span = slice(chunk.start, chunk.stop)
        parameters[span], first[span], second[span] = buffers.master, buffers.first, buffers.second
    return parameters, first, second


class ChunkState:
    """Buffers for the state of one chunk at a time, of at most `elements`. Has state."""

    def __init__(self, elements: int, entries: StateEntries) -> None:
        self._moments = aligned(elements * entries.moments)
        self._pulled = aligned(elements * entries.width)
        self._entries = entries
        self.gradient = aligned(elements * 4).view(torch.float32)
        self.chunk: LayerChunk | None = None

    def open(self, chunk: LayerChunk) -> None:
        """From now on the views are of `chunk`."""
        count = chunk.elements
        self.chunk = chunk
        whole = self._moments[: count * self._entries.moments].view(torch.float32)
        self.pulled = self._pulled[: count * self._entries.width].view(PULLED[self._entries.job.pull])
        self.first, self.second = whole[:count], whole[count : 2 * count]
        self.master = self.pulled if self._entries.job.pull == "fp32" else whole[2 * count :]

    def read(self, state: Generations, pending: bool = False) -> None:
        """All of the chunk that AdamW needs. `pending`: as it was written last."""
        assert self.chunk is not None
        if self.master is self.pulled:
            state.read(f"{self.chunk.name}/parameters", self._pulled, pending)
        state.read(f"{self.chunk.name}/moments", self._moments, pending)

    def write(self, state: Generations) -> None:
        """All of it, and the copy that is pulled."""
        assert self.chunk is not None
        if self.master is not self.pulled:
            self.pulled.copy_(self.master)
        state.write(f"{self.chunk.name}/parameters", self._pulled)
        state.write(f"{self.chunk.name}/moments", self._moments)
