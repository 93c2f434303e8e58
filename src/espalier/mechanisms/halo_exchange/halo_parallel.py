"""Full-graph training over ranks: each trains on its part of the graph, and rows of boundary nodes cross.

The graph is cut once, into a folder in the cache with a checksum for every part (`partition_folder`); each rank then
computes on its own part alone. Parts are in proportion to the shares of the plan, so that faster devices get more
nodes. Losses are sums over a rank's own training nodes and divided by the number of all of them. Weights are whole on
every rank, so that a checkpoint is that of a run on one rank, and goes on with any number of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic
from espalier.graph.networks import foreign_network
from espalier.graph.networks.base import placement
from espalier.graph.networks.gnn import Gnn
from espalier.graph.parts import halo, partial_sums, partition_folder
from espalier.graph.parts.graph_cut import Cutting, open_part
from espalier.graph.sampling.batch_strategy import OVER_RANKS, HeldRows, OverRanks, all_rows
from espalier.graph.sampling.subgraphs import SubgraphBatch, forward
from espalier.mechanisms.halo_exchange import quantized_exchange as sylvie
from espalier.mechanisms.halo_exchange.halo_bits import Key
from espalier.mechanisms.halo_exchange.options import HaloOptions
from espalier.mechanisms.halo_exchange.quantized_exchange import (
    WHOLE,
    Adaptive,
    ByPeer,
    Every,
    Sylvie,
    crossing_bytes,
    step_bytes,
)
from espalier.mechanisms.halo_exchange.state import HaloExchangeState
from espalier.parallel.workload import SummedLoss, to_device
from espalier.recipe import Network, cache_dir
from espalier.recipe.cost import VALUE_BYTES
from espalier.recipe.errors import PeerLost, UserError
from espalier.recipe.graphs import Batches, MessagesModel
from espalier.sparse.partition import library
from espalier.track.decision_log import Decisions
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from espalier.checkpoint.base import Stateful, StatefulParts
    from espalier.graph.data.graph import Array
    from espalier.graph.parts.coded_rows import RowSize
    from espalier.graph.run import GraphRun
    from espalier.graph.tasks.node_classification import NodeTask
    from espalier.plan.base import Exchange, Plan
    from espalier.recipe import Recipe

LATE = "rows outlive a step"
"""Of claims: each rank holds rows of others that the next step reads, which no other rank has."""
FEW_BITS = replace(OVER_RANKS, changes=OVER_RANKS.changes | {"rows cross in few bits"})
"""Which cannot say that a gradient overflowed, as scaled losses need."""


class RankPart:
    """What one rank trains on, and how it evaluates with the others. Has state: the transport.

    Args:
        part: of the graph that training sees; task: whose nodes are trained on.
        how: rows cross.
        placed: device and dtype of the model; seed: of random rounding.
    """

    def __init__(
        self,
        part: partition_folder.Part,
        task: NodeTask,
        how: Crossings,
        placed: dict[str, Any],
        seed: int,
    ) -> None:
        self.task, (options, bits, ages, foreign) = task, how
        assert options.bits != "auto", "the plan has the bits"
        self.policy = (Adaptive if options.adapt else Every)(options.bits, options.synchronize)
        self.decisions = Decisions(self.policy, "speed of the loss") if isinstance(self.policy, Adaptive) else None
        how_coded = {"by_degree": options.by_degree, "delta": options.delta}
        self.transport = Sylvie(self.policy, **how_coded, peers=ByPeer(bits, ages), seed=seed)
        depth = task.train.depth
        part = part._replace(halo=part.halo.to(placed["device"]))
        self.nodes = part.halo.nodes
        if foreign is not None and foreign.deep:
            deep = foreign_network.deepened(part.halo, task.train.block, foreign.deep > 1)
            self.features = task.train.features[deep.nodes].to(**placed)
            first = deep.block
            self.nodes = deep.nodes
        else:
            self.features, (first, *_) = part._replace(features=part.features.to(**placed)).inputs(depth)
        first = to_device(first, **placed)
        plain = options.bits == WHOLE and options.synchronize == 1
        travelling = part.halo if plain else replace(part.halo, transport=self.transport)
        self.blocks = travelling.by_layer(first, depth)
        self.exact = part.halo.by_layer(first, depth)
        if foreign is not None:
            self.blocks = (first._replace(halo=travelling),)
            self.exact = (first._replace(halo=part.halo),)
        owned = part.halo.owned.cpu().numpy()
        trained = np.isin(owned, task.parts.train)
        self.owned = owned
        chosen = torch.from_numpy(np.flatnonzero(trained)).to(placed["device"])
        labels = task.labels[owned[trained]].to(placed["device"])
        self._batch = SubgraphBatch(self.features, self.blocks, labels, chosen=chosen)
        self.group = part.halo.group
        count = len(owned)
        ids = self.nodes.to(placed["device"])
        self.rows = HeldRows(ids, count, count / task.train.graph.nodes, part.halo if foreign is None else None)

    def batch(self, step: int) -> SubgraphBatch:
        """All of the part: the same for every step."""
        return self._batch._replace(step=step)

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """See `Workload.loss`, of the rank's own training nodes."""
        if self.decisions is not None:
            self.decisions.turn(batch.step)
        self.transport.begin(batch.step)
        return self.task.loss(model, batch)

    def crossed(self) -> dict[str, float]:
        """How rows crossed in the step."""
        return {"bits": self.transport.choice.bits, "late": float(not self.transport.choice.synchronous)}

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        """[nodes, outputs] of all nodes, on every rank, with rows that cross as they are. All ranks call it alike."""
        rows = forward(model, self.features, self.exact)
        return all_rows(rows, self.owned, len(self.task.labels), self.group)


class HaloParallel(Mechanism):
    """Each rank trains on its part of the graph. Has state: the `name` of its late rows in a checkpoint, which have a
    meaning for the same parts and the same options."""

    record = "sylvie"

    def __init__(self, options: HaloOptions) -> None:
        self.options = options
        self.claim = OVER_RANKS if options.bits == WHOLE else FEW_BITS
        self.late = options.delta or options.synchronize != 1
        if self.late:
            self.claim = replace(self.claim, changes=self.claim.changes | {LATE})

    def wrap(self, context: Build) -> None:
        """Opens this rank's part, which is cut first where it is not there; all ranks do it together."""
        run = cast("GraphRun", context.workload)
        mesh = context.mesh
        model = context.model
        assert model is not None
        task = run.whole_task
        group = mesh.replica
        assert group is not None, "parts are of several ranks"
        members = mesh.replica_ranks
        ranks = [context.plan.ranks[rank] for rank in members]
        nodes = [rank.node for rank in ranks]
        cutting = Cutting(task.train.graph, task.train.style, run.network.takes_sums(model))
        shares = [rank.samples for rank in ranks]
        part = opened(cutting, shares, group, nodes.index(nodes[group.rank()]) == group.rank())
        parts = cutting.folder(shares).name if cutting.graph.partition is None else cutting.graph.identity
        how_cut = [parts, self.options, context.plan.state(HaloExchangeState), context.plan.exchanges]
        self.name = f"late rows of rank {group.rank()} of {group.size()} ({cache_dir.hashed(how_cut)})"
        foreign = run.network.over_parts(model, task.train, part)
        placed = placement(model)
        how = crossings(self.options, context.plan, members, group.rank())._replace(foreign=foreign)
        made = run.batching.part = RankPart(part, task, how, placed, context.recipe.train.seed)
        if task.train.graph.partition is None:
            run.network.formatted(model, made.blocks[0])
        if made.decisions is not None:
            context.meters["halo"] = made.crossed
            context.follow_loss.append(made.decisions.heard)
            context.decisions.append(made.decisions)

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        """With what bits and lateness follow from, and rows that the next steps read."""
        part: RankPart = cast("Any", context.workload).batching.part
        rules = {"halo rule": cast("Stateful", part.policy)} if self.options.adapt else {}
        return {**parts, **rules, **({self.name: part.transport} if self.late else {})}

    def close(self, context: Build) -> None:
        """Takes in what is under way."""
        if (part := cast("Any", context.workload).batching.part) is not None:
            with suppress(PeerLost):
                part.transport.drain()


class PeerBits:
    """Bits of the rows for and from each rank, as a plan has them for links, layers and directions.

    Args:
        exchanges: those of halos; nodes: the machine of each rank of the group; rank: this one's place among them.
    """

    def __init__(self, exchanges: Sequence[Exchange], nodes: Sequence[int], rank: int) -> None:
        self.exchanges = tuple(exchanges)
        self.nodes = nodes
        self.rank = rank
        self._known: dict[halo.Crossing, tuple[list[int], list[int]]] = {}

    def __call__(self, crossing: halo.Crossing) -> tuple[list[int], list[int]]:
        if crossing not in self._known:
            node = self.nodes[self.rank]
            out = [self._of(crossing, node, peer) for peer in self.nodes]
            self._known[crossing] = out, [self._of(crossing, peer, node) for peer in self.nodes]
        return self._known[crossing]

    def _of(self, crossing: halo.Crossing, source: int, target: int) -> int:
        level = "inside" if source == target else "between"
        for exchange in self.exchanges:
            rows = exchange.rows
            if exchange.level not in (level, "all"):
                continue
            if rows is None or (
                (rows.layer, rows.backward) == crossing and (not rows.nodes or (source, target) in rows.nodes)
            ):
                return BITS[exchange.codec]
        return min(BITS[exchange.codec] for exchange in self.exchanges)  # no rows cross there


class Crossings(NamedTuple):
    """How rows cross between this rank and others.

    Attributes:
        options: `[graph.halo]`, with the bits that the plan has where they are `auto`: the fewest of all.
        bits: where they differ; None: those of `options`.
        ages: how many steps old those of each rank may be in steps that do not wait; None: one.
        foreign: what a network that is not ours needs.
    """

    options: HaloOptions
    bits: PeerBits | None = None
    ages: Sequence[int] | None = None
    foreign: halo.ForeignRows | None = None


def crossings(options: HaloOptions, plan: Plan, members: Sequence[int], rank: int) -> Crossings:
    """What the plan says of halos, for the rank at place `rank` of `members`."""
    exchanges = [exchange for exchange in plan.exchanges if exchange.traffic == Traffic.HALO.value]
    nodes = [plan.ranks[member].node for member in members]
    quantization = Crossings(options)
    known = {frozenset(age.nodes): age.steps for age in plan.state(HaloExchangeState).halo_ages}
    ages = [known.get(frozenset((nodes[rank], node)), 1) for node in nodes]
    if known and options.synchronize != 1:
        quantization = quantization._replace(ages=ages)
    if options.bits != "auto":
        return quantization
    bits = {BITS[exchange.codec] for exchange in exchanges} or {WHOLE}
    quantization = quantization._replace(options=options.changed(bits=min(bits)))
    return quantization if len(bits) == 1 else quantization._replace(bits=PeerBits(exchanges, nodes, rank))


BITS = {"exact": WHOLE, "int8": 8, "int4": 4, "int2": 2, "int1": 1}
"""Of the codecs by which a plan names how rows cross."""


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the recipe asks for it and there are several ranks."""
    options = None if recipe.graph is None else recipe.graph.halo
    taken = len(plan.trainers) > 1 and isinstance(recipe.model, Network | MessagesModel)
    return HaloParallel(options) if isinstance(options, HaloOptions) and taken else None


def opened(cutting: Cutting, shares: Sequence[int], group: dist.ProcessGroup, writes: bool) -> partition_folder.Part:
    """This rank's part, of a folder of parts or as `open_part`. Raises UserError for a folder of a network that adds
    rows up, where this one does not."""
    graph = cutting.graph
    if graph.partition is None:
        part = open_part(cutting, shares, group, writes=writes)
    else:
        part = partition_folder.read(graph.partition.folder, group.rank(), group, graph.identity)
        if part.halo.sums is not None and not cutting.sums:
            raise UserError(
                "The graph was cut for a network that adds rows up as they are.",
                why="sums of rows cross between its parts, which attention, kept columns and quantizers cannot read",
                do="the graph itself as data.path: it is cut anew",
            )
    return part._replace(halo=replace(part.halo, mention=graph.mention))


@dataclass(frozen=True, eq=False, repr=False)
class Halos:
    """What a plan is told of a graph that is cut over ranks. `rows` cuts it, once for each division of the nodes.
    `sampled`: the same network trained on drawn batches, to be weighed against it; None: it cannot be."""

    cutting: Cutting
    network: Gnn | halo.ForeignRows
    options: HaloOptions
    sampled: Callable[[], Any] | None = None
    _known: dict[tuple[int, ...], Array] = field(default_factory=dict)

    def __repr__(self) -> str:
        """All that a plan depends on."""
        return f"Halos({self.cutting.folder([])}, {self.options}, {self._codes()})"

    traffic = Traffic.HALO.value
    most_ranks = None
    """Above which parts are not made."""

    @property
    def exchanges(self) -> int:
        """In a step, forward and backward."""
        return 2 * (halo.depth(self.network) - 1)

    def value_bytes(self, precision: str) -> int:
        """Of a value that crosses as it is."""
        return VALUE_BYTES[precision]

    def told(self, shares: Sequence[int]) -> str:
        """How the graph is cut, for people."""
        rows = int(self.rows(shares).sum())
        graph = self.cutting.graph
        by = "" if graph.partition is not None or graph.cut is not None else f" by {library()}"
        sentence = (
            f"the graph is cut into {len(shares)} parts{by}; {rows:,} rows of other parts are read before each layer"
        )
        if not (codes := self._codes()):
            return sentence
        of = ", ".join(f"of layer {layer + 1} in {size.bytes:,} bytes" for layer, size in codes.items())
        return f"{sentence}, {of} a row as the codes of [quant] (graph.halo.bits are those of gradients)"

    def _codes(self) -> dict[int, RowSize]:
        """Of layers whose rows cross as codes."""
        layers = range(1, halo.depth(self.network))
        return {at: size for at in layers if (size := halo.crossing_codes(self.network, at, 4)) is not None}

    def rows(self, shares: Sequence[int]) -> Array:
        """int64 [ranks, ranks]: rows (and sums) that rank i sends rank j before a layer aggregates."""
        if tuple(shares) not in self._known:
            there = self.cutting.graph.partition
            known = partition_folder.rows_of(self.cutting.folder(shares) if there is None else there.folder)
            if known is None:
                cut, every = self.cutting.boundary(self.cutting.parts(shares), len(shares))
                known = cut.rows if every is None else partial_sums.crossing_rows(every, cut.ranks)
            self._known[tuple(shares)] = known
        return self._known[tuple(shares)]

    def write(self, folder: Path, shares: Sequence[int]) -> None:
        """Writes a folder of parts, one for each rank. Raises UserError for a graph that is in parts already, a network
        that reads beyond its part, and as `partition_folder.write`."""
        graph = self.cutting.graph
        if graph.partition is not None:
            raise UserError(
                f"{graph.partition.folder} is a graph in parts already.", do="the graph itself as data.path"
            )
        if isinstance(self.network, halo.ForeignRows) and self.network.deep:
            raise UserError(
                "This network cannot train on a folder of parts.",
                why="its layers scale an edge by the degree of its source, which a part does not have",
                do="the recipe as it is: every machine then opens the whole graph",
            )
        self.cutting.write(folder, self.cutting.parts(shares), len(shares))

    def step_bytes(self, shares: Sequence[int], size: int, by_peer: Mapping[Key, Any] | None = None) -> Array:
        """float [ranks, ranks]: see `sylvie.step_bytes`."""
        return step_bytes(self.network, self.rows(shares), self.options, size, by_peer)

    def crossing_bytes(self, shares: Sequence[int], size: int, key: Key, bits: int) -> Array:
        """float [ranks, ranks]: see `sylvie.crossing_bytes`."""
        return crossing_bytes(self.network, self.rows(shares), self.options, key, sylvie.Values(bits, size))

    def counts(self, shares: Sequence[int]) -> dict[Key, Array]:
        """int64 [ranks, ranks]: rows that rank i sends rank j, of each layer and direction, but those that
        cross as codes."""
        rows = self.rows(shares)
        codes = self._codes()
        every = [key for key in sylvie.crossings(self.network) if key.backward or key.layer not in codes]
        return {key: rows.T if key.backward else rows for key in every}

    def coded_bytes(self, shares: Sequence[int], size: int) -> Array:
        """float [ranks, ranks]: of rows that cross as codes, for which there are no bits to choose."""
        rows = self.rows(shares)
        sent = np.zeros(rows.shape)
        for at in self._codes():
            sent = sent + crossing_bytes(self.network, rows, self.options, (at, False), sylvie.Values(WHOLE, size))
        return sent


# --- batching ----------------------------------------------------------------------------------------------------

FANOUT, SAMPLED = 10, 1024
"""Neighbours drawn at each layer, and targets of a batch, of the drawn batches that halos are weighed against."""


class PartBatching(OverRanks):
    """A part of the graph on each rank, whose layers read rows of other parts."""

    def halos(self) -> Halos:
        options = self.run.recipe.graph
        view = self.run.whole_task.train
        assert options is not None
        assert isinstance(options.halo, HaloOptions)
        network = self.run.network.crossing(self.run)
        sums = self.run.network.takes_sums(network)
        weighed = None if view.graph.partition is not None else cache(partial(self._sampled, halo.depth(network)))
        return Halos(Cutting(view.graph, view.style, sums), network, options.halo, weighed)

    def drawn(self) -> Batches | None:
        """Those of `Halos.sampled`."""
        sampled = self.halos().sampled
        if sampled is None:
            return None
        made: GraphRun = sampled()
        return Batches(made.whole_task.fanout, made.global_batch, -(-self.task.items // made.global_batch))

    def _sampled(self, layers: int) -> GraphRun:
        """The same network on drawn batches of the same graph, which ranks share."""
        recipe = self.run.recipe
        changed = msgspec.structs.replace
        few = min(recipe.train.batch_tokens or SAMPLED, self.task.items)
        assert recipe.graph is not None
        drawn = changed(recipe.graph, halo=None, fanout=(FANOUT,) * layers)
        train = changed(recipe.train, batch_tokens=few)
        return self.run.like(changed(recipe, graph=drawn, train=train, mechanisms={}))

    def write_parts(self, folder: Path, shares: Sequence[int]) -> None:
        options = self.run.recipe.graph
        assert options is not None
        if options.inductive:
            super().write_parts(folder, shares)
        self.halos().write(folder, shares)
