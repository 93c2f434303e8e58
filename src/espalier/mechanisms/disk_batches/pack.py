"""Batched packing (DiskGNN): one pass over the feature file deals its rows out to the extents that training reads.

After DiskGNN (arXiv 2405.05231, section 5). The feature file is read in ranges that fit the memory; for each range the
rows of every batch that fall into it are appended to the batch's extent, so that no row is read twice. Every range ends
with a commit: a run that is killed goes on with the range it was in, and the containers are the same byte for byte.

A packed set is a folder: `manifest.json`, `pool.extents` (batches without features), `plan.extents` (which row of which
batch comes from where) and `rows.extents` (rows: `hot`, `segment/<s>`, `cold/<i>`), striped where there are several
folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from espalier.graph.data.graph import Array
from espalier.graph.sampling.neighbor_sampler import NeighborSampling
from espalier.mechanisms.disk_batches import batch_pool as pool
from espalier.mechanisms.disk_batches import features, manifest
from espalier.mechanisms.disk_batches import row_placement as access
from espalier.mechanisms.disk_batches.batch_pool import Draws, Pool
from espalier.mechanisms.disk_batches.features import Features
from espalier.mechanisms.disk_batches.manifest import Inputs, Manifest, Packed, RowError
from espalier.mechanisms.disk_batches.row_format import Kind, RowFormat
from espalier.mechanisms.disk_batches.row_placement import AccessPlan, AccessSplit, Limits, Splitter
from espalier.parallel.workload import Progress
from espalier.recipe import cache_dir
from espalier.recipe.errors import UserError
from espalier.recipe.offsets import offsets_of
from espalier.store.cost import PAGE
from espalier.store.direct_io import DirectFile, aligned, bytes_of, open_file
from espalier.store.extent_filler import ExtentFiller
from espalier.store.extents import DamagedExtent, Extent, ExtentFile, ExtentWriter
from espalier.store.io_queue import IoQueue

PLAN = "plan.extents"
ROWS = "rows.extents"
HOT_ROWS = "hot.rows"
"""Hot rows of a striped set, in one file."""
BUFFER = 256 << 20
LOADED = 4 << 20
"""Bytes of the rows in memory that are read at once."""
ENCODED = 4096
"""Rows that are encoded at once."""
DEALT = 4 << 20
"""Bytes of an extent that are gathered and written at once: enough for the disk, and few for the processor's cache."""


@dataclass(frozen=True, eq=False)
class PackRequest:
    """What to pack.

    Attributes:
        folders: of the set; the first holds its manifest, plan and pool, all of them the rows (one on each disk).
        sampler, graph: what draws the batches, and the hash of its edges (`manifest.graph_hash`).
        features: the rows, one for each node.
        draws: the batches.
        memory: bytes of rows that stay in memory; or what says so, once the pool is sampled; or int64, the nodes whose
            rows another set keeps there, in its order.
        disk: bytes that rows may take on disk; None: as many as the fastest layout takes.
        rows: how they are stored. buffer: bytes that packing may hold.
        waits: whether other processes of the same run may pack the same, and are waited for.
    """

    folders: tuple[Path, ...]
    sampler: NeighborSampling
    graph: str
    features: Features
    draws: Draws
    memory: int | Callable[[Pool], int] | Array = 0
    disk: int | None = None
    rows: Kind = "fp32"
    buffer: int = BUFFER
    waits: bool = False

    @property
    def row(self) -> RowFormat:
        """Of packed rows."""
        return RowFormat(self.rows, self.features.shape[0], self.features.dtype)

    def inputs(self) -> Inputs:
        """What the set will be a function of."""
        style = self.sampler.style
        disk_rows = None if self.disk is None else self.disk // self.row.row_bytes
        return Inputs(
            graph=self.graph,
            features=features.identity(self.features),
            seeds=manifest.seeds_hash(self.draws.seeds, self.draws.steps),
            fanouts=self.draws.fanouts,
            sampling=f"seed {self.draws.seed}, {style.scale}{', loops' if style.loops else ''}",
            rows=self.rows,
            disk_rows=disk_rows,
            buffer=self.buffer,
            hot=manifest.ids_hash(self.memory) if isinstance(self.memory, np.ndarray) else "",
        )

    def ranges(self) -> Array:
        """int64 [ranges + 1]: the first node of each range that is read at once."""
        nodes = len(self.features)
        row = self.features.row_bytes
        share = 4 if self.row.stored == self.features.dtype else 5  # two ranges, what is encoded, pieces on their way
        count = max(1, self.buffer // share // max(1, row))
        return np.array([*range(0, nodes, count), nodes], np.int64)


def pack(request: PackRequest, progress: Progress | None = None) -> PackedSet:
    """Samples, plans and packs what `request` describes, or goes on where a killed run has stopped.

    Raises UserError: the folder holds a set of other inputs, another run packs into it, it is read-only, the disk is
    full (with the bytes that are missing; call again after making room), budgets too small.
    """
    folder = request.folders[0]
    wanted = request.inputs()
    with cache_dir.writing(folder, "name another store.path"), manifest.locked(request.folders, request.waits):
        stored = manifest.read(folder)
        if stored is None:  # a pool that lies there is of unknown inputs
            (folder / pool.FILE).unlink(missing_ok=True)
            stored = Manifest(wanted)
            stored.write(folder)
        stored.refuse_other(wanted, folder)
        if stored.packed is None or not stored.packed.whole:
            drawn = pool.sample_pool(folder, request.sampler, request.draws, progress)
            try:
                _pack_rows(request, _planned(request, stored, drawn), progress)
            finally:
                drawn.close()
        return PackedSet(request.folders)


# --- the plan --------------------------------------------------------------------------------------------------------


def _planned(request: PackRequest, stored: Manifest, drawn: Pool) -> Manifest:
    """The manifest with an access plan, which lies in the container of plans then."""
    if stored.packed is not None:
        return stored
    folder = request.folders[0]
    ranges = request.ranges()
    row = request.row
    memory = request.memory(drawn) if callable(request.memory) else request.memory
    hot = memory if isinstance(memory, np.ndarray) else memory // max(1, row.row_bytes)
    limits = Limits(hot, stored.inputs.disk_rows, row.row_bytes, ranges, request.draws.seed)
    plan = access.plan(drawn.node_lists, len(request.features), limits)
    with ExtentWriter(folder / PLAN) as writer:
        _write_plan(writer, plan, drawn)
    dtype = str(request.features.dtype).removeprefix("torch.")
    about = Packed(plan.nodes, plan.batches, len(plan.hot), plan.length, row.width, dtype, len(ranges) - 1)
    planned = stored.changed(packed=about)
    planned.write(folder)
    return planned


def _write_plan(writer: ExtentWriter, plan: AccessPlan, drawn: Pool) -> None:
    """Extents: `hot` by rank; by segment its nodes in page order; by batch its split and the nodes of its own rows;
    `bounds` [extents of rows, ranges + 1], where the rows of each range begin; `pages` [batches, 2]."""
    splitter = Splitter(plan.hot, plan.segments, plan.length, plan.nodes)
    hot_rows = plan.hot if isinstance(plan.limits.hot_rows, int) else plan.hot[:0]
    bounds = [_bounds(np.sort(hot_rows), plan.limits.ranges)]
    writer.append("hot", torch.from_numpy(plan.hot))
    for segment, ids in enumerate(plan.segments):
        writer.append(f"segment/{segment}", torch.from_numpy(ids))
        bounds.append(_bounds(ids, plan.limits.ranges))
    for batch in range(plan.batches):
        nodes = drawn.nodes(batch)
        split = splitter.split(batch, nodes)
        writer.append(f"split/{batch}", _joined(split))
        writer.append(f"cold/{batch}", torch.from_numpy(nodes[split.cold_at]))
        bounds.append(_bounds(nodes[split.cold_at], plan.limits.ranges))
    writer.append("bounds", torch.from_numpy(np.stack(bounds)))
    writer.append("pages", torch.from_numpy(np.stack([plan.cache_pages, plan.pages], 1)))


def _bounds(ids: Array, ranges: Array) -> Array:
    """int64 [ranges + 1]: where the rows of each range begin among `ids`, which are in the order of their ranges."""
    if (ids[1:] > ids[:-1]).all():
        return np.searchsorted(ids, ranges)
    counts = np.bincount(np.searchsorted(ranges, ids, side="right") - 1, minlength=len(ranges) - 1)
    return offsets_of(counts[: len(ranges) - 1])


def _joined(split: AccessSplit) -> Tensor:
    """int32: how long hot, shared and cold are, and the five lists."""
    counts = np.array([len(split.hot_at), len(split.shared_at), len(split.cold_at)], np.int32)
    return torch.from_numpy(np.concatenate([counts, *split]).astype(np.int32))


def _parted(joined: Array) -> AccessSplit:
    hot, shared, cold = joined[:3].tolist()
    return AccessSplit(*np.split(joined[3:], np.cumsum([hot, hot, shared, shared, cold])[:-1]))


# --- the pass over the features --------------------------------------------------------------------------------------


class _Target(NamedTuple):
    """An extent of rows: its name, its nodes (of a stretch of them), and where each range's begin."""

    name: str
    nodes: Callable[[int, int], Array]
    bounds: Array


def _targets(plan: ExtentFile, about: Packed) -> list[_Target]:
    """Every extent of rows in the order in which they lie: memory first, then a segment's cache and its batches."""
    bounds = plan.read("bounds").numpy()
    segments = -(-about.batches // about.length)
    hot = np.sort(plan.read("hot").numpy())  # bounds end at 0 where another set has their rows
    targets = [_Target("hot", lambda a, b: hot[a:b], bounds[0])]
    for segment in range(segments):
        targets.append(_target(plan, f"segment/{segment}", bounds[1 + segment]))
        batches = range(segment * about.length, min((segment + 1) * about.length, about.batches))
        targets += [_target(plan, f"cold/{batch}", bounds[1 + segments + batch]) for batch in batches]
    return targets


def _target(plan: ExtentFile, name: str, bounds: Array) -> _Target:
    def nodes(start: int, stop: int) -> Array:
        out = torch.empty(stop - start, dtype=torch.int64)
        if stop > start:
            plan.file.read_into(out, plan.offset(name) + start * out.itemsize)
        return out.numpy()

    return _Target(name, nodes, bounds)


def _pack_rows(request: PackRequest, stored: Manifest, progress: Progress | None) -> None:
    about = stored.packed
    row = request.row
    ranges = request.ranges()
    assert about is not None
    with ExtentFile(request.folders[0] / PLAN) as plan:
        targets = _targets(plan, about)
        sizes = {target.name: int(target.bounds[-1]) * row.row_bytes for target in targets}
        filled = {target.name: int(target.bounds[about.done]) * row.row_bytes for target in targets}
        commit: Future[None] | None = None
        with (
            IoQueue() as queue,
            ExtentFiller(
                _striped(request.folders), sizes, filled if about.done else None, queue, request.buffer // 4
            ) as filler,
            ThreadPoolExecutor(2) as ahead,
        ):
            filler.hash_pages(target.name for target in targets if target.name.startswith("segment/"))
            for at, rows in _reads_ahead(request, targets, about, ahead):
                if progress is not None:
                    progress(int(ranges[at]), about.nodes)
                error = _deal(request, (targets, filler), (at, rows), about.error)
                if commit is not None:
                    commit.result()
                about = about.changed(done=at + 1, error=error)
                now = stored.changed(packed=about)
                commit = ahead.submit(_commit, filler.checkpoint(), now, request.folders[0])
            if commit is not None:
                commit.result()
            filler.finish()
    stored.changed(packed=about.changed(whole=True)).write(request.folders[0])


def _commit(durable: Callable[[], None], now: Manifest, folder: Path) -> None:
    """Notes that a range is packed, once its rows are on the disk."""
    durable()
    now.write(folder)


def _reads_ahead(
    request: PackRequest, targets: Sequence[_Target], about: Packed, thread: ThreadPoolExecutor
) -> Iterator[tuple[int, Tensor]]:
    """The ranges of which a batch uses a row, packed ones left out, with their rows. The next is read meanwhile."""
    bounds = request.ranges()
    features = request.features
    used = np.flatnonzero(np.sum([np.diff(target.bounds) for target in targets], axis=0))
    wanted = used[used >= about.done].tolist()

    def read(at: int) -> Tensor:
        return features.consecutive(int(bounds[at]), int(bounds[at + 1]))

    following = thread.submit(read, wanted[0]) if wanted else None
    for at, after in zip(wanted, [*wanted[1:], None], strict=False):
        assert following is not None
        rows = following.result()
        following = None if after is None else thread.submit(read, after)
        yield at, rows


def _deal(
    request: PackRequest,
    into: tuple[Sequence[_Target], ExtentFiller],
    part: tuple[int, Tensor],
    error: RowError,
) -> RowError:
    """Appends the rows of a range wherever they belong; the error so far."""
    (targets, filler), (at, rows), row = into, part, request.row
    start = int(request.ranges()[at])
    encoded, error = _encoded(row, rows, (error, start))
    unit = _unit(row.row_bytes)
    step = max(1, (DEALT - PAGE) // max(1, row.row_bytes))
    table = encoded.view(unit).numpy()
    for target in targets:
        ids = target.nodes(int(target.bounds[at]), int(target.bounds[at + 1])) - start
        for begin in range(0, len(ids), step):
            piece = ids[begin : begin + step]
            room = filler.room(target.name, len(piece) * row.row_bytes)
            out = room.data.view(unit).view(len(piece), -1).numpy()
            # by NumPy: torch's threads would spin afterwards, and transfers wait for a processor
            np.take(table, piece, axis=0, out=out, mode="clip")
            filler.extend(target.name, room, begin + step < len(ids))
    return error


def _encoded(row: RowFormat, rows: Tensor, before: tuple[RowError, int]) -> tuple[Tensor, RowError]:
    """uint8 [rows, row bytes], and (largest error of a value, relative root mean square) of all rows up to these.
    `before`: of those in front, and how many they are."""
    (most, share), start = before
    if row.stored == row.dtype:
        return row.encode(rows, start), (most, share)
    out = torch.empty(len(rows), row.row_bytes, dtype=torch.uint8)
    for at in range(0, len(rows), ENCODED):
        piece = rows[at : at + ENCODED]
        count = start + at
        encoded = row.encode(piece, count)
        out[at : at + ENCODED] = encoded
        if not row.lossless:
            values = piece.float()
            wrong = (row.decode(encoded) - values).abs_()
            mean = float(wrong.square().mean()) / max(1e-30, float(values.square().mean()))
            most = max(most, float(wrong.max()))
            share = ((share**2 * count + mean * len(piece)) / (count + len(piece))) ** 0.5
    return out, (most, share)


def _unit(row_bytes: int) -> torch.dtype:
    """The widest integer that rows consist of: they are copied by it."""
    units = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return next((dtype for size, dtype in units.items() if row_bytes % size == 0), torch.uint8)


def _striped(folders: Sequence[Path]) -> Path | Sequence[Path]:
    return folders[0] / ROWS if len(folders) == 1 else [folder / ROWS for folder in folders]


# --- what was packed -------------------------------------------------------------------------------------------------


class PackedSet:
    """A packed set, read-only. Holds its three containers open. Raises UserError where the set is not whole.

    Args:
        folders: as they were when it was packed.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        stored = manifest.read(folders[0])
        if stored is None or stored.packed is None or not stored.packed.whole:
            raise UserError(
                f"{folders[0]} holds no packed set that is whole.",
                why="packing was not begun there, or was interrupted",
                do="pack again with the same settings: it goes on where it stopped",
            )
        self.manifest = stored
        self.about = stored.packed
        remedy = manifest.repack(folders[0])
        self.pool = Pool(folders[0], remedy)
        self.plan = ExtentFile(folders[0] / PLAN, remedy)
        self.rows = ExtentFile(_striped(folders), remedy)
        about = self.about
        self.row = RowFormat(stored.inputs.rows, about.width, getattr(torch, about.dtype))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.about.batches

    @property
    def hot_rows(self) -> int:
        """Rows that stay in memory."""
        return self.about.hot_rows

    def segment_of(self, batch: int) -> int:
        """The segment whose disk cache `batch` shares."""
        return batch // self.about.length

    def split(self, batch: int) -> AccessSplit:
        """Where the rows of a batch come from."""
        return _parted(self.plan.read(f"split/{batch}").numpy())

    @cached_property
    def pages(self) -> Array:
        """int64 [batches, 2]: 4 KiB pages that a batch reads of its segment's cache, and with its own extent."""
        return self.plan.read("pages").numpy()

    def load_hot(self) -> Tensor:
        """uint8 [hot rows, row bytes]: the rows that stay in memory, the most used first; checked. Read in pieces, so
        that they are held once."""
        extent = self.rows.extent("hot")
        order = torch.from_numpy(self._hot_order)
        table = torch.empty(len(order), self.row.row_bytes, dtype=torch.uint8)
        digest = xxhash.xxh3_64()
        size = self.row.row_bytes
        assert extent.bytes == table.nbytes, "another set keeps these rows"
        count = max(1, LOADED // max(1, size))
        for at in range(0, len(order), count):
            places = order[at : at + count]
            piece = aligned(len(places) * size)[: len(places) * size]
            self.rows.file.read_into(piece, extent.offset + at * size)
            digest.update(bytes_of(piece))
            table[places] = piece.view(-1, size)
        if digest.intdigest() != extent.hash:
            raise self.rows.damaged_extent("hot", "its checksum does not match")
        return table

    def map_hot(self) -> tuple[Tensor, Array]:
        """The same rows as they lie on disk, mapped, and int32 [hot rows], where each one lies, the most used first.

        All processes of a machine that map them hold them once. Those of a set on several disks are written to one
        file first, in its first folder.
        """
        extent = self.rows.extent("hot")
        path = self.rows.path
        start = 0
        if len(self.folders) == 1:
            start = extent.offset
        else:
            path = self._gathered(extent)
        file = torch.from_file(str(path), True, start + extent.bytes, dtype=torch.uint8)
        table = file[start:].view(-1, self.row.row_bytes)
        try:
            self.rows.check("hot", table)
        except DamagedExtent:
            if len(self.folders) > 1:
                path.unlink(missing_ok=True)  # written again when the set is mended
            raise
        return table, np.argsort(self._hot_order).astype(np.int32)

    def _gathered(self, extent: Extent) -> Path:
        """The file that holds the hot rows of a striped set, written by whoever comes first."""
        path = self.folders[0] / HOT_ROWS
        if path.exists() and path.stat().st_size == extent.bytes:
            return path
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            with DirectFile(unfinished, "create", extent.bytes) as file:
                for at in range(0, extent.bytes, LOADED):
                    piece = aligned(min(LOADED, extent.bytes - at))
                    self.rows.file.read_into(piece, extent.offset + at)
                    file.write_from(piece, at)
            os.truncate(unfinished, extent.bytes)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path

    @property
    def _hot_order(self) -> Array:
        """int64: the rank of each hot row in the order in which they lie on disk, which is that of their ids."""
        return np.argsort(self.plan.read("hot").numpy(), kind="stable")

    def nodes_of(self, extent: str) -> Array:
        """int64: the nodes whose rows are in an extent of rows, in its order."""
        ids: Array = self.plan.read(extent).numpy()
        return np.sort(ids) if extent == "hot" else ids

    def close(self) -> None:
        for file in (self.pool, self.plan, self.rows):
            file.close()


def repack(packed: PackedSet, extent: str, source: Features) -> None:
    """Writes one extent of rows again from the features, for example after `DamagedExtent`. Raises UserError where they
    are not those that were packed."""
    ids = packed.nodes_of(extent)
    data = packed.row.encode(features.rows_of(source, ids)).reshape(-1)
    packed.rows.check(extent, data)
    file = open_file(_striped(packed.folders), "write")
    try:
        file.write_from(data, packed.rows.offset(extent))
        file.sync()
    finally:
        file.close()
