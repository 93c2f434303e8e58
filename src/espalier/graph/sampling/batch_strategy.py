"""Ways of batching: what a step trains on, how it is evaluated, and what a plan is told of it.

`Drawn` and `Whole` are here; others, each beside its mechanism, are in `lookup.BATCHINGS` by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic, traffic
from espalier.graph.networks.layer_work import Reach
from espalier.graph.parts.graph_cut import LARGE
from espalier.graph.tasks import answers
from espalier.parallel.workload import ALONE, PackStart, Shard, SummedLoss, Sums
from espalier.plan.compose import Claim
from espalier.recipe import mechanism_options
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.graph.data.graph import Array
    from espalier.graph.parts.halo import Halo
    from espalier.graph.run import GraphRun
    from espalier.graph.sampling.subgraphs import SubgraphBatch
    from espalier.recipe.graphs import Batches
    from espalier.store.artifacts import Artifact


class Drawn:
    """Targets of a seeded permutation per epoch, with what they hear from. Has state: the permutation.

    Attributes:
        each: whether work grows with the micro-batch; stands: whether every step passes over the same edges.
        evaluated: what the model said of all nodes, over ranks, when it was evaluated last.
    """

    stands = False
    part: Any = None
    """Of the graph, that this rank has; None: all of it."""
    evaluated: Tensor | None = None
    meters: Mapping[str, Callable[[], Any]] = {}

    def __init__(self, run: GraphRun) -> None:
        options = run.recipe.graph
        assert options is not None
        self.run = run
        self.task = run.task
        self.each = options.task == "graph" or bool(options.fanouts)
        self._epoch = -1
        self._order = np.zeros(0, np.int64)
        self._reach: list[Reach] | None = None

    def begin(self) -> None:
        """A model is built anew."""

    def batches(self, step: int, shard: Shard) -> list[SubgraphBatch]:
        return [self.run.placed(self.task.batch(ids, step)) for ids in self.cut(step, shard)]

    def pack(self, shards: Sequence[Shard], packing: PackStart = ALONE) -> None:
        """Packs the batches of `shards`, the ranks of this machine. Of a run with a [store]."""
        raise AssertionError("this run has no [store]")

    def cut(self, step: int, shard: Shard) -> list[Array]:
        """Targets of each micro-batch."""
        positions = self.positions(step, shard)
        return [self.task.ids(positions[at - shard.start : end - shard.start]) for at, end in shard.cuts if end > at]

    def targets(self, step: int, shard: Shard) -> Array:
        """Targets of a step."""
        return self.task.ids(self.positions(step, shard))

    def positions(self, step: int, shard: Shard) -> Array:
        """Of targets among all that are trained on."""
        pieces = []
        at, stop = (step * self.run.global_batch + end for end in (shard.start, shard.stop))
        while at < stop:
            epoch, place = divmod(at, self.task.items)
            until = min(stop, (epoch + 1) * self.task.items)
            pieces.append(self._permutation(epoch)[place : place + until - at])
            at = until
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def _permutation(self, epoch: int) -> Array:
        if self._epoch != epoch:
            self._order = np.random.default_rng([self.run.recipe.train.seed, epoch]).permutation(self.task.items)
            self._epoch = epoch
        return self._order

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """The task's sum of losses, and how many answers it is of."""
        self.run.rounding.begin(model, batch)
        return self.task.loss(model, batch)

    def evaluate(self, model: nn.Module, shard: Shard) -> Sums:
        return self.task.evaluate(model, shard)

    def artifacts(self) -> Sequence[Artifact]:
        """What a report shows of it."""
        return []

    # --- what a plan is told -------------------------------------------------------------------------------------

    def times(self, micro_batch: Any) -> Any:
        """How often the reach is passed over."""
        return micro_batch if self.each else micro_batch * 0 + 1.0

    def reach(self) -> list[Reach]:
        """What each layer passes over, the farthest from the targets first; per target where work grows with them."""
        if self._reach is None:
            batches = self.task.batch(self.task.ids(np.arange(self.run.global_batch)), 0)
            share = self.run.global_batch if self.each else 1
            self._reach = [
                Reach(block.sources / share, block.targets / share, block.edges / share) for block in batches.blocks
            ]
        return self._reach

    def own_reach(self, micro_batch: Any) -> list[Reach]:
        """Of a rank with so many of the targets."""
        return self.reach()

    def facts(self) -> Mapping[str, Any]:
        """What single systems are to know of this way: see `Profile.facts`."""
        return {}

    def halos(self) -> Any:
        """What a plan is told of rows that cross; None where the graph is not cut."""
        return None

    def drawn(self) -> Batches | None:
        """The batches that a plan weighs the whole graph against; None: there are none."""
        return None

    def write_parts(self, folder: Path, shares: Sequence[int]) -> None:
        """Writes a folder of parts, one for each of `shares`. Raises UserError where the graph is not cut."""
        raise UserError(
            "This recipe trains on the whole graph.",
            do="[graph.halo], a network such as sage or your own, without graph.inductive",
        )


class Whole(Drawn):
    """The whole graph in every step. Has state: its batches, which stay as they are."""

    stands = True

    def __init__(self, run: GraphRun) -> None:
        super().__init__(run)
        self._moved: dict[tuple[int, int, int, int | None], list[SubgraphBatch]] = {}

    def begin(self) -> None:
        """Batches are moved anew."""
        self._moved = {}

    def batches(self, step: int, shard: Shard) -> list[SubgraphBatch]:
        """Made, and moved to the device, once."""
        key = (shard.start, shard.stop, shard.micro_batch, shard.rounds)
        if key not in self._moved:
            self._moved[key] = super().batches(0, shard)
        return self._moved[key]

    def positions(self, step: int, shard: Shard) -> Array:
        """In order."""
        return np.arange(shard.start, shard.stop)

    def reach(self) -> list[Reach]:
        """All nodes and edges, also of a graph that is in parts."""
        graph = self.run.graph
        if graph.partition is None:
            return super().reach()
        return [Reach(graph.nodes, graph.nodes, graph.partition.edges)] * max(1, self.run.network.depth)

    def facts(self) -> Mapping[str, Any]:
        """`[graph.halo]` could cut it."""
        return {"halo_exchange": WholeGraph(self.run)}


OVER_RANKS = Claim(
    "halo",
    question="aggregate",
    needs={"a model"},
    changes={"rows of the graph cross"},
    forbids={"replicas differ between rounds", "compiles blocks", "a schedule of stages", "a window of layers"},
    instead=("every_step",),
    option="graph.halo",
    alone=False,
)
"""Ranks read one another's rows within a step, so all make the same steps with the same weights."""


def all_rows(local_rows: Tensor, places: Array | slice, nodes: int, group: dist.ProcessGroup | None) -> Tensor:
    """[nodes, columns] on every rank, of which each has its `local_rows`, at least in float32, at `places`."""
    local_rows = local_rows.cpu()
    local_rows = local_rows if local_rows.dtype == torch.float64 else local_rows.float()
    rows = local_rows.new_zeros(nodes, local_rows.shape[1])
    rows[places] = local_rows
    with traffic(Traffic.ACTIVATIONS):
        dist.all_reduce(rows, group=group)
    return rows


class HeldRows(NamedTuple):
    """Rows of the passes of a rank that has a part of the graph.

    Attributes:
        halo: where layers exchange rows of own nodes; None: rows are of the nodes `ids`, the first `owned` this
            rank's (0: all), and `share` of all rows.
    """

    ids: Tensor
    owned: int
    share: float
    halo: Halo | None = None


class OverRanks(Whole):
    """A part of the whole graph on each rank. Has state: this rank's `part`, which a mechanism makes; None: a run on
    one rank, or one that is planned."""

    def begin(self) -> None:
        """The part is made anew."""
        super().begin()
        self.part = None

    def batches(self, step: int, shard: Shard) -> list[SubgraphBatch]:
        """Of the part."""
        return super().batches(step, shard) if self.part is None else [self.part.batch(step)]

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """Of the part."""
        if self.part is None:
            return super().loss(model, batch)
        return self.part.loss(model, batch)

    def evaluate(self, model: nn.Module, shard: Shard) -> Sums:
        """Over all ranks, where evaluation sees the graph that training sees."""
        task = self.run.whole_task
        if self.part is None or task.train is not task.view:
            return super().evaluate(model, shard)
        logits = self.evaluated = self.part.logits(model)
        return answers.held_out_figures(task, shard, lambda ids: logits[ids])

    def times(self, micro_batch: Any) -> Any:
        """A share of the graph."""
        return micro_batch / self.run.global_batch

    def own_reach(self, micro_batch: Any) -> list[Reach]:
        """A share of the graph."""
        share = self.times(micro_batch)
        return [Reach(layer.sources * share, layer.targets * share, layer.edges * share) for layer in self.reach()]

    def facts(self) -> Mapping[str, Any]:
        """Rows cross."""
        return {"halo_exchange": self.halos()}


@dataclass(frozen=True, eq=False, repr=False)
class WholeGraph:
    """A graph that each rank passes over in every step, and that `[graph.halo]` could cut into a part for each."""

    run: GraphRun

    def __repr__(self) -> str:
        """All that a plan depends on."""
        return f"WholeGraph({self.run.fingerprint()})"

    def cut(self) -> GraphRun | None:
        """The same in parts; None where cutting it for a plan would take long, or cannot be done."""
        run = self.run
        options = self.run.recipe.graph
        assert options is not None
        if run.graph.edges > LARGE:
            return None
        asked = options.changed(halo=mechanism_options.TABLE["graph.halo"].options())
        try:
            made = run.like(run.recipe.changed(graph=asked))
            made.halos()
        except UserError:  # a network that cannot be cut
            return None
        return made
