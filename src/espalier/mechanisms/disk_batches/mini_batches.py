"""Mini-batches out of core: sampled and packed once, then read with their features, epoch by epoch.

`prepare` is for anybody's loop: what it returns stands where PyG's `NeighborLoader` would. `RunBatches` is the same for
a run of `espalier train`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from espalier import recipe as config
from espalier.graph.data.condensed_file import Foretold
from espalier.graph.data.graph import Array, Graph
from espalier.graph.networks.base import MessageBlocks
from espalier.graph.networks.gnn import Gnn
from espalier.graph.sampling import subgraphs
from espalier.graph.sampling.batch_strategy import Drawn
from espalier.graph.sampling.neighbor_sampler import ALL, Sampler, Style, named
from espalier.graph.sampling.subgraphs import SubgraphBatch, View
from espalier.graph.tasks.node_classification import NodeTask
from espalier.mechanisms.disk_batches import cost, inference, manifest
from espalier.mechanisms.disk_batches import disk_sampler as topology
from espalier.mechanisms.disk_batches import features as feature_files
from espalier.mechanisms.disk_batches.batch_pool import Draws, epoch_seeds
from espalier.mechanisms.disk_batches.features import Features, FeatureTable
from espalier.mechanisms.disk_batches.inference import InferenceFolder
from espalier.mechanisms.disk_batches.options import Store
from espalier.mechanisms.disk_batches.pack import BUFFER, PackedSet, PackRequest, pack, repack
from espalier.mechanisms.disk_batches.reader import (
    TIERS,
    WINDOW,
    LargestBatch,
    PackedBatches,
    ReadBatch,
    ReaderOptions,
    TieredFeatures,
    batch_order,
)
from espalier.mechanisms.disk_batches.rolling_pool import RollingFeatures, RollingPool
from espalier.mechanisms.disk_batches.row_format import Kind, RowFormat
from espalier.parallel.workload import ALONE, PackStart, Progress, Shard, to_device
from espalier.recipe import units
from espalier.recipe.cache_dir import cache_folder
from espalier.recipe.errors import UserError
from espalier.recipe.resource import Resource
from espalier.store.artifacts import Artifact, Table
from espalier.store.base import Rows
from espalier.store.cost import PAGE, pages
from espalier.store.extents import DamagedExtent
from espalier.track.progress import Waiting

if TYPE_CHECKING:
    from espalier.graph.run import GraphRun

HELD = 2
"""Steps whose features training holds: the one that it computes, and the next, which was handed over."""
QUEUES = ((3, 2), (2, 1), (1, 1))
"""(batches read at once, assembled ones that wait), from the fastest; the last needs the least memory."""


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryShare:
    """How `store.memory` is divided between hot rows and what ranks read into.

    Attributes:
        memory: bytes of all ranks of this machine. ranks: how many those are. cuts: micro-batches of a rank's step.
        shared: whether ranks that were not forked from one process share hot rows.
    """

    memory: int
    ranks: int = 1
    cuts: int = 1
    shared: bool = False

    def taken(self, read: int, largest: LargestBatch, width: int, queues: tuple[int, int]) -> int:
        """Bytes of what all ranks read into, and hold of batches on their way: `read` bytes of each, `largest`, of rows
        of `width` values."""
        return self.ranks * sum(ReaderOptions(*queues, HELD * self.cuts).sizes(largest, read, width).values())

    def hot_bytes(self, largest: LargestBatch, row: RowFormat) -> int:
        """What is left for hot rows beside batches on their way, which take half of all at most. Raises UserError."""
        read = pages(largest.inputs * row.row_bytes)
        sizes = [self.taken(read, largest, row.width, queues) for queues in QUEUES]
        taken = next((size for size in sizes if size <= self.memory // 2), sizes[-1])
        if taken > self.memory:
            raise self._too_small(taken, f"its largest batch has {largest.inputs:,} rows of {4 * row.width} bytes")
        return self.memory - taken

    def options(self, packed: PackedSet) -> ReaderOptions:
        """The longest queues that fit beside the hot rows; what is left holds pages. Raises UserError."""
        cached, most = packed.pages.max(0, initial=0).tolist()
        largest = LargestBatch.of(packed.pool)
        left = self.memory - packed.hot_rows * packed.row.row_bytes
        sizes = {queues: self.taken(most * PAGE, largest, packed.row.width, queues) for queues in QUEUES}
        fitting = next((queues for queues, size in sizes.items() if size <= left), None)
        if fitting is None:
            hot = self.memory - left
            why = f"{packed.folders[0]} was packed for {units.show_size(hot)} of hot rows, and its largest batch reads"
            raise self._too_small(hot + sizes[QUEUES[-1]], f"{why} {most:,} pages")
        pages_each = max(0, (left - sizes[fitting]) // self.ranks - largest.positions(WINDOW)) // PAGE if cached else 0
        share = self.memory - left + left // self.ranks
        return ReaderOptions(*fitting, HELD * self.cuts, pages_each, memory=share, shared=self.shared)

    def _too_small(self, least: int, why: str) -> UserError:
        shown = units.show_size(self.memory)
        return UserError(
            f"store.memory = {shown} is too small for one batch: it takes at least {least:,} bytes.",
            why=why,
            do=f'store.memory = "{-(-least // 2**20)}MiB" or more, a smaller batch, or fewer neighbours in the fan-out',
        )


# --- a packed set that is open ---------------------------------------------------------------------------------------


def opened(
    request: PackRequest, share: MemoryShare, resample: float, progress: Progress | None = None
) -> TieredFeatures:
    """Packs what is not packed yet, with memory divided by `share`, and opens it. Raises UserError."""
    row, buffer = request.row, min(BUFFER, share.memory)
    request = replace(request, memory=lambda pool: share.hot_bytes(LargestBatch.of(pool), row), buffer=buffer)
    rolling = RollingPool(request, resample, progress, share.ranks) if resample else None
    packed = rolling.first if rolling else pack(request, progress)

    def repair(name: str, error: DamagedExtent) -> None:
        repack(packed, name, request.features)

    options = share.options(packed)
    return RollingFeatures(rolling, options, repair) if rolling else TieredFeatures(packed, options, repair)


def open_rows(graph: Graph) -> Features:
    """The features of `graph`; where they are mapped from a file, of that file, read past the page cache."""
    file = topology.mapped_file(graph.features)
    if file is not None:
        return feature_files.open_features(file, nodes=graph.nodes)
    return FeatureTable(torch.from_numpy(np.asarray(graph.features)))


def set_folders(path: str | Sequence[str] | None, key: str) -> tuple[Path, ...]:
    """The folder of a packed set on each disk of `store.path`."""
    named = [path] if isinstance(path, str) else path or [str(cache_folder() / "packed")]
    return tuple(Path(name).expanduser() / key for name in named)


def stored_features(
    recipe: config.Recipe, task: NodeTask, batch: tuple[int, float], model: nn.Module
) -> cost.StoredFeatures:
    """What a plan is told of the features of a task's graph. `batch`: targets of the whole one, and its input nodes."""
    store = recipe.store
    graph = task.train.graph
    view = task.view

    def inferred(memory: int) -> list[Foretold]:
        assert isinstance(model, Gnn)
        return inference.foretold(model, view.sampler, max(memory, _hub(model, view)))

    assert isinstance(store, Store)
    assert recipe.graph is not None
    row = RowFormat(store.rows, graph.features.shape[1], torch.float32)
    memory = units.size(store.memory, "store.memory")
    return cost.StoredFeatures(
        cost.Draws(graph.degrees(), task.items, batch[0], recipe.graph.fanouts, batch[1]),
        row,
        row.row_bytes,
        int(graph.features.nbytes),
        memory,
        None if store.disk is None else units.size(store.disk, "store.disk"),
        str(set_folders(store.path, "packed")[0].parent),
        topology.edge_bytes(graph) if topology.stays_on_disk(graph, memory) else 0,
        inferred if isinstance(model, Gnn) else None,
        None if store.device is None else units.size(store.device, "store.device"),
    )


def _hub(model: Gnn, view: View) -> int:
    """Bytes that the node with the most neighbours takes in inference, which a smaller budget does not shrink."""
    return inference.least_memory(model, int(view.graph.degrees().max(initial=0)))


# --- the batches of a run --------------------------------------------------------------------------------------------


class RunBatches(Drawn):
    """The mini-batches of a run whose recipe has a [store]. Has state: the packed set and its reader, once packed.

    Step s trains on the batch of the pool that was drawn for step `drawn_step(s)`: in the first epoch that is s itself.
    """

    task: NodeTask

    def __init__(self, run: GraphRun) -> None:
        super().__init__(run)
        recipe = run.recipe
        task = run.whole_task
        assert isinstance(recipe.store, Store)
        assert recipe.graph is not None
        self.store = recipe.store
        self.fanouts = recipe.graph.fanouts
        self.seed = recipe.train.seed
        self.pool_steps = -(-task.items // run.global_batch)
        self.steps = recipe.train.steps or 0
        self.memory = units.size(recipe.store.memory, "store.memory")
        task.inference = self.infer
        self.meters = {"store": self.moved}
        self.names_nodes = "quant" in recipe.mechanisms
        self.features: TieredFeatures | None = None
        for view in (task.train, task.view):
            if topology.stays_on_disk(view.graph, self.memory):
                view.sampler = topology.disk_sampler(view.graph, view.style, self.memory // 8)
        self._cuts: dict[Shard, tuple[int, int]] = {}
        self._each = 0
        self._next = -1
        self._moved: dict[str, int] = {}
        self._batches: PackedBatches | None = None
        self._reader = threading.Lock()  # the trainer reads ahead in a thread of its own
        self._epoch_order = lru_cache(2)(lambda epoch: batch_order(self.pool_steps, epoch, self.seed))

    def drawn_step(self, step: int) -> int:
        """The step that the batch of `step` was drawn for."""
        epoch, at = divmod(step, self.pool_steps)
        return int(self._epoch_order(epoch)[at])

    def pack(self, shards: Sequence[Shard], packing: PackStart = ALONE) -> None:
        """Packs the batches of all `shards` of this machine, or opens what is packed."""
        if self.features is not None and tuple(self._cuts) == tuple(shards):
            return
        self.close()
        seeds: list[Array] = []
        steps: list[int] = []
        for step in range(self.pool_steps):
            for shard in shards:
                batch_seeds = self.cut(step, shard)
                self._cuts[shard] = (len(seeds) - step * self._each, len(batch_seeds))
                seeds += batch_seeds
                steps += [step] * len(batch_seeds)
            self._each = self._each or len(seeds)
        train = self.task.train
        alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1  # else torchrun has started each rank by itself
        share = MemoryShare(self.memory, len(shards), max(many for _, many in self._cuts.values()), not alone)
        disk = None if self.store.disk is None else units.size(self.store.disk, "store.disk")
        key = xxhash.xxh3_64_hexdigest(repr((train.graph.origin, self.store, self.fanouts, self.seed, shards)).encode())
        request = PackRequest(
            set_folders(self.store.path, f"packed-{key}"),
            train.sampler,
            manifest.graph_hash(train.graph),
            open_rows(train.graph),
            Draws(seeds, steps, self.fanouts, self.seed),
            disk=disk,
            rows=self.store.rows,
            waits=packing.waits,
        )
        self.features = opened(request, share, self.store.resample, packing.progress)
        self.features.keep_near(packing.device)

    def targets(self, step: int, shard: Shard) -> Array:
        """Of the batch of the pool."""
        return super().targets(self.drawn_step(step), shard)

    def batches(self, step: int, shard: Shard) -> list[SubgraphBatch]:
        """Of the pool; drawn anew where `shard` was not packed. Reads ahead from `step` on."""
        if self.features is None or shard not in self._cuts:
            return super().batches(self.drawn_step(step), shard)
        batches = []
        with self._reader:
            if self.features.near:
                self.features.device = self.run.device
            for work in self._read(step, shard):
                blocks = work.sampled.blocks
                if self.names_nodes:
                    packed, batch = self.features.place(work.index)
                    blocks = named(blocks, packed.pool.nodes(batch))
                batches.append(SubgraphBatch(work.features, blocks, self.task.labels[work.sampled.seeds]))
        return [self.run.placed(batch) for batch in batches]

    def artifacts(self) -> Sequence[Artifact]:
        """What was read from where, and how long training waited for it."""
        if self.features is None:
            return []
        stats = self.features.stats
        rows = [(tier.replace("_", " "), units.show_size(size)) for tier, size in stats.bytes().items()]
        rows.append(("waited for", units.show_seconds(stats.stalled)))
        rows += [("packed again", name) for name in stats.repaired]
        return [Table(("features from", f"{stats.batches:,} batches"), rows)]

    def facts(self) -> Mapping[str, Any]:
        """Features wait on disk."""
        batch = self.run.global_batch, self.reach()[0].sources * self.run.global_batch
        return {"disk_batches": stored_features(self.run.recipe, self.task, batch, self.run.bare())}

    def infer(self, model: nn.Module) -> Callable[[Array], Tensor]:
        """Node ids (int64) to their logits with all their neighbours: of all nodes by layers on disk, of few alone.

        It takes the memory that batches are read into otherwise.
        """
        view = self.task.view
        if not isinstance(model, Gnn):  # somebody's own network takes the graph as a whole
            logits = subgraphs.infer(model, view).cpu()
            return lambda ids: logits[ids]
        with self._reader:
            self._stop()
        rows = lru_cache(1)(partial(self._layer_by_layer, model))

        def read(ids: Array) -> Tensor:
            if not rows.cache_info().currsize and self._fits(view, ids):
                return self._around(model, ids)
            return feature_files.rows_of(rows(), ids)

        return read

    def _fits(self, view: View, ids: Array) -> bool:
        """Whether the rows of the whole neighbourhood of `ids` fit beside the hot ones."""
        room = self._spare() // max(1, 4 * view.graph.features.shape[1]) - len(ids)
        for layer in range(view.depth):
            ids = view.sampler.draw(ids, (ALL,)).nodes if layer else ids
            room -= int(view.sampler.degrees(ids).sum())
            if room < 0:
                return False
        return True

    @torch.no_grad()
    def _around(self, model: Gnn, ids: Array) -> Tensor:
        """Logits of few nodes: of their whole neighbourhood alone."""
        view = self.task.view
        parameter = next(model.parameters())
        drawn = view.sampler.draw(ids, (ALL,) * view.depth)
        x = feature_files.rows_of(open_rows(view.graph), drawn.nodes)
        blocks = [to_device(block, parameter.device, parameter.dtype) for block in drawn.blocks]
        return subgraphs.forward(model, x.to(parameter), tuple(blocks)).cpu()

    def _layer_by_layer(self, model: Gnn) -> Rows:
        """In a folder of the graph and the network: what was killed goes on there, and what is done is read there. One
        process at a time infers; the others wait for it."""
        view = self.task.view
        features = open_rows(self.task.view.graph)
        of = repr((view.graph.origin, self.seed, model.options))
        folder = set_folders(self.store.path, f"inference-{xxhash.xxh3_64_hexdigest(of.encode())}")[0]
        identity = f"{manifest.graph_hash(view.graph)} {feature_files.identity(features)}"
        place = InferenceFolder(folder, max(self._spare(), _hub(model, view)), identity)
        with Waiting("Inferring all nodes", 0.0, out=sys.stderr) as bar, manifest.locked([folder], waits=True):

            def told(done: int, total: int) -> None:
                bar.total = total
                bar.advance(done - bar.done)

            return inference.infer(model, view.sampler, features, place, told if self.features is None else None)

    def _spare(self) -> int:
        """Bytes of a rank beside its hot rows."""
        return self.memory if self.features is None else self.features.budget.free

    def _read(self, step: int, shard: Shard) -> list[ReadBatch]:
        assert self.features is not None
        if self._batches is None or self._next != step:
            self._stop()
            entries = self._entries(step, shard)
            last = (self.steps - 1) // self.pool_steps
            self._batches = PackedBatches(self.features, self.features.order(entries, last))
        batches = [next(self._batches) for _ in range(self._cuts[shard][1])]
        self._next = step + 1
        if self._next >= self.steps:
            self._stop()
        return batches

    def moved(self) -> dict[str, int]:
        """Bytes read from each tier since this was asked last."""
        total = self.features.stats.bytes() if self.features is not None else dict.fromkeys(TIERS, 0)
        before = self._moved
        self._moved = total
        return {tier: total[tier] - before.get(tier, 0) for tier in TIERS}

    def _entries(self, step: int, shard: Shard) -> Iterator[tuple[int, int]]:
        first, count = self._cuts[shard]
        for later in range(step, max(self.steps, step + 1)):
            start = self.drawn_step(later) * self._each + first
            yield from ((later // self.pool_steps, batch) for batch in range(start, start + count))

    def _stop(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._next = -1

    def close(self) -> None:
        """Ends reading and closes the packed set."""
        self._stop()
        if self.features is not None:
            self.features.close_sets()
        self.features, self._cuts, self._each, self._moved = None, {}, 0, {}


# --- anybody's loop --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrepareOptions:
    """How batches are drawn and kept; as in recipes.

    Attributes:
        fanout: neighbours per layer, the one next to the targets first. batch: targets of a batch.
        memory, disk: budgets, in bytes or as "512MiB"; rows: how they are stored. resample: share of the
            batches that is drawn anew for each epoch. seed: of all draws.
        style: loops and scales of the blocks, for networks of our own layers.
    """

    fanout: tuple[int, ...] = (10, 10)
    batch: int = 1024
    memory: str | int = "512MiB"
    disk: str | int | None = None
    rows: Kind = "fp32"
    resample: float = 0.0
    seed: int = 1
    style: Style = field(default_factory=lambda: Style(loops=False, scale="none"))


class MiniBatch(NamedTuple):
    """Targets with their neighbourhood, under PyG's names.

    Attributes:
        x: float32 [nodes, width], the targets' rows first. edge_index: int64 [2, edges], sources and targets.
        n_id: int64 [nodes], ids in the whole graph. batch_size: how many of them are targets.
        y: labels of the targets, None without labels. blocks: the edges by layer, for networks that take them so.
    """

    x: Tensor
    edge_index: Tensor
    n_id: Tensor
    batch_size: int
    y: Tensor | None
    blocks: MessageBlocks


@dataclass(eq=False)
class MiniBatches(Resource):
    """Mini-batches of a packed pool: each `for` passes over them once, an epoch. Has state: the number of the epoch."""

    features: TieredFeatures
    labels: Tensor | None
    seed: int
    epoch: int = 0

    @property
    def stats(self) -> Any:
        """Bytes read by tier, and seconds waited for."""
        return self.features.stats

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.features.packed)

    def __iter__(self) -> Iterator[MiniBatch]:
        """One epoch."""
        order = batch_order(len(self), self.epoch, self.seed)
        self.epoch += 1
        entries = [(self.epoch - 1, batch) for batch in order.tolist()]
        with PackedBatches(self.features, self.features.order(entries)) as batches:
            for work in batches:
                yield self._made(work)

    def _made(self, work: ReadBatch) -> MiniBatch:
        seeds = work.sampled.seeds
        blocks = work.sampled.blocks
        labels = None if self.labels is None else self.labels[seeds]
        packed, batch = self.features.place(work.index)
        nodes = torch.from_numpy(packed.pool.nodes(batch))
        return MiniBatch(work.features, subgraphs.edge_index(blocks[0]), nodes, len(seeds), labels, blocks)

    def close(self) -> None:
        """Closes the packed set."""
        self.features.close()
        self.features.close_sets()


def prepare(
    graph: Graph,
    features: str | Path | Features | None,
    path: str | Path | Sequence[str | Path],
    options: PrepareOptions = PrepareOptions(),
    progress: Progress | None = None,
) -> MiniBatches:
    """Samples and packs the training nodes of `graph` in mini-batches, or opens what is packed in `path` already.

    Args:
        graph: edges, labels and the split. features: a file or folder with a row for each node (`open_features`); None:
            those of `graph`. path: the folder of the packed set, or one on each of several disks.

    Raises:
        UserError: among others, where `path` holds a set of other inputs, or `options.memory` is too small.
    """
    train = graph.parts.train if graph.parts is not None else np.arange(graph.nodes)
    seeds = epoch_seeds(train, options.batch, options.seed)
    if isinstance(features, str | Path):
        features = feature_files.open_features(features, nodes=graph.nodes)
    folders = [path] if isinstance(path, str | Path) else path
    request = PackRequest(
        tuple(Path(folder) for folder in folders),
        Sampler(graph, options.style),
        manifest.graph_hash(graph),
        open_rows(graph) if features is None else features,
        Draws(seeds, list(range(len(seeds))), options.fanout, options.seed),
        disk=None if options.disk is None else units.size(options.disk, "disk"),
        rows=options.rows,
    )
    share = MemoryShare(units.size(options.memory, "memory"))
    labels = None if graph.labels is None else torch.from_numpy(np.asarray(graph.labels))
    return MiniBatches(opened(request, share, options.resample, progress), labels, options.seed)
