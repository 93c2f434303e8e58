"""Full-graph training over ranks: each trains on its part of the graph, and rows of boundary nodes cross.

The graph is cut once, into a folder in the cache with a checksum for every part (`partition_folder`); each rank then
computes on its own part alone. Parts are in proportion to the shares of the plan, so that faster devices get more
nodes. Losses are sums over a rank's own training nodes and divided by the number of all of them. Weights are whole on
every rank, so that a checkpoint is that of a run on one rank, and goes on with any number of parts.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm import plain_collectives
from espalier.comm.base import Traffic, traffic
from espalier.graph import foreign_network, graph_plan, halo, partial_sums, partition_folder
from espalier.graph.base import dense
from espalier.graph.gnn import Gnn, GraphAttention, Layer
from espalier.graph.neighbor_sampler import whole
from espalier.graph.subgraphs import SubgraphBatch, forward
from espalier.mechanisms.few_bits.quantization import begin_over_ranks, crossing_codes, quantization_of
from espalier.mechanisms.halo_exchange import sylvie
from espalier.mechanisms.halo_exchange.sylvie import (
    WHOLE,
    Adaptive,
    ByPeer,
    Every,
    Sylvie,
    crossing_bytes,
    step_bytes,
)
from espalier.parallel.mesh import REPLICA
from espalier.parallel.workload import to_device
from espalier.plan.compose import Claim
from espalier.recipe import Messages, Network, terminal
from espalier.recipe.cache_dir import cache_folder, hashed, write_atomic
from espalier.recipe.cost import VALUE_BYTES
from espalier.recipe.errors import PeerLost, UserError
from espalier.sparse.partition import clusters_of, library
from espalier.sparse.rcmpp.pattern import Pattern
from espalier.track.decision_log import Decisions
from espalier.track.progress import Stages
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from espalier.checkpoint.base import Stateful
    from espalier.graph.coded_rows import RowSize
    from espalier.graph.data import Array, Graph
    from espalier.graph.neighbor_sampler import Style
    from espalier.graph.node_classification import NodeTask
    from espalier.plan.base import Exchange, Plan
    from espalier.recipe import HaloOptions, Recipe

CLAIM = Claim(
    "halo",
    question="aggregate",
    needs={"a model"},
    changes={"rows of the graph cross"},
    forbids={"replicas differ between rounds", "compiles blocks", "a schedule of stages", "a window of layers"},
    instead=("every_step",),
    option="graph.halo",
)
"""Ranks read one another's rows within a step, so all make the same steps with the same weights."""
FEW_BITS = replace(CLAIM, changes=CLAIM.changes | {"rows cross in few bits"})
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
            deep = foreign_network.deepened(part.halo, task.train.block)
            self.features, first, self.nodes = task.train.features[deep.nodes].to(**placed), deep.block, deep.nodes
        else:
            self.features, (first, *_) = part._replace(features=part.features.to(**placed)).inputs(depth)
        first = to_device(first, **placed)
        plain = options.bits == WHOLE and options.synchronize == 1
        travelling = part.halo if plain else replace(part.halo, transport=self.transport)
        self.blocks, self.exact = travelling.by_layer(first, depth), part.halo.by_layer(first, depth)
        if foreign is not None:
            self.blocks, self.exact = (first._replace(halo=travelling),), (first._replace(halo=part.halo),)
        owned = part.halo.owned.cpu().numpy()
        own = np.isin(owned, task.parts.train)
        self.owned, chosen = owned, torch.from_numpy(np.flatnonzero(own)).to(placed["device"])
        labels = task.labels[owned[own]].to(placed["device"])
        self._batch = SubgraphBatch(self.features, self.blocks, labels, chosen=chosen)
        self.group = part.halo.group
        self._outcome = torch.zeros(2, dtype=torch.float64)

    def batch(self, step: int) -> SubgraphBatch:
        """All of the part: the same for every step."""
        return self._batch._replace(step=step)

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> tuple[Tensor, Tensor]:
        """See `Workload.loss`, of the rank's own training nodes."""
        if self.decisions is not None:
            self.decisions.turn(batch.step)
        self.transport.begin(batch.step)
        loss, weight = self.task.loss(model, batch)
        self._outcome = torch.stack([loss.detach().double().cpu(), weight.detach().double().cpu()])
        return loss, weight

    def adapted(self) -> dict[str, float]:
        """Tells the controller the loss of the step, and says how rows crossed in it. All ranks call it alike."""
        assert self.decisions is not None, "what does not adapt is not told"
        bits, late = self.transport.choice.bits, not self.transport.choice.synchronous
        total = self._outcome.clone()
        with traffic(Traffic.CONTROL):
            dist.all_reduce(total, group=self.group)
        self.decisions.heard([float(total[0] / total[1])])
        return {"bits": bits, "late": float(late)}

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        """[nodes, outputs] of all nodes, on every rank, with rows that cross as they are. All ranks call it alike."""
        rows: Any = self.features
        if isinstance(model, Gnn):
            for at, block in enumerate(self.exact):
                rows = model.step(at, block, rows)
        else:
            rows = forward(model, rows, self.exact)
        return all_rows(dense(rows), self.owned, len(self.task.labels), self.group)


def all_rows(own: Tensor, places: Array | slice, nodes: int, group: dist.ProcessGroup | None) -> Tensor:
    """[nodes, columns] on every rank, of which each has its `own`, at least in float32, at `places`."""
    own = own.cpu()
    own = own if own.dtype == torch.float64 else own.float()
    found = own.new_zeros(nodes, own.shape[1])
    found[places] = own
    with traffic(Traffic.ACTIVATIONS):
        dist.all_reduce(found, group=group)
    return found


class CutWorkload(Protocol):
    """What a graph's workload has for a run over ranks."""

    part: Any

    @property
    def whole_task(self) -> NodeTask:
        """Whose nodes are trained on."""


class HaloParallel(Mechanism):
    """Each rank trains on its part of the graph."""

    record = "sylvie"

    def __init__(self, options: HaloOptions) -> None:
        self.options, self.claim = options, CLAIM if options.bits == WHOLE else FEW_BITS

    def wrap(self, context: Build) -> None:
        """Opens this rank's part, which is cut first where it is not there; all ranks do it together."""
        workload, mesh, model = cast("CutWorkload", context.workload), context.mesh, context.model
        assert model is not None
        task, group = workload.whole_task, mesh.replica
        assert group is not None, "parts are of several ranks"
        members = mesh.mesh.members(mesh.rank, *REPLICA)
        ranks = [context.plan.ranks[rank] for rank in members]
        shares = [rank.samples for rank in ranks]
        nodes = [one.node for one in ranks]
        writes = nodes.index(nodes[group.rank()]) == group.rank()
        sums = isinstance(model, Gnn) and takes_sums(model) and context.recipe.quant is None
        cutting = Cutting(task.train.graph, task.train.style, sums)
        if (known := task.train.graph.partition) is None:
            part = open_part(cutting, shares, group, writes=writes)
        else:
            part = partition_folder.read(known.folder, group.rank(), group, task.train.graph.identity)
            _check_sums(part, sums)
        part = part._replace(halo=replace(part.halo, mention=task.train.graph.mention))
        foreign = None
        if not isinstance(model, Gnn):
            if known is None:
                foreign = foreign_network.study(model, task.train.graph.features.shape[1], task.train.block)
            else:
                foreign = foreign_network.study_part(model, part)
            foreign_network.equip(model)
        halo.equip(model)
        one = next(model.parameters())
        placed = {"device": one.device, "dtype": one.dtype}
        how = crossings(self.options, context.plan, members, group.rank())._replace(foreign=foreign)
        if (bits := quantization_of(model)) is not None and foreign is None:
            bits.trains_on(part.halo.to(one.device))
        made = workload.part = RankPart(part, task, how, placed, context.recipe.train.seed)
        if bits is not None and foreign is not None:
            owned = len(part.halo.owned)
            bits.holds(made.nodes.to(one.device), owned, owned / task.train.graph.nodes)
        if bits is not None and known is not None and model.training:  # one that is evaluated has its steps
            begin_over_ranks(model, made.features, made.exact, group)
        if known is None and isinstance(model, Gnn) and one.device.type == "cpu":
            assert context.recipe.graph is not None
            layers = [layer for layer in model.layers if isinstance(layer, Layer)]
            wanted, steps = context.recipe.graph.format, context.recipe.train.steps or 0
            graph_plan.formatted(workload.part.blocks[0], layers, wanted, steps)
        if workload.part.decisions is not None:
            context.meters["halo"] = workload.part.adapted
            context.decisions.append(workload.part.decisions)

    def state(self, context: Build, parts: Mapping[str, Stateful]) -> Mapping[str, Stateful]:
        """With what bits and lateness follow from."""
        if not self.options.adapt:
            return parts
        part = cast("CutWorkload", context.workload).part
        assert part is not None
        assert isinstance(part.policy, Adaptive)
        return {**parts, "halo rule": part.policy}

    def close(self, context: Build) -> None:
        """Takes in what is under way."""
        if (part := getattr(context.workload, "part", None)) is not None:
            with suppress(PeerLost):
                part.transport.drain()


class PeerBits:
    """Bits of the rows for and from each rank, as a plan has them for links, layers and directions.

    Args:
        told: exchanges of halos; nodes: the machine of each rank of the group; rank: this one's place among them.
    """

    def __init__(self, told: Sequence[Exchange], nodes: Sequence[int], rank: int) -> None:
        self.told, self.nodes, self.rank = tuple(told), nodes, rank
        self._known: dict[halo.Crossing, tuple[list[int], list[int]]] = {}

    def __call__(self, crossing: halo.Crossing) -> tuple[list[int], list[int]]:
        """See `sylvie.Sylvie.peers`."""
        if crossing not in self._known:
            own = self.nodes[self.rank]
            out = [self._of(crossing, own, peer) for peer in self.nodes]
            self._known[crossing] = out, [self._of(crossing, peer, own) for peer in self.nodes]
        return self._known[crossing]

    def _of(self, crossing: halo.Crossing, source: int, target: int) -> int:
        level = "inside" if source == target else "between"
        for one in self.told:
            rows = one.rows
            if one.level not in (level, "all"):
                continue
            if rows is None or (
                (rows.layer, rows.backward) == crossing and (not rows.nodes or (source, target) in rows.nodes)
            ):
                return BITS[one.codec]
        return min(BITS[one.codec] for one in self.told)  # no rows cross there


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
    told = [one for one in plan.exchanges if one.traffic == Traffic.HALO.value]
    nodes = [plan.ranks[one].node for one in members]
    quantization = Crossings(options)
    known = {frozenset(one.nodes): one.steps for one in plan.halo_ages}
    ages = [known.get(frozenset((nodes[rank], one)), 1) for one in nodes]
    if known and options.synchronize != 1:
        quantization = quantization._replace(ages=ages)
    if options.bits != "auto":
        return quantization
    bits = {BITS[one.codec] for one in told} or {WHOLE}
    quantization = quantization._replace(options=options.changed(bits=min(bits)))
    return quantization if len(bits) == 1 else quantization._replace(bits=PeerBits(told, nodes, rank))


BITS = {"exact": WHOLE, "int8": 8, "int4": 4, "int2": 2, "int1": 1}
"""Of the codecs by which a plan names how rows cross."""


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the recipe asks for it and there are several ranks."""
    options = None if recipe.graph is None else recipe.graph.halo
    taken = options is not None and len(plan.trainers) > 1 and isinstance(recipe.model, Network | Messages)
    return HaloParallel(options) if options is not None and taken else None


# --- cutting -------------------------------------------------------------------------------------------------------

CUTS = 3
"""Version of the cutting: parts in the cache of another are not read."""
LARGE = 1 << 20
"""Edges of a graph that takes over two seconds to cut."""
PAYS = 0.9
"""Share of the rows up to which partial sums are sent: they are made by a product of their own."""


def _check_sums(part: partition_folder.Part, sums: bool) -> None:
    if part.halo.sums is not None and not sums:
        raise UserError(
            "The graph was cut for a network that adds rows up as they are.",
            why="sums of rows cross between its parts, which attention, kept columns and quantizers cannot read",
            do="the graph itself as data.path: it is cut anew",
        )


def takes_sums(network: Gnn) -> bool:
    """Whether every layer adds rows up with weights that are known, so that sums may cross instead."""
    kinds = all(isinstance(layer, Layer) and not isinstance(layer, GraphAttention) for layer in network.layers)
    return kinds and network.options.activation != "maxk" and not network.drops_features


@dataclass(frozen=True, eq=False)
class Cutting:
    """How a graph is cut for networks of `style`; `sums`: whether partial sums may cross."""

    graph: Graph
    style: Style
    sums: bool = False

    def folder(self, shares: Sequence[int]) -> Path:
        """Where the parts wait."""
        style = [self.style.loops, self.style.scale]
        key = [self.graph.fingerprint(), *style, self.sums, list(shares), library(), CUTS]
        if self.graph.cut is not None:
            key.append(hashed([self.graph.cut.tobytes().hex()]))
        return cache_folder() / "partitions" / hashed(key)

    def parts(self, shares: Sequence[int]) -> Array:
        """int32 [nodes]: the rank of each node, as given where it is for as many ranks. Raises UserError for more ranks
        than nodes."""
        graph = self.graph
        if graph.cut is not None and int(graph.cut.max()) < len(shares):
            return graph.cut
        if graph.nodes < len(shares):
            raise UserError(
                f"{graph.origin} has {graph.nodes:,} nodes for {len(shares)} ranks.", do=f"plan.pin.ranks={graph.nodes}"
            )
        if graph.edges <= LARGE:
            return self._made(shares)
        return self._kept(self.folder(shares).with_suffix(".parts"), shares)

    def _kept(self, file: Path, shares: Sequence[int]) -> Array:
        """What a plan has cut is kept in `file` for the ranks."""
        graph = self.graph
        with suppress(OSError):
            known = np.fromfile(file, np.int32)
            if len(known) == graph.nodes and known.min() >= 0 and known.max() < len(shares):
                return known
        terminal.say(
            f"Cutting a graph of {graph.nodes:,} nodes into {len(shares)} parts (once).", file=sys.stderr, flush=True
        )
        made = self._made(shares)
        with suppress(OSError):  # a full disk: it is cut again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, made.tobytes())
        return made

    def _made(self, shares: Sequence[int]) -> Array:
        with Stages("Cutting the graph") as stages:
            pattern = Pattern.of(self.graph.indptr, self.graph.indices)
            return clusters_of(pattern, len(shares), shares, begin=stages.begin)

    def boundary(self, parts: Array, ranks: int) -> tuple[halo.Boundary, partial_sums.Covers | None]:
        """What crosses between `parts`: rows, or where they are fewer by a tenth rows and sums."""
        with Stages("Finding the rows that cross") as stages:
            block = whole(self.graph, self.style)
            stages.begin("boundary", 0, 1 + self.sums)
            cut = halo.boundary(block.indptr, block.indices, parts, ranks)
            if not self.sums:
                return cut, None
            stages.begin("partial sums", 1, 2)
            every = partial_sums.covers(block, cut)
        few = partial_sums.crossing_rows(every, ranks).sum() <= PAYS * cut.rows.sum()
        return cut, every if few else None

    def write(self, folder: Path, parts: Array, ranks: int) -> None:
        """Writes a folder of `parts`. Raises UserError as `partition_folder.write`."""
        partition_folder.write(folder, self.graph, self.style, *self.boundary(parts, ranks))


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
        said = f"the graph is cut into {len(shares)} parts{by}; {rows:,} rows of other parts are read before each layer"
        if not (codes := self._codes()):
            return said
        of = ", ".join(f"of layer {layer + 1} in {one.bytes:,} bytes" for layer, one in codes.items())
        return f"{said}, {of} a row as the codes of [quant] (graph.halo.bits are those of gradients)"

    def _codes(self) -> dict[int, RowSize]:
        """Of layers whose rows cross as codes."""
        layers = range(1, halo.depth(self.network))
        return {at: one for at in layers if (one := crossing_codes(self.network, at, 4)) is not None}

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

    def step_bytes(
        self, shares: Sequence[int], size: int, by_peer: Mapping[tuple[int, bool], Any] | None = None
    ) -> Array:
        """float [ranks, ranks]: see `sylvie.step_bytes`."""
        found: Array = step_bytes(self.network, self.rows(shares), self.options, size, by_peer)
        return found

    def crossing_bytes(self, shares: Sequence[int], size: int, key: tuple[int, bool], bits: int) -> Array:
        """float [ranks, ranks]: see `sylvie.crossing_bytes`."""
        found: Array = crossing_bytes(self.network, self.rows(shares), self.options, key, sylvie.Values(bits, size))
        return found

    def counts(self, shares: Sequence[int]) -> dict[tuple[int, bool], Array]:
        """int64 [ranks, ranks]: rows that rank i sends rank j, of each layer and direction, but those that
        cross as codes."""
        rows, codes = self.rows(shares), self._codes()
        every = [key for key in sylvie.crossings(self.network) if key.backward or key.layer not in codes]
        return {key: rows.T if key.backward else rows for key in every}

    def coded_bytes(self, shares: Sequence[int], size: int) -> Array:
        """float [ranks, ranks]: of rows that cross as codes, for which there are no bits to choose."""
        rows = self.rows(shares)
        sent = np.zeros(rows.shape)
        for at in self._codes():
            sent = sent + crossing_bytes(self.network, rows, self.options, (at, False), sylvie.Values(WHOLE, size))
        return sent


def open_part(
    cutting: Cutting, shares: Sequence[int], group: dist.ProcessGroup, *, writes: bool = True
) -> partition_folder.Part:
    """The part of this rank of `group`. All ranks call it alike; the graph is cut by the first where it was not, and
    where machines have other parts than it has.

    Args:
        shares: of the nodes, for each rank; writes: whether this rank writes the parts for its machine.
    """
    identity, folder, rank = cutting.graph.fingerprint(), cutting.folder(shares), group.rank()
    known = set(plain_collectives.all_gather(partition_folder.intact(folder, rank, identity), group))
    if None in known or len(known) > 1:
        made = cutting.parts(shares).tobytes() if rank == 0 else b""
        parts = np.frombuffer(plain_collectives.broadcast(made, group), np.int32)
        if writes:
            with _locked(folder):
                if len(known - {None}) > 1 or not partition_folder.holds(folder, parts, identity):
                    cutting.write(folder, parts, len(shares))
        plain_collectives.all_gather(True, group)
    return partition_folder.read(folder, rank, group, identity)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process of a machine at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
