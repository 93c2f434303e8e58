"""Checkpoint writer: joins the ranks' plans, writes each rank's file, then the manifest and the commit."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from espalier.checkpoint import dcp_metadata, manifest, state_tree
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.dcp_metadata import FileRange, Saved, SavedTensor
from espalier.checkpoint.run_identity import RunIdentity, refuse_foreign
from espalier.checkpoint.storage import Folder, Storage, folder_name, read_manifest
from espalier.checkpoint.stored_slice import StoredSlice
from espalier.checkpoint.tensor_slice import Box, Slice
from espalier.checkpoint.write_rate import LimitedStream, WriteLimit
from espalier.recipe.cache_dir import sync_folder, writing


class WriteJob(NamedTuple):
    """What to write: flat names to CPU tensors (or DTensors of them) and bytes. `rate`: bytes/s at most; `run`: whose
    checkpoint it is."""

    step: int
    state: dict[str, Any]
    meta: dict[str, Any]
    loss: float | None
    rate: float = math.inf
    run: RunIdentity | None = None


class WriteItem(NamedTuple):
    """What a rank can write: bytes, or a box (`offsets` and `sizes`) of a tensor of that `dtype` and `shape`."""

    name: str
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Of its elements; 1 of bytes, whose number others do not know."""
        return 1 if self.offsets is None else math.prod(self.sizes) * self.dtype.itemsize


_Share = tuple[list[tuple[int, int]], dict[str, tuple[int, str]], float]
"""What one rank wrote, as plain values: where each item is in its file, bytes and hash of each file, and the seconds
that it took."""


class Written(NamedTuple):
    """A checkpoint: its bytes, and the seconds of the rank that wrote longest, in which these went out."""

    bytes: int
    seconds: float


class Write:
    """One save of one rank, run once on the writing thread. Has state between its phases."""

    def __init__(self, place: Storage, team: Coordinator, job: WriteJob) -> None:
        self.place = place
        self.team = team
        self.job = job
        self.name = folder_name(job.step)
        self._items: list[list[WriteItem]] = []
        self._room = bytearray()
        self._folder: Path | None = None
        self._limit = WriteLimit(job.rate) if job.rate < math.inf else None

    def run(self) -> Written:
        """Writes and commits. On an error nothing of it stays."""
        try:
            plan = self.team.agree("planning the checkpoint", self._plan, self._join)
            return Written(*self.team.agree("writing the checkpoint", lambda: self._write(plan), self._commit))
        finally:
            # After a commit only a temporary copy is left to abandon.
            self.place.abandon(self.name)

    def _plan(self) -> list[Any]:
        return [tuple(item) for name, value in self.job.state.items() for item in _items(name, value)]

    def _join(self, plans: list[list[Any]]) -> list[list[Any]]:
        with writing(self.place.path(self.name)):
            with contextlib.suppress(manifest.Bad, OSError):  # what is damaged, or not there, may be replaced
                refuse_foreign(self.job.run, read_manifest(self.place, self.name).stamp, self.place.path(self.name))
            self.place.clean(self.name)
            self._begin()
        self._items = shared_out([[WriteItem(*fields) for fields in plan] for plan in plans])
        return [[tuple(item) for item in items] for items in self._items]

    def _write(self, items: list[Any]) -> _Share:
        begun = time.monotonic()
        with writing(self.place.path(self.name)):
            file = _file(self.team.rank)
            ranges = []
            with (self._begin() / file).open("wb") as opened:
                stream: IO[bytes] = opened
                if self._limit is not None and isinstance(
                    self.place, Folder
                ):  # else it is what goes up that is limited
                    stream = cast("IO[bytes]", LimitedStream(opened, self._limit))
                for fields in items:
                    first = opened.tell()
                    self._put(WriteItem(*fields), stream)
                    ranges.append((first, opened.tell() - first))
                opened.flush()
                os.fsync(opened.fileno())
            hashes = {name: (file.bytes, file.xxh3) for name, file in self._publish([file]).items()}
            return ranges, hashes, time.monotonic() - begun

    def _put(self, item: WriteItem, stream: IO[bytes]) -> None:
        value = self.job.state[item.name]
        if item.offsets is None:
            stream.write(value)
            return
        boxes = value.written() if isinstance(value, Slice) else state_tree.boxes(value)
        box = next(box for box in boxes if box.offsets == item.offsets)
        tensor = value.read(box, self._buffer) if isinstance(value, StoredSlice) else state_tree.of_box(value, box)
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch would write all of what it is a view of
            tensor = tensor.clone()
        torch.save(tensor, stream)

    def _buffer(self, size: int) -> Tensor:
        """Room for what is not in memory, one item after the other."""
        if len(self._room) < size:
            self._room = bytearray(size)
        return torch.frombuffer(self._room, dtype=torch.uint8, count=size)

    def _commit(self, shares: list[_Share]) -> list[tuple[int, float]]:
        with writing(self.place.path(self.name)):
            saved = _saved(self._items, [ranges for ranges, *_ in shares])
            metadata = self._begin() / dcp_metadata.NAME
            metadata.write_bytes(dcp_metadata.dumps(saved))
            sync_folder(metadata)
            files = self._publish([dcp_metadata.NAME])
            for _, written, _ in shares:
                files.update({name: manifest.FileHash(*file) for name, file in written.items()})
            content = manifest.Manifest(
                step=self.job.step,
                loss=self.job.loss,
                ranks=self.team.world,
                time=time.time(),
                meta=self.job.meta,
                files=files,
                run=msgspec.UNSET if self.job.run is None else self.job.run.run,
            )
            self.place.commit(self.name, content)
        return [(content.bytes, max(seconds for *_, seconds in shares))] * self.team.world

    def _begin(self) -> Path:
        """The folder of this rank's files."""
        if self._folder is None:
            self._folder = self.place.begin(self.name)
        return self._folder

    def _publish(self, files: list[str]) -> dict[str, manifest.FileHash]:
        assert self._folder is not None, "files are written before they are published"
        digests = {file: manifest.digest_path(self._folder / file) for file in files}
        self.place.publish(self.name, files, self._limit)
        return digests


# --- who writes what -------------------------------------------------------------------------------------------------


def _file(rank: int) -> str:
    """As torch.distributed.checkpoint calls it."""
    return f"__{rank}_0.distcp"


def _items(name: str, value: Any) -> list[WriteItem]:
    """What this rank can write of an entry of the state."""
    if isinstance(value, bytes):
        return [WriteItem(name)]
    boxes: list[Box] = value.written() if isinstance(value, Slice) else state_tree.boxes(value)
    return [WriteItem(name, box.offsets, box.sizes, value.dtype, tuple(value.shape)) for box in boxes]


def shared_out(plans: Sequence[Sequence[WriteItem]]) -> list[list[WriteItem]]:
    """What each rank writes of what it can (`plans`): each item is written once, by who has least to write so far.

    Raises ValueError where several ranks together have not all of a tensor.
    """
    holders: defaultdict[tuple[str, tuple[int, ...] | None], list[int]] = defaultdict(list)
    by_key = {}
    for rank, plan in enumerate(plans):
        for item in plan:
            holders[item[:2]].append(rank)
            by_key[item[:2]] = item
    shares: list[list[WriteItem]] = [[] for _ in plans]
    loads = [0] * len(plans)
    left: dict[str, int] = {}
    for key, ranks in holders.items():
        rank = min(ranks, key=loads.__getitem__)
        item = by_key[key]
        loads[rank] += item.bytes or 1
        shares[rank].append(item)
        left[item.name] = left.get(item.name, math.prod(item.shape)) - math.prod(item.sizes)
    for name, elements in left.items() if len(plans) > 1 else ():
        if elements:
            raise ValueError(f"the ranks have {-elements:+,} elements of {name} besides those that it has")
    return shares


def _saved(items: Sequence[Sequence[WriteItem]], ranges: Sequence[Sequence[tuple[int, int]]]) -> Saved:
    """What all ranks wrote, and where."""
    saved: Saved = {}
    for rank, (of_rank, where) in enumerate(zip(items, ranges, strict=True)):
        for item, (first, length) in zip(of_rank, where, strict=True):
            stored = FileRange(_file(rank), first, length)
            if item.offsets is None:
                saved[item.name] = stored
                continue
            tensor = saved.setdefault(item.name, SavedTensor(item.dtype, item.shape, {}))
            assert isinstance(tensor, SavedTensor), "names of tensors and bytes differ"
            tensor.ranges[Box(item.offsets, item.sizes)] = stored
    return saved
