"""Rolling pool: a share of the packed batches is drawn and packed anew for every epoch, in the background.

DiskGNN (arXiv 2405.05231) replays one pool of batches for ever: share 0 here. With share 1 every epoch has draws of its
own, as online sampling has. In between, batches are replaced in turn, so that after 1 / share epochs none is left of
those before. What an epoch reads is a function of (seed, epoch) alone, whenever the packing ends.

The batches of epoch 0 lie in the packed set that was given. Those that replace some of them for epoch e lie in a set of
their own in its folder, `epoch-<e>`, which is removed when all its batches are replaced. Ranks share the sets: whoever
comes first packs one, the others wait for it, and a set that is missing is packed again, to the same bytes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from espalier.graph.data.graph import Array
from espalier.mechanisms.disk_batches import manifest
from espalier.mechanisms.disk_batches.batch_pool import Draws
from espalier.mechanisms.disk_batches.options import check_share
from espalier.mechanisms.disk_batches.pack import PackedSet, PackRequest, pack
from espalier.mechanisms.disk_batches.reader import ReaderOptions, Repair, TieredFeatures
from espalier.parallel.workload import Progress
from espalier.recipe.errors import UserError
from espalier.recipe.resource import Resource

AHEAD = 64
"""Batches that a reader may be ahead of training, at most."""
NICE = 19
"""Of the threads that draw and pack in the background: they yield to training, and so do their disk accesses."""


@dataclass(frozen=True)
class ResampleSchedule:
    """Which of `batches` are replaced for which epoch: a share of them, in turn, in a seeded order."""

    batches: int
    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.share)

    def fresh(self, epoch: int) -> Array:
        """int64, ascending: the batches that are drawn anew for `epoch`; none for epoch 0."""
        first, last = self._turns(max(1, epoch))[-2:] if epoch else (0, 0)
        return np.sort(self._order[np.arange(first, last) % max(1, self.batches)])

    def sources(self, epoch: int) -> Array:
        """int64 [batches]: the epoch for which each batch of `epoch` was drawn."""
        turns = self._turns(epoch)
        places = np.arange(self.batches)
        last = places + (turns[-1] - 1 - places) // max(1, self.batches) * self.batches  # below 0: not replaced yet
        sources = np.zeros(self.batches, np.int64)
        sources[self._order] = np.where(last < 0, 0, np.searchsorted(turns, last, side="right"))
        return sources

    def _turns(self, epoch: int) -> Array:
        """int64 [epoch + 1]: how many batches have been replaced in all, by epoch."""
        return np.floor(np.arange(epoch + 1) * (self.share * self.batches) + 1e-9).astype(np.int64)

    @cached_property
    def _order(self) -> Array:
        return np.random.default_rng([self.seed, 0x2011]).permutation(self.batches)

    def dealt(self, seeds: Sequence[Array], epoch: int) -> list[Array]:
        """The seeds of all batches in `epoch`, after those of the epoch before: what the replaced batches ask for is
        dealt out among them again."""
        dealt = list(seeds)
        places = self.fresh(epoch)
        if len(places):
            joined = np.concatenate([seeds[at] for at in places])
            shuffled = np.random.default_rng([self.seed, 0x5EED, epoch]).permutation(joined)
            cuts = np.cumsum([len(seeds[at]) for at in places])[:-1]
            for at, part in zip(places, np.split(shuffled, cuts), strict=True):
                dealt[at] = part
        return dealt


class RollingPool(Resource):
    """The packed batches of one epoch after another. Has state: the sets that are open, and a thread that packs.

    Args:
        request: of the set of epoch 0; packed here where it is not.
        share: of its batches that is replaced for each epoch.
        ranks: how many read the batches of an epoch together.
    """

    def __init__(self, request: PackRequest, share: float, progress: Progress | None = None, ranks: int = 1) -> None:
        self.request = request
        self._ranks = ranks
        self._behind = -(-AHEAD * ranks // max(1, len(request.draws.seeds)))
        self.schedule = ResampleSchedule(len(request.draws.seeds), share, request.draws.seed)
        self.first = pack(request, progress)
        self._sets = {0: self.first}
        self.hot_nodes = self.first.plan.read("hot").numpy()
        self._sources = lru_cache(AHEAD)(self.schedule.sources)
        self._seeds: tuple[int, list[Array]] = (0, list(request.draws.seeds))
        self._packing: Future[None] | None = None
        self._closing = False

    def begin(self, epoch: int, following: bool = True) -> None:
        """Opens the sets of `epoch`, waiting for what is still being packed, and begins to pack those of the epoch
        `following`. Sets of batches that may still be on their way to training stay open."""
        packing = self._packing
        self._packing = None
        if packing is not None:
            packing.result()
        first = max(0, epoch - self._behind)
        needed = {0, *(source for at in range(first, epoch + 1) for source in self._sources(at).tolist())}
        for source in sorted(needed - set(self._sets)):
            self._sets[source] = pack(self._request(source))
        for source in sorted(set(self._sets) - needed):
            self._sets.pop(source).close()
        self._remove_others(epoch)
        if following and len(self.schedule.fresh(epoch + 1)):
            self._packing = self._in_background(epoch + 1)

    def place(self, index: int) -> tuple[PackedSet, int]:
        """The set that holds a batch, and its number there. `index`: epoch * batches + batch; `AHEAD` batches
        before those of the epoch that was begun last may be asked for."""
        epoch, batch = divmod(index, self.schedule.batches)
        source = int(self._sources(epoch)[batch])
        number = int(np.searchsorted(self.schedule.fresh(source), batch)) if source else batch
        return self._sets[source], number

    def close(self) -> None:
        """Stops packing, which a later pool goes on with, and closes all sets."""
        self._closing = True
        if self._packing is not None:
            self._packing.exception()  # waits; what failed would be tried again
        for packed in self._sets.values():
            packed.close()

    def _request(self, epoch: int) -> PackRequest:
        """What replaces batches for `epoch`; the rows in memory are those of the first set."""
        folders = tuple(_folder(folder, epoch) for folder in self.request.folders)
        return replace(
            self.request, folders=folders, draws=self._drawn(epoch), memory=self.hot_nodes, disk=None, waits=True
        )

    def _drawn(self, epoch: int) -> Draws:
        """The batches drawn anew for `epoch`, at steps of their own."""
        first = self.request.draws
        fresh = self.schedule.fresh(epoch)
        at, seeds = self._seeds if self._seeds[0] <= epoch else (0, list(first.seeds))
        for number in range(at + 1, epoch + 1):
            seeds = self.schedule.dealt(seeds, number)
        self._seeds = epoch, seeds
        period = max(first.steps, default=0) + 1
        steps = [epoch * period + first.steps[batch] for batch in fresh]
        return replace(first, seeds=[seeds[batch] for batch in fresh], steps=steps)

    def _in_background(self, epoch: int) -> Future[None]:
        ended: Future[None] = Future()
        request = self._request(epoch)

        def run() -> None:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread and those it starts
                pack(request, self._on_progress).close()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        threading.Thread(target=run, name=f"pack-epoch-{epoch}", daemon=True).start()
        return ended

    def _on_progress(self, _done: int, _total: int) -> None:
        if self._closing:
            raise _Closing

    def _remove_others(self, epoch: int) -> None:
        """Removes the sets of which no rank reads a batch: others may be as far behind as a reader is ahead."""
        first = max(0, epoch - self._behind * min(2, self._ranks))
        needed = {source for at in range(first, epoch + 1) for source in self._sources(at).tolist()}
        for path in self.request.folders[0].glob("epoch-*"):
            number = int(path.name.removeprefix("epoch-"))
            if number < epoch and number not in needed:
                folders = [_folder(folder, number) for folder in self.request.folders]
                with suppress(UserError), manifest.locked(folders):
                    (folders[0] / manifest.FILE).unlink(missing_ok=True)  # first: what is left of it is packed anew
                    for stale in folders:
                        shutil.rmtree(stale)


class RollingFeatures(TieredFeatures):
    """The features of a rolling pool's batches; `index` of a batch is epoch * batches + batch."""

    def __init__(self, pool: RollingPool, options: ReaderOptions, repair: Repair | None = None) -> None:
        super().__init__(pool.first, options, repair)
        self.pool = pool

    def place(self, index: int) -> tuple[PackedSet, int]:
        return self.pool.place(index)

    def order(self, entries: Iterable[tuple[int, int]], last: int | None = None) -> Iterator[int]:
        """See TieredFeatures; every epoch begins where its first batch is read. Epochs ascend."""
        current = -1
        for epoch, batch in entries:
            if epoch != current:
                self.pool.begin(epoch, following=epoch != last)
                current = epoch
            yield epoch * self.pool.schedule.batches + batch

    def close_sets(self) -> None:
        """Closes the pool."""
        self.pool.close()


class _Closing(Exception):
    """Packing was stopped by `close`."""


def _folder(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch}"
