"""State file of an optimizer node: parameters in fp32, and both moments of AdamW.

The files of a node are its checkpoint: two generations of every entry (store/generations.py), of which a crash leaves
one whole step. Each chunk has two entries, `<chunk>/parameters` and `<chunk>/moments`; one more is for `TOTALS`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
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


def entry_sizes(job: NodeJob) -> dict[str, int]:
    """Bytes of every entry of a state with the chunks of `job`."""
    sizes: dict[str, int] = {}
    for chunk in job.all_chunks:
        sizes[f"{chunk.name}/parameters"] = 4 * chunk.elements
        sizes[f"{chunk.name}/moments"] = 8 * chunk.elements
    sizes[TOTALS] = pages(4096 + 32 * sum(len(layer.tensors) for layer in job.layers))
    return sizes


def keep_totals(state: Generations, job: NodeJob, step: int, totals: bytes) -> None:
    """Writes what all ranks were told of the step that leads to `step`, for a rank that has not read it. What does not
    fit is left out: that rank makes the step again."""
    buffer = aligned(entry_sizes(job)[TOTALS])
    room = buffer.numel() - _TOLD.size
    content = totals if len(totals) <= room else b""
    head = _TOLD.pack(step, len(content))
    bytes_of(buffer)[: len(head) + len(content)] = head + content
    state.write(TOTALS, buffer)


def totals_of(state: Generations, job: NodeJob) -> bytes:
    """What was kept of the step that led to that of `state`; empty where nothing was."""
    buffer = aligned(entry_sizes(job)[TOTALS])
    state.read(TOTALS, buffer)
    step, size = _TOLD.unpack_from(bytes_of(buffer))
    return bytes(bytes_of(buffer)[_TOLD.size : _TOLD.size + size]) if step == state.step else b""


def fill(state: Generations, job: NodeJob, values: Fill) -> None:
    """Writes the first parameters, with moments of zero, and commits them as step 0."""
    buffers = ChunkState(job.largest)
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
    layout = msgspec.json.encode([job.layers, "fp32", job.chunk, _LAYOUT])
    sizes = entry_sizes(job) | dict(others or {})
    first = partial(fill, job=job, values=values)
    return open_or_create(folders, layout, sizes, first)


def open_sums(folder: Path, job: NodeJob) -> Generations:
    """A file in `folder`, made anew, for the gradients of a step until it is decided: an entry for each chunk. They
    need not survive the process, so there is one generation, and nothing of it is committed."""
    sizes = {chunk.name: 4 * chunk.elements for chunk in job.all_chunks}
    return Generations.create(folder / "sums", sizes, generations=1)


def read_layer(state: Generations, job: NodeJob, number: int) -> Tensor:
    """[numel] the parameters of a layer as they were committed."""
    parameters = torch.empty(job.layers[number].numel)
    for chunk in job.chunks[number]:
        state.read(f"{chunk.name}/parameters", parameters[chunk.start : chunk.stop])
    return parameters


class ChunkState:
    """Buffers for the state of one chunk at a time, of at most `elements`. Has state."""

    def __init__(self, elements: int) -> None:
        self._moments = aligned(8 * elements)
        self._parameters = aligned(4 * elements)
        self.gradient = aligned(4 * elements).view(torch.float32)

    def open(self, chunk: LayerChunk) -> None:
        """From now on the views are of `chunk`."""
        self.chunk = chunk
        self.master = self._parameters[: 4 * chunk.elements].view(torch.float32)
        self.first, self.second = self._moments[: 8 * chunk.elements].view(torch.float32).chunk(2)

    def read(self, state: Generations, pending: bool = False) -> None:
        """All of the chunk that AdamW needs. `pending`: as it was written last."""
        state.read(f"{self.chunk.name}/parameters", self._parameters, pending)
        state.read(f"{self.chunk.name}/moments", self._moments, pending)

    def write(self, state: Generations) -> None:
        """All of it."""
        state.write(f"{self.chunk.name}/parameters", self._parameters)
        state.write(f"{self.chunk.name}/moments", self._moments)
