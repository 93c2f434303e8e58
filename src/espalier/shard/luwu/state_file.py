"""State file of an optimizer node: master parameters, both moments of AdamW and the copy that workers pull.

The files of a node are its checkpoint: two generations of every entry (store/generations.py), of which a crash leaves
one whole step. Each chunk has two entries, `<chunk>/parameters` in the form that is pulled and `<chunk>/moments` with
what AdamW needs besides. The plain form keeps them in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from espalier.cache_dir import sync_folder, unwritable
from espalier.errors import UserError
from espalier.shard.luwu.base import Fill
from espalier.shard.luwu.layout import Chunk, Job, chunks_of
from espalier.store.cost import pages
from espalier.store.direct_io import DirectFile, aligned, check_room
from espalier.store.generations import Generations

PULLED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of parameters on the wire."""


class State(Protocol):
    """Named entries of fixed sizes, of one step; what is written is read after the next `commit`.

    Attributes:
        read_bytes, written_bytes: from and to the disk so far.
    """

    read_bytes: int
    written_bytes: int

    @property
    def step(self) -> int:
        """The last that was committed."""

    def read(self, name: str, buffer: Tensor) -> None:
        """Fills the beginning of `buffer` (uint8) with the entry as it was committed."""
        ...

    def write(self, name: str, buffer: Tensor) -> None:
        """The beginning of `buffer` is the entry from the next commit on. It may be written again before that."""
        ...

    def commit(self, step: int) -> None:
        """All that was written becomes the state of `step` at once."""
        ...

    def rollback(self) -> None:
        """Forgets what was written since the last commit."""
        ...

    def revert(self) -> None:
        """Back to the step that was committed before the last one, once, if nothing was written since."""
        ...


class MemoryState:
    """Entries in memory. Has state."""

    read_bytes = written_bytes = 0

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.step = -1
        self._sizes = dict(sizes)
        self._now: dict[str, Tensor] = {}
        self._before: tuple[int, dict[str, Tensor]] = (-1, {})
        self._written: dict[str, Tensor] = {}

    def read(self, name: str, buffer: Tensor) -> None:
        """See State."""
        buffer[: self._sizes[name]].copy_(self._now[name])

    def write(self, name: str, buffer: Tensor) -> None:
        """See State."""
        self._written[name] = buffer[: self._sizes[name]].clone()

    def commit(self, step: int) -> None:
        """See State."""
        self._before = (self.step, dict(self._now))
        self._now |= self._written
        self._written = {}
        self.step = step

    def rollback(self) -> None:
        """See State."""
        self._written = {}

    def revert(self) -> None:
        """See State."""
        self.step, self._now = self._before
        self._written = {}


class Sums(Protocol):
    """Gradients of a step until it is decided, which need not survive the process; and what the ranks were told of the
    last step, which has to, for a rank that has not read it. `read_bytes`, `written_bytes`: as of `State`."""

    read_bytes: int
    written_bytes: int

    def read(self, chunk: Chunk, gradient: Tensor) -> None:
        """Fills `gradient` with what was written."""
        ...

    def write(self, chunk: Chunk, gradient: Tensor) -> None:
        """Keeps a copy of `gradient`."""
        ...

    def keep_totals(self, step: int, totals: bytes) -> None:
        """`totals` is what was told of the step that led to `step`."""
        ...

    def totals(self, step: int) -> bytes:
        """What was kept of that step; empty where nothing was."""
        ...


class MemorySums:
    """Sums in memory. Has state."""

    read_bytes = written_bytes = 0

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._totals = (-1, b"")

    def keep_totals(self, step: int, totals: bytes) -> None:
        """See Sums."""
        self._totals = step, totals

    def totals(self, step: int) -> bytes:
        """See Sums."""
        return self._totals[1] if self._totals[0] == step else b""

    def read(self, chunk: Chunk, gradient: Tensor) -> None:
        """See Sums."""
        gradient.copy_(self._kept[chunk.name])

    def write(self, chunk: Chunk, gradient: Tensor) -> None:
        """See Sums."""
        self._kept[chunk.name] = gradient.clone()


class DiskSums(MemorySums):
    """Sums in a file, which is made anew, and totals in one beside it. Has state."""

    def __init__(self, path: Path, chunks: Iterable[Chunk]) -> None:
        super().__init__()
        self._beside = path.with_name("totals")
        with suppress(OSError, msgspec.DecodeError):  # there is none, or it is not whole
            self._totals = msgspec.msgpack.decode(self._beside.read_bytes(), type=tuple[int, bytes])
        self._offsets: dict[str, int] = {}
        end = 0
        for chunk in chunks:
            self._offsets[chunk.name] = end
            end += pages(chunk.elements * 4)
        self._file = DirectFile(path, "create", end)

    def read(self, chunk: Chunk, gradient: Tensor) -> None:
        """See Sums."""
        self._file.read_into(gradient, self._offsets[chunk.name])
        self.read_bytes += pages(gradient.nbytes)

    def write(self, chunk: Chunk, gradient: Tensor) -> None:
        """See Sums."""
        self._file.write_from(gradient, self._offsets[chunk.name])
        self.written_bytes += pages(gradient.nbytes)

    def keep_totals(self, step: int, totals: bytes) -> None:
        """See Sums. They outlive the process, not the machine."""
        super().keep_totals(step, totals)
        part = self._beside.with_suffix(".part")
        try:
            part.write_bytes(msgspec.msgpack.encode(self._totals))
            part.rename(self._beside)
        except OSError as error:
            raise unwritable(part, error, "name another folder in store.path") from None


@dataclass(frozen=True)
class Entries:
    """Where a job's chunks lie in a State, and in which form."""

    job: Job

    def sizes(self) -> dict[str, int]:
        """Bytes of every entry."""
        found: dict[str, int] = {}
        for number in range(len(self.job.layers)):
            for chunk in chunks_of(self.job, number):
                found[f"{chunk.name}/parameters"] = chunk.elements * self.width
                found[f"{chunk.name}/moments"] = chunk.elements * self.moments
        return found

    @property
    def width(self) -> int:
        """Bytes of a parameter as it is pulled."""
        return PULLED[self.job.pull].itemsize

    @property
    def moments(self) -> int:
        """Bytes of an element's other state: two moments, and the master where it is not what is pulled."""
        return 8 if self.job.pull == "fp32" else 12


def fill(state: State, job: Job, values: Fill) -> None:
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
    state.commit(0)


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
    layout = msgspec.json.encode([job.layers, job.pull, job.chunk])
    if files[0].exists():
        if not told.exists() or told.read_bytes() != layout:
            raise UserError(
                f"{folders[0]} holds the state of another model.",
                why="names, shapes, their order, `pull` or the size of chunks differ from this run's",
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


def open_sums(folder: Path, job: Job) -> DiskSums:
    """A file in `folder`, made anew, for the gradients of a step."""
    chunks = (chunk for number in range(len(job.layers)) for chunk in chunks_of(job, number))
    return DiskSums(folder / "sums", chunks)


def read_layer(state: State, job: Job, number: int) -> tuple[Tensor, Tensor, Tensor]:
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

    def read(self, state: State) -> None:
        """All of the chunk that AdamW needs."""
        assert self.chunk is not None
        if self.master is self.pulled:
            state.read(f"{self.chunk.name}/parameters", self._pulled)
        state.read(f"{self.chunk.name}/moments", self._moments)

    def write(self, state: State) -> None:
        """All of it, and the copy that is pulled."""
        assert self.chunk is not None
        if self.master is not self.pulled:
            self.pulled.copy_(self.master)
        state.write(f"{self.chunk.name}/parameters", self._pulled)
        state.write(f"{self.chunk.name}/moments", self._moments)
