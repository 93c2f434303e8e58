"""The device mesh of a run: its axes, the coordinates of each rank, and the process groups along the axes.

Axes, from the coarsest: `replica` (copies that agree by rounds), `pp` (pipeline stages), `dp` (data parallel), `cp_out`
and `cp_in` (context parallel, between and inside machines), `hp` (heads, Ulysses) and `tp` (tensor parallel); the
three in the middle together are the sequence axis. Experts (`ep`) do not add ranks: an expert group is a run of
consecutive ranks along `dp` and the sequence axes (DeepSpeed-MoE, arXiv 2201.05596).

A mesh need not be regular: pipelines may have stages of unequal width, and ranks that hold no part of the model
(optimizer nodes, evaluators, spares) have a role but no coordinates. `Mesh` is a pure value, cheap for thousands of
ranks; `ProcessMesh` is what one process sees of it, with process groups made on first use.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from espalier.comm import plain_collectives
from espalier.comm.base import Traffic
from espalier.comm.channel import Channel
from espalier.comm.codecs import codec
from espalier.comm.plain_collectives import RankGroup
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.plan.base import Plan, Stage

AXES = ("replica", "pp", "dp", "cp_out", "cp_in", "hp", "tp")
SEQUENCE = ("cp_out", "cp_in", "hp")
DATA = ("dp", *SEQUENCE)
"""Axes along which ranks hold the same parameters and compute on different tokens."""
REPLICA = AXES[1:]
"""Axes of one replica: ranks that exchange something at every step."""

Ranks = tuple[int, ...]


class Coordinates(NamedTuple):
    """Where a rank stands on each axis."""

    replica: int = 0
    pp: int = 0
    dp: int = 0
    cp_out: int = 0
    cp_in: int = 0
    hp: int = 0
    tp: int = 0


class DataShare(NamedTuple):
    """Part `number` of `total` equal ones."""

    number: int
    total: int


class SequenceShare(NamedTuple):
    """Slot `number` of `total` along a sequence; so many consecutive ones share the `heads`. `speeds`: of the ranks of
    all slots; empty: equal."""

    number: int
    total: int
    heads: int
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Mesh:
    """Who stands where. Immutable.

    Attributes:
        roles: of every rank; `trainer` where it holds a part of the model.
        coordinates: of every trainer, by rank.
        experts: ranks of an expert group (`ep`); it divides the ranks along the data axes.
        heads: trainers whose loss counts: of each pipeline the last stage, and one of each tensor-parallel group.
        speeds: relative ones of ranks that share sequences unequally.
    """

    roles: tuple[str, ...]
    coordinates: Mapping[int, Coordinates]
    experts: int = 1
    heads: frozenset[int] = frozenset()
    speeds: Mapping[int, float] = field(default_factory=dict)
    _groups: dict[tuple[str, ...], dict[int, Ranks]] = field(
        default_factory=dict, compare=False, hash=False, repr=False
    )

    def members(self, rank: int, *axes: str) -> Ranks:
        """The trainers that differ from `rank` in `axes` only, in the order of their coordinates."""
        return self._by_rank(axes)[rank]

    def groups(self, *axes: str) -> tuple[Ranks, ...]:
        """All groups along `axes`, each once: together the trainers."""
        return tuple(dict.fromkeys(self._by_rank(axes).values()))

    def _by_rank(self, axes: Sequence[str]) -> dict[int, Ranks]:
        key = tuple(axis for axis in AXES if axis in axes)
        assert len(key) == len(set(axes)), f"axes are {AXES}, not {tuple(axes)}"
        if key not in self._groups:
            fixed = [index for index, axis in enumerate(AXES) if axis not in key]
            groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank in sorted(self.coordinates, key=lambda rank: self.coordinates[rank]):
                groups[tuple(self.coordinates[rank][index] for index in fixed)].append(rank)
            self._groups[key] = {rank: tuple(group) for group in groups.values() for rank in group}
        return self._groups[key]

    @property
    def trainers(self) -> Ranks:
        """The ranks that hold a part of the model."""
        return tuple(sorted(self.coordinates))

    @property
    def replicas(self) -> tuple[Ranks, ...]:
        """The ranks of each replica."""
        return self.groups(*REPLICA)

    def same_parameters(self, rank: int) -> Ranks:
        """The ranks of `rank`'s replica that hold the same parameters, in order: gradients are summed over them, and
        shards of states lie on neighbours, whatever neighbours do with a sequence."""
        return tuple(sorted(self.members(rank, *DATA)))

    def counts(self, rank: int) -> bool:
        """Whether the loss that `rank` computes is counted. The others of its tensor-parallel group compute the same,
        earlier stages none."""
        return rank in self.heads

    def data_part(self, rank: int) -> DataShare:
        """Which samples of a data set `rank` takes where they are divided evenly: one part for each (replica, dp)."""
        parts = sorted({(coordinate.replica, coordinate.dp) for coordinate in self.coordinates.values()})
        coordinate = self.coordinates[rank]
        return DataShare(parts.index((coordinate.replica, coordinate.dp)), len(parts))

    def sequence_part(self, rank: int) -> SequenceShare:
        """Which part of each sequence `rank` holds."""
        group = self.members(rank, *SEQUENCE)
        speeds = tuple(self.speeds[rank] for rank in group if rank in self.speeds)
        return SequenceShare(group.index(rank), len(group), len(self.members(rank, "hp")), speeds)

    def expert_group(self, rank: int) -> Ranks:
        """The ranks among which one copy of the experts is divided."""
        group = self.same_parameters(rank)
        first = group.index(rank) // self.experts * self.experts
        return group[first : first + self.experts]

    def same_experts(self, rank: int) -> Ranks:
        """The ranks of `rank`'s replica that hold the same experts."""
        group = self.same_parameters(rank)
        return group[group.index(rank) % self.experts :: self.experts]


def of_plan(plan: Plan) -> Mesh:
    """The mesh of a plan's ranks."""
    roles = tuple(rank.role for rank in plan.ranks)
    replicas = plan.replicas or (plan.trainers,)
    inside, last = _of_stages(plan)
    if plan.apart or not inside:
        axis = "pp" if plan.apart else "dp"
        last = set(replicas[0])
        inside = {rank: Coordinates(**{axis: index}) for index, rank in enumerate(replicas[0])}
    like = {rank: replicas[0][index] for ranks in replicas for index, rank in enumerate(ranks)}
    coordinates = {rank: inside[like[rank]]._replace(replica=n) for n, ranks in enumerate(replicas) for rank in ranks}
    mesh = _made(roles, coordinates, {rank for rank in coordinates if like[rank] in last}, plan.layout.ep)
    speeds = {
        rank: stage.speeds[index // stage.tensor % stage.sequence]
        for stage in plan.stages
        for index, rank in enumerate(stage.ranks)
        if stage.speeds
    }
    return replace(mesh, speeds={rank: speeds[like[rank]] for rank in coordinates if like[rank] in speeds})


def _of_stages(plan: Plan) -> tuple[dict[int, Coordinates], set[int]]:
    """Coordinates of the ranks of a plan's stages, pipelines side by side along `dp`; and the ranks of last stages."""
    coordinates: dict[int, Coordinates] = {}
    last: set[int] = set()
    offset = 0
    for _, group in itertools.groupby(
        sorted(plan.stages, key=lambda stage: stage.pipeline), key=lambda stage: stage.pipeline
    ):
        stages = sorted(group, key=lambda stage: stage.layers)
        width = 0
        for number, stage in enumerate(stages):
            for index, rank in enumerate(stage.ranks):
                data, rest = divmod(index, stage.tensor * stage.sequence)
                sequence, tensor = divmod(rest, stage.tensor)
                out, inner, head = _in_sequence(stage, plan.placement, sequence)
                if rank not in coordinates:  # interleaved: a rank counts where its first stage is
                    coordinates[rank] = Coordinates(
                        pp=number, dp=offset + data, cp_out=out, cp_in=inner, hp=head, tp=tensor
                    )
                width = max(width, data + 1)
        last |= {rank for stage in stages if stage.layers == stages[-1].layers for rank in stage.ranks}
        offset += width
    return coordinates, last


def _in_sequence(stage: Stage, placement: str, index: int) -> tuple[int, int, int]:
    """(cp_out, cp_in, hp) of the `index`-th rank that shares a sequence (LoongTrain, arXiv 2406.18485, section 4.3).

    Head first: ranks that share heads are neighbours. Context first: those of a ring are. Interleaved: the same, but
    two rings of neighbours take turns, so that two devices behind one network card are in different ones.
    """
    if placement == "head_first":
        context, head = divmod(index, stage.heads)
    else:
        head, context = divmod(index, stage.context)
    if placement == "interleaved":
        pair, place = divmod(context, 2 * stage.window)
        return 2 * pair + place % 2, place // 2, head
    return (*divmod(context, stage.window), head)


def _made(roles: tuple[str, ...], coordinates: Mapping[int, Coordinates], last: set[int], experts: int) -> Mesh:
    """`last`: ranks of the last stages."""
    mesh = Mesh(roles, coordinates, experts, frozenset(rank for rank in last if coordinates[rank].tp == 0))
    for group in mesh.groups(*DATA):
        if experts < 1 or len(group) % experts:
            near = max(degree for degree in range(1, max(1, experts) + 1) if len(group) % degree == 0)
            raise UserError(
                f"ep = {experts} does not divide the {len(group)} ranks that hold the same parameters.",
                do=f"ep = {near}",
            )
    return mesh


# --- process groups ------------------------------------------------------------------------------------------------


@dataclass
class ProcessMesh:
    """A mesh as the process of one rank sees it. Has state: the process groups made so far.

    Groups are made on first use, of their members only. All members must ask for them in the same order.

    Attributes:
        mesh: who stands where.
        channel: the group of all ranks; None where there is one.
        rank: this process.
    """

    mesh: Mesh
    channel: RankGroup = None
    rank: int = 0
    _made: dict[Ranks, Any] = field(default_factory=dict, repr=False)

    @property
    def coordinates(self) -> Coordinates:
        return self.mesh.coordinates[self.rank]

    def group(self, *axes: str) -> RankGroup:
        """The ranks that differ from this one in `axes` only; None where it is alone."""
        return self.of(self.mesh.members(self.rank, *axes))

    @property
    def replica_ranks(self) -> Ranks:
        """The trainers of this rank's replica."""
        return self.mesh.members(self.rank, *REPLICA)

    @property
    def replica(self) -> RankGroup:
        """The ranks that exchange something with this one at every step; None where it is alone."""
        return self.group(*REPLICA)

    @property
    def same_parameters(self) -> RankGroup:
        """The ranks of the replica that hold the same parameters; None where it is alone."""
        return self.of(self.mesh.same_parameters(self.rank))

    @property
    def trainers(self) -> RankGroup:
        """All ranks that hold a part of the model; None where it is alone."""
        return self.group(*AXES)

    @property
    def alone(self) -> dist.ProcessGroup:
        """The group of this rank only."""
        assert self.channel is not None
        ranks = (self.rank,)
        if ranks not in self._made:
            self._made[ranks] = _new_group(self.channel, ranks)
        return self._made[ranks]

    def number_groups_alike(self) -> None:
        """Gives the ranks of a replica, all of which call this, as many process groups: groups of their own to those
        that have fewer. torch names a group by its ranks and by how many groups its process has, so ranks that have
        made unlike numbers of them could make no further one together."""
        from torch.distributed.distributed_c10d import _world

        if self.channel is not None:
            groups_made = len(_world.pg_names)
            for _ in range(max(plain_collectives.all_gather(groups_made, self.replica)) - groups_made):
                _new_group(self.channel, (self.rank,))

    def of(self, ranks: Ranks) -> RankGroup:
        """The group of `ranks`, among them this one; None where it is alone."""
        if self.channel is None or len(ranks) < 2:
            return None
        if ranks not in self._made:
            everyone = ranks == tuple(range(self.channel.size()))
            self._made[ranks] = self.channel if everyone else _new_group(self.channel, ranks)
        return self._made[ranks]

    def encode(self, kind: Traffic, group: RankGroup, plan: Plan) -> None:
        """Gives `group` the codec that the plan names for a class of traffic on links of its level. Between machines
        only, messages inside one go as they are. Raises UserError where the group is not Espalier's."""
        if self.channel is None or group is None:
            return
        world = list(_world_ranks(self.channel))
        nodes = [plan.ranks[world.index(rank)].node for rank in dist.get_process_group_ranks(group)]
        level = "between" if len(set(nodes)) > 1 else "inside"
        for exchange in plan.exchanges:
            if exchange.traffic != kind or exchange.codec == "exact" or exchange.level not in ("all", level):
                continue
            if not isinstance(group, Channel):
                raise UserError(
                    f"Codec {exchange.codec!r} was asked for, but the process group is not Espalier's.",
                    do="dist.init_process_group('espalier'), or comm.codec = 'exact'",
                )
            machine = nodes[group.rank()] if exchange.level == "between" else None
            near = [rank for rank, node in enumerate(nodes) if node == machine]
            group.use(kind, codec(exchange.codec), near)


def _world_ranks(channel: dist.ProcessGroup) -> Sequence[int]:
    """The ranks of the world that a group has, by their ranks in it."""
    return getattr(channel, "members", None) or dist.get_process_group_ranks(channel)


def _new_group(channel: dist.ProcessGroup, ranks: Iterable[int]) -> dist.ProcessGroup:
    """The group of `ranks` of `channel`, made by them alone."""
    world = _world_ranks(channel)
    limit = getattr(channel, "timeout", None)
    made = dist.new_group([world[rank] for rank in ranks], timeout=limit, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
