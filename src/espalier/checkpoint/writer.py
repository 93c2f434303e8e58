"""Checkpoint writer: joins the ranks' plans, writes each rank's file, then the manifest and the commit."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from espalier.checkpoint import manifest
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.dcp_metadata import NAME as METADATA
from espalier.checkpoint.dcp_planners import SavePlanner
from espalier.checkpoint.run_identity import RunIdentity, refuse_foreign
from espalier.checkpoint.storage import Folder, Storage, folder_name, read_manifest
from espalier.checkpoint.write_rate import LimitedFileSystem, WriteLimit
from espalier.recipe.cache_dir import writing


class WriteJob(NamedTuple):
    """What to write: flat names to CPU tensors (or DTensors of them) and bytes. `rate`: bytes/s at most; `run`: whose
    checkpoint it is."""

    step: int
    state: dict[str, Any]
    meta: dict[str, Any]
    loss: float | None
    rate: float = math.inf
    run: RunIdentity | None = None


_Share = tuple[list[Any], dict[str, tuple[int, str]], float]
"""What one rank wrote, as plain values: the results, bytes and hash of each file, and the seconds that it took."""


class Written(NamedTuple):
    """A checkpoint: its bytes, and the seconds of the rank that wrote longest, in which these went out."""

    bytes: int
    seconds: float


class Write:
    """One save of one rank, run once on the writing thread. Has state between its phases."""

    def __init__(self, place: Storage, team: Coordinator, job: WriteJob) -> None:
        self.place, self.team, self.job = place, team, job
        self.name = folder_name(job.step)
        self._planner = SavePlanner()
        self._metadata: Metadata | None = None
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
        self._planner.set_up_planner(self.job.state, is_coordinator=self.team.rank == 0)
        return _plan_items(self._planner.create_local_plan())

    def _join(self, plans: list[list[Any]]) -> list[list[Any]]:
        with writing(self.place.path(self.name)):
            with contextlib.suppress(manifest.Bad, OSError):  # what is damaged, or not there, may be replaced
                refuse_foreign(self.job.run, read_manifest(self.place, self.name).stamp, self.place.path(self.name))
            self.place.clean(self.name)
            self._writer()
        joined, self._metadata = self._planner.create_global_plan([_save_plan(items) for items in plans])
        return [_plan_items(plan) for plan in joined]

    def _write(self, items: list[Any]) -> _Share:
        begun = time.monotonic()
        with writing(self.place.path(self.name)):
            writer = self._writer()
            # The writer names files after the plan's place in the list of all ranks' plans.
            plan = writer.prepare_global_plan([SavePlan([])] * self.team.rank + [_save_plan(items)])[-1]
            results = writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
            files = self._publish(sorted({result.storage_data.relative_path for result in results}))
            hashes = {name: (file.bytes, file.xxh3) for name, file in files.items()}
            return _result_rows(results), hashes, time.monotonic() - begun

    def _commit(self, shares: list[_Share]) -> list[tuple[int, float]]:
        assert self._metadata is not None, "rank 0 joins the plans before it commits"
        with writing(self.place.path(self.name)):
            self._writer().finish(self._metadata, [_write_results(rows) for rows, *_ in shares])
            files = self._publish([METADATA])
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

    def _writer(self) -> FileSystemWriter:
        if self._folder is None:
            self._folder = self.place.begin(self.name)
        writer = FileSystemWriter(self._folder, per_thread_copy_ahead=0)  # all is in host memory already
        if self._limit is not None and isinstance(self.place, Folder):  # else it is what goes up that is limited
            writer.fs = LimitedFileSystem(self._limit)
        writer.set_up_storage_writer(self.team.rank == 0)
        return writer

    def _publish(self, files: list[str]) -> dict[str, manifest.FileHash]:
        assert self._folder is not None, "files are written before they are published"
        digests = {file: manifest.digest_path(self._folder / file) for file in files}
        self.place.publish(self.name, files, self._limit)
        return digests


# --- plans and results as plain values -------------------------------------------------------------------------------


def _save_plan(items: list[Any]) -> SavePlan:
    return SavePlan([WriteItem(_index(index), WriteItemType(kind), None, _data(data)) for index, kind, data in items])


def _plan_items(plan: SavePlan) -> list[Any]:
    return [(_index_of(item.index), item.type.value, _data_of(item.tensor_data)) for item in plan.items]


def _write_results(rows: list[Any]) -> list[WriteResult]:
    return [WriteResult(_index(index), size, _StorageInfo(*where)) for index, size, where in rows]


def _result_rows(results: list[WriteResult]) -> list[Any]:
    return [(_index_of(result.index), result.size_in_bytes, _where(result.storage_data)) for result in results]


def _where(stored: _StorageInfo) -> tuple[str, int, int]:
    return stored.relative_path, stored.offset, stored.length


def _index_of(index: MetadataIndex) -> tuple[Any, ...]:
    return index.fqn, None if index.offset is None else tuple(index.offset), index.index


def _index(fields: tuple[Any, ...]) -> MetadataIndex:
    return MetadataIndex(*fields)


def _data_of(data: TensorWriteData | None) -> tuple[Any, ...] | None:
    if data is None:
        return None
    return tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype, tuple(data.size)


def _data(fields: tuple[Any, ...] | None) -> TensorWriteData | None:
    if fields is None:
        return None
    offsets, sizes, dtype, size = fields
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
