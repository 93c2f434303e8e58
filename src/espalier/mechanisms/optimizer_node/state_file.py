"""State file of an optimizer node: master parameters, both moments of AdamW and the copy that workers pull.

The files of a node are its checkpoint: two generations of every entry (store/generations.py), of which a crash leaves
one whole step. Each chunk has two entries, `<chunk>/parameters` in the form that is pulled and `<chunk>/moments` with
what AdamW needs besides; one more is for `TOTALS`.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from espalier.parallel.layer_client import Fill
from espalier.plan.axes.node_layout import Chunk, Job, chunks_of
from espalier.recipe.cache_dir import sync_folder
from espalier.recipe.errors import UserError
from espalier.store.cost import pages
from espalier.store.direct_io import aligned, bytes_of, check_room
from espalier.store.generations import Generations

TOTALS = "totals"
"""Entry: what all ranks were told of the step that led to this one, for a rank that has not read it."""
_TOLD = struct.Struct("<qq")
"""Its step, and how many bytes follow."""
_LAYOUT = 2
"""Version of the entries."""
PULLED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of parameters on the wire."""


@dataclass(frozen=True)
class Entries:
    """Where a job's chunks lie in a state, and in which form."""

    job: Job

    def sizes(self) -> dict[str, int]:
        """Bytes of every entry."""
        found: dict[str, int] = {}
        for number in range(len(self.job.layers)):
            for chunk in chunks_of(self.job, number):
                found[f"{chunk.name}/parameters"] = chunk.elements * self.width
                found[f"{chunk.name}/moments"] = chunk.elements * self.moments
        found[TOTALS] = pages(4096 + 32 * sum(len(layer.tensors) for layer in self.job.layers))
        return found

    @property
    def width(self) -> int:
        """Bytes of a parameter as it is pulled."""
        return PULLED[self.job.pull].itemsize

    @property
    def moments(self) -> int:
        """Bytes of an element's other state: two moments, and the master where it is not what is pulled."""
        return 8 if self.job.pull == "fp32" else 12


def keep_totals(state: Generations, job: Job, step: int, totals: bytes) -> None:
    """Writes what all ranks were told of the step that leads to `step`, for a rank that has not read it. What does not
    fit is left out: that rank makes the step again."""
    buffer = aligned(Entries(job).sizes()[TOTALS])
    room = buffer.numel() - _TOLD.size
    kept = totals if len(totals) <= room else b""
    head = _TOLD.pack(step, len(kept))
    bytes_of(buffer)[: len(head) + len(kept)] = head + kept
    state.write(TOTALS, buffer)


def totals_of(state: Generations, job: Job) -> bytes:
    """What was kept of the step that led to that of `state`; empty where nothing was."""
    buffer = aligned(Entries(job).sizes()[TOTALS])
    state.read(TOTALS, buffer)
    step, size = _TOLD.unpack_from(bytes_of(buffer))
    return bytes(bytes_of(buffer)[_TOLD.size : _TOLD.size + size]) if step == state.step else b""


def fill(state: Generations, job: Job, values: Fill) -> None:
    """Writes the first parameters, with moments of zero, and commits them as step 0."""
    chunks = [chunks_of(job, number) for number in range(len(job.layers))]
    buffers = ChunkState(max(chunk.elements for one in chunks for chunk in one), Entries(job))
    for number, layer in enumerate(job.layers):
        whole = torch.empty(layer.numel)
        values(number, whole)
        for chunk in chunks[number]:
            buffers.open(chunk)
            buffers.master.copy_(whole[chunk.start : chunk.stop])
            buffers.first.zero_()
            buffers.second.zero_()
            buffers.write(state)
    keep_totals(state, job, 0, b"")
    state.commit(0)


@contextmanager
def locked(folder: Path, wait: float = 5.0) -> Iterator[None]:
    """Inside, no other process serves from `folder`. Raises UserError where one does for longer than `wait` seconds."""
    until, file = time.monotonic() + wait, os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(
                        f"Another process serves from {folder}.",
                        why="two runs cannot share the state of one",
                        do="name another folder in store.path, or wait until that run has ended",
                    ) from None
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        os.close(file)


def open_state(
    where: Path | Sequence[Path], job: Job, values: Fill, beside: Mapping[str, int] | None = None
) -> Generations:
    """The state in a folder (or striped over folders on several disks), of the last step that is whole there; where
    there is none, one with the first `values`. `beside`: bytes of further entries, not written yet.

    Raises:
        UserError: it is of other layers; or it cannot be read or written.
        DiskFull: there is no room for it.
    """
    folders = [where] if isinstance(where, Path) else list(where)
    files = [folder / "state" for folder in folders]
    told = folders[0] / "job.json"
    layout = msgspec.json.encode([job.layers, job.pull, job.chunk, _LAYOUT])
    if files[0].exists():
        if not told.exists() or told.read_bytes() != layout:
            raise UserError(
                f"{folders[0]} holds the state of another model.",
                why="names, shapes, their order, `pull`, the size of chunks or the layout of the file differ",
                do="start a new run with --run FOLDER, or name another folder in store.path",
            )
        return Generations(files, verify=True)
    sizes = Entries(job).sizes() | dict(beside or {})
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, 2 * sum(map(pages, sizes.values())) // len(folders), "the state of an optimizer node")
    parts = [folder / "state.part" for folder in folders]
    with Generations.create(parts, sizes) as state:
        fill(state, job, values)
    told.write_bytes(layout)
    for part, file in reversed(list(zip(parts, files, strict=True))):  # the first last: it tells that all are there
        part.rename(file)
        sync_folder(file.parent)
    return Generations(files)


def open_sums(folder: Path, job: Job) -> Generations:
    """A file in `folder`, made anew, for the gradients of a step until it is decided: an entry for each chunk. They
    need not survive the process, so there is one generation, and nothing of it is committed."""
    chunks = (chunk for number in range(len(job.layers)) for chunk in chunks_of(job, number))
    sizes = {chunk.name: 4 * chunk.elements for chunk in chunks}
    return Generations.create(folder / "sums", sizes, generations=1)


def read_layer(state: Generations, job: Job, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Master parameters and both moments of a layer, flat, as they were committed."""
    found = tuple(torch.empty(job.layers[number].numel) for _ in range(3))
    for chunk in chunks_of(job, number):
        buffers = ChunkState(chunk.elements, Entries(job))
        buffers.open(chunk)
        buffers.read(state)
        for whole, part in zip(found, (buffers.master, buffers.first, buffers.second), strict=True):
            whole[chunk.start : chunk.stop] = part
    return found[0], found[1], found[2]


class ChunkState:
    """Buffers for the state of one chunk at a time, of at most `elements`. Has state."""

    def __init__(self, elements: int, entries: Entries) -> None:
        self._moments = aligned(elements * entries.moments)
        self._pulled = aligned(elements * entries.width)
        self._entries = entries
        self.gradient = aligned(elements * 4).view(torch.float32)
        self.chunk: Chunk | None = None

    def open(self, chunk: Chunk) -> None:
        """From now on the views are of `chunk`."""
        count = chunk.elements
        self.chunk = chunk
        whole = self._moments[: count * self._entries.moments].view(torch.float32)
        self.pulled = self._pulled[: count * self._entries.width].view(PULLED[self._entries.job.pull])
        self.first, self.second = whole[:count], whole[count : 2 * count]
        self.master = self.pulled if self._entries.job.pull == "fp32" else whole[2 * count :]

    def read(self, state: Generations) -> None:
        """All of the chunk that AdamW needs."""
        assert self.chunk is not None
        if self.master is self.pulled:
            state.read(f"{self.chunk.name}/parameters", self._pulled)
        state.read(f"{self.chunk.name}/moments", self._moments)

    def write(self, state: Generations) -> None:
        """All of it, and the copy that is pulled."""
        assert self.chunk is not None
        if self.master is not self.pulled:
            self.pulled.copy_(self.master)
        state.write(f"{self.chunk.name}/parameters", self._pulled)
        state.write(f"{self.chunk.name}/moments", self._moments)
