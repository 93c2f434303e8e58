"""Condensed rows on disk: for each range of nodes one extent with its own rows and those of its outside sources.

MEGA's Condense-Edge (HPCA 2024, arXiv 2311.09775, section V) as a disk layout: a range's rows are read in sequence,
where rows by number would be read page by page, with whatever else is on these pages. Rows are written as they are
produced, in ascending order of nodes: a row goes to the extent of its own range, and to that of every range with an
edge from it. Where many ranges need the same rows, writing them so often takes more than it saves: `foretell` says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data.graph import Array
from espalier.graph.sampling.neighbor_sampler import NeighborSampling
from espalier.recipe.offsets import offsets_of
from espalier.recipe.resource import Resource
from espalier.store import base
from espalier.store.cost import PAGE, pages
from espalier.store.direct_io import DirectFile, aligned, bytes_of
from espalier.store.io_queue import IoQueue
from espalier.store.rows import LONGEST

SAMPLED = 8
"""Ranges whose sources are looked at to foretell what all of them take."""


def outside_sources(sampler: NeighborSampling, start: int, stop: int) -> Array:
    """int64: nodes outside `[start, stop)` from which edges come into it, ascending, each once."""
    sources = np.unique(sampler.sources(start, stop))
    return sources[(sources < start) | (sources >= stop)].astype(np.int64)


class Foretold(NamedTuple):
    """Bytes that sums over all ranges take with rows by number and with condensed ones: `plain` and `condensed` are
    read; `written` besides what is written anyway, `prepared` to find out which rows a range needs."""

    plain: float
    condensed: float
    written: float
    prepared: float

    @property
    def pays(self) -> bool:
        """Whether condensed rows take less."""
        return self.condensed + self.written + self.prepared < self.plain


def foretell(sampler: NeighborSampling, starts: Array, row_bytes: int) -> Foretold:
    """Of ranges that begin at `starts` (and end at its last); from `SAMPLED` of them."""
    ranges = len(starts) - 1
    chosen = np.unique(np.linspace(0, ranges - 1, min(ranges, SAMPLED)).astype(int))
    plain = condensed = written = prepared = 0
    for start, stop in zip(starts[chosen].tolist(), starts[chosen + 1].tolist(), strict=True):
        outside = outside_sources(sampler, start, stop)
        plain += PAGE * _touched(np.sort(np.concatenate([np.arange(start, stop), outside])), row_bytes)
        condensed += pages((stop - start + len(outside)) * row_bytes)
        written += len(outside) * row_bytes
        prepared += sampler.source_bytes * int(sampler.degrees(np.arange(start, stop)).sum()) + 16 * len(outside)
    scale = ranges / max(1, len(chosen))
    return Foretold(scale * plain, scale * condensed, scale * written, scale * prepared)


def _touched(ids: Array, row_bytes: int) -> int:
    """Pages on which these rows lie, one behind the other; `ids` ascend."""
    first = ids * row_bytes // PAGE
    last = (ids * row_bytes + row_bytes - 1) // PAGE
    before = np.concatenate([[-1], last[:-1]])
    return int(np.maximum(0, last - np.maximum(first, before + 1) + 1).sum())


@dataclass(frozen=True, eq=False)
class CondensedLayout:
    """Where rows lie.

    Attributes:
        starts: int64 [ranges + 1], the first node of each range, and how many nodes there are.
        bounds: int64 [ranges + 1], where the outside sources of each range begin in `sources`, ascending in a range.
    """

    starts: Array
    bounds: Array
    sources: Array
    row_bytes: int

    @staticmethod
    def write(path: Path, starts: Array, outside: Iterable[Array]) -> None:
        """Writes to `path` which outside sources each range has; whole or not at all."""
        fresh = path.with_name(f"{path.name}.part")
        bounds = [0]
        with fresh.open("wb") as file:
            file.seek(8 * (2 * len(starts) + 1))
            for sources in outside:
                file.write(sources.astype(np.int64).data)
                bounds.append(bounds[-1] + len(sources))
            file.seek(0)
            file.write(np.array([len(starts), *starts, *bounds], np.int64).data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path, row_bytes: int) -> CondensedLayout:
        """What `write` has written, mapped."""
        words = np.memmap(path, np.int64, "r")
        count = int(words[0])
        starts, bounds, sources = np.split(words[1:], [count, 2 * count])
        return cls(np.array(starts), np.array(bounds), sources, row_bytes)

    @cached_property
    def offsets(self) -> Array:
        """int64 [ranges + 1]: where each extent begins, and the bytes of all."""
        rows = np.diff(self.starts) + np.diff(self.bounds)
        return offsets_of(-(-rows * self.row_bytes // PAGE) * PAGE)

    def outside(self, at: int) -> Array:
        """Outside sources of a range."""
        return self.sources[self.bounds[at] : self.bounds[at + 1]]

    def range_of(self, node: int) -> int:
        """The range that has `node`."""
        return int(np.searchsorted(self.starts, node, side="right")) - 1

    def places(self, at: int, ids: Array) -> Array:
        """Which rows of a range's extent those of its own nodes and outside sources are."""
        start = self.starts[at]
        stop = self.starts[at + 1]
        outside = self.outside(at)
        positions = np.minimum(np.searchsorted(outside, ids), max(0, len(outside) - 1))
        inside = (ids >= start) & (ids < stop)
        assert inside.all() or (outside[positions] == ids)[~inside].all(), "the range has no edge from there"
        return np.where(inside, ids - start, stop - start + positions)

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, Array]]:
        """Where rows of the nodes `[first, first + count)` go: an offset, and which of them (int64), for each piece."""
        last = first + count
        for at in range(self.range_of(first), len(self.starts) - 1):
            start = max(first, int(self.starts[at]))
            stop = min(last, int(self.starts[at + 1]))
            if start >= stop:
                break
            place = int(self.offsets[at]) + (start - int(self.starts[at])) * self.row_bytes
            yield place, np.arange(start, stop) - first
        sizes = np.diff(self.starts)
        for at in range(len(sizes)):
            outside = self.outside(at)
            begin, end = np.searchsorted(outside, [first, last])
            if begin < end:
                yield int(self.offsets[at] + (sizes[at] + begin) * self.row_bytes), outside[begin:end] - first


class CondensedRows(Resource):
    """Rows [nodes, columns] in a file, of which each `read` takes those of one range and its outside sources, the
    first of them of the range itself. Holds the file and a buffer for the largest extent."""

    def __init__(self, path: Path, layout: CondensedLayout, dtype: torch.dtype) -> None:
        self.layout = layout
        self.dtype = dtype
        self.shape: tuple[int, ...] = (layout.row_bytes // dtype.itemsize,)
        self.queue = IoQueue()
        self._file = DirectFile(path, "read")
        self._buffer = aligned(int(np.diff(layout.offsets).max(initial=0)))

    def __len__(self) -> int:
        return int(self.layout.starts[-1])

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes

    def read(self, ids: Tensor, out: Tensor) -> None:
        """See Rows: the range's extent is read whole."""
        base.check_request(self, ids, out)
        if not len(ids):
            return
        at = self.layout.range_of(int(ids[0]))
        begin, end = self.layout.offsets[at : at + 2].tolist()
        starts = np.arange(begin, end, LONGEST * PAGE)
        runs = np.stack([starts, np.minimum(LONGEST * PAGE, end - starts), starts - begin], 1)
        self.queue.read_runs(self._file, runs, self._buffer, int(self.layout.offsets[-1])).result()
        rows = (end - begin) // self.row_bytes
        extent = self._buffer[: rows * self.row_bytes].view(self.dtype).view(rows, *self.shape)
        torch.index_select(extent, 0, torch.from_numpy(self.layout.places(at, ids.numpy())), out=out)

    def close(self) -> None:
        self.queue.close()
        self._file.close()


def write_at(file: int, data: Tensor, offset: int) -> None:
    """Writes all of `data` to the open `file`."""
    view = bytes_of(data)
    while len(view):
        done = os.pwrite(file, view, offset)
        view = view[done:]
        offset += done
