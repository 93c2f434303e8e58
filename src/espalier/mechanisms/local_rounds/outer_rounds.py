"""Replicas agree round by round, and inside each replica at every step: the trainer's door to the outer engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from espalier.checkpoint.base import StateDict, Stateful, StatefulParts
from espalier.checkpoint.tensor_slice import Slice
from espalier.comm.base import Traffic, traffic
from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds.co2 import CLAIM, chosen_of, refuse_pieces
from espalier.mechanisms.local_rounds.membership import MemberGroup, Members
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.optim.outer_optimizer import Sum
from espalier.parallel.agreement import AgreedStep, Agreement, LauncherNews
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.workload import Outcome
from espalier.recipe import units
from espalier.recipe.errors import UserError
from espalier.train import every_step
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe


class RefreshedSharding(Protocol):
    """What is needed of a sharding (see `parallel.sharding.Sharding`)."""

    def settle(self) -> None:
        """Returns when every parameter that lives here is up to date."""

    def adopt(self) -> None:
        """Takes what was written into what is owned for everybody's parameters."""


@dataclass(eq=False)
class RoundsAgreement:
    """One step inside the replica, then the outer engine's. Has no state of its own.

    Args:
        inner: the agreement inside the replica.
        engine: of what this rank owns.
        sharding: of the replica.
        rate: the inner optimizer's own learning rate, which the schedule's factor multiplies.
        replicas: the ranks of each.
    """

    inner: Agreement
    engine: OuterSync
    sharding: RefreshedSharding
    rate: float
    replicas: Sequence[tuple[int, ...]]

    def __post_init__(self) -> None:
        self.engine.on_moving = self.sharding.settle
        self.engine.on_moved = self.sharding.adopt

    def step(self, outcome: Outcome, learning_rate: float, stop: bool) -> AgreedStep:
        """See `Agreement.step`; the loss is this replica's. All stop at the end of the same round."""
        agreed = self.inner.step(outcome, learning_rate, stop)
        if agreed.faulty:
            return agreed
        before = self.engine.stood
        over = self.engine.after_step(learning_rate * self.rate, agreed.stop)
        exposed = agreed.exposed + self.engine.stood - before
        return agreed._replace(stop=over and self.engine.stopping, exposed=exposed)

    @property
    def level(self) -> bool:
        """See `Agreement.level`: between rounds, and at the end."""
        return self.engine.clock == 0

    @property
    def whole(self) -> bool:
        return self.engine.whole

    @property
    def outlives(self) -> bool:
        return self.level and not self.engine.leaving and self.engine.members is not None

    @property
    def leaving(self) -> bool:
        """See `Agreement.leaving`: known to all at the end of the same round."""
        return self.level and self.engine.leaving

    def following(self, step: int) -> int:
        """See `Agreement.following`. A slower replica leaves steps out, so that all end their rounds at one number."""
        engine = self.engine
        return engine.begun + (engine.clock + 1) * engine.steps // engine.own_steps

    def at(self, step: int) -> None:
        if self.engine.clock == 0:
            self.engine.begun = step

    def shown(self) -> AbstractContextManager[None]:
        """The common parameters in place of this replica's own."""
        return self.engine.shown()

    common = False

    def finish(self, learning_rate: float) -> None:
        """Makes all replicas one."""
        self.engine.finish(learning_rate * self.rate)

    def follow(self, launcher: LauncherNews) -> None:
        """See `Agreement.follow`: the mean goes on without the replicas of lost ranks."""
        self.engine.summoned = launcher.called.is_set
        if self.engine.members is not None:
            places = {rank: place for place, rank in enumerate(sum(self.replicas, ()))}

            def lost() -> set[int]:
                return {places[rank] for rank in launcher.gone if rank in places}

            self.engine.members.crew = self.engine.members.crew._replace(lost=lost)

    def close(self) -> None:
        self.engine.close()


# --- what survives -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Common:
    """The model as all replicas agreed on it last: what evaluation and export read, and others resume from. Stateful.

    `writes`: whether this replica writes it.
    """

    model: Stateful
    agreement: RoundsAgreement
    writes: bool

    def state_dict(self) -> StateDict:
        """Copies."""
        with self.agreement.shown():
            return {name: self._copy(value) for name, value in self.model.state_dict().items()}

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Slice):
            return replace(value, local=value.local.clone(), writes=value.writes and self.writes)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def load_state_dict(self, state: StateDict) -> None:
        """Every replica begins a round from it, unless parts loaded later say more."""
        self.model.load_state_dict(state)
        self.agreement.engine.begin()


@dataclass(frozen=True)
class StatePart:
    """One half of an outer engine's state. Stateful."""

    state_dict: Callable[[], StateDict]
    load_state_dict: Callable[[StateDict], None]


def parts(inner: StatefulParts, agreement: RoundsAgreement, replica: int, shard: str) -> dict[str, Stateful]:
    """What a checkpoint holds of a rank: the common model, its replica's optimizer, and the engine's two halves.

    Args:
        inner: the parts of the replica's sharding, among them `model` and `optimizer`.
        agreement: of this rank.
        replica: its replica's number; shard: names its shard among the ranks of a replica.
    """
    engine = agreement.engine
    owner = f"replica {replica}"
    states: dict[str, Stateful] = {"model": Common(inner["model"], agreement, replica == 0)}
    for name, part in inner.items():
        if name != "model":
            states[name if replica == 0 else f"{name} of {owner}"] = part
    states[f"outer, shard {shard}"] = StatePart(engine.common_state, engine.load_common)
    states[f"{owner}, shard {shard}"] = StatePart(engine.own_state, engine.load_own)
    return states


# --- as a mechanism ------------------------------------------------------------------------------------------------


class OuterRounds(Mechanism):
    """Replicas agree at every step inside, and round by round with one another."""

    claim = CLAIM
    record = "co2"

    def __init__(self, outer: LocalRoundsState) -> None:
        self.outer = outer

    def wrap(self, context: Build) -> None:
        """Makes the agreement.

        Raises UserError: what a rank owns is not cut by all ranks of its replica, so several would send the same.
        """
        sharding = context.sharding
        mesh = context.mesh
        assert sharding is not None
        timeout = units.seconds(context.recipe.comm.timeout, "comm.timeout")
        loop = engine(context.plan, mesh, [owned.tensor for owned in sharding.owned], timeout)
        rate = context.recipe.train.optimizer.learning_rate or 0.0
        context.agreement = RoundsAgreement(every_step.agreement(context), loop, sharding, rate, mesh.mesh.replicas)
        if loop.length.adapt:
            named = getattr(context.recipe.sync, "adapt", True)
            loop.decisions.logs = (named,) if isinstance(named, str) else ()
            context.decisions.append(loop.decisions)

    def state(self, context: Build, states: StatefulParts) -> StatefulParts:
        """The common model, each replica's optimizer, and the engine's halves."""
        agreement = context.agreement
        mesh = context.mesh
        assert isinstance(agreement, RoundsAgreement)
        replica = mesh.coordinates.replica
        ranks = mesh.mesh.replicas[replica]
        return parts(states, agreement, replica, f"{ranks.index(mesh.rank)} of {len(ranks)}")


def engine(plan: Plan, mesh: ProcessMesh, owned: Sequence[Tensor], timeout: float) -> OuterSync:
    """The outer engine of what this rank owns.

    Args:
        plan: with a `LocalRoundsState`.
        mesh: of the plan.
        owned: what this rank moves.
        timeout: seconds of any wait.

    Raises UserError: what a rank owns is not cut by all ranks of its replica, so several would send the same.
    """
    outer = plan.state(LocalRoundsState)
    world = mesh.mesh
    rank = mesh.rank
    replica = mesh.coordinates.replica
    ranks = world.replicas[replica]
    pipelines = len({stage.pipeline for stage in plan.stages})  # of unequal ones each holds each layer once
    alike = pipelines if plan.unequal else len(world.same_parameters(rank))
    if any((len(unit.optimizer) or 1) != alike for unit in plan.units):
        raise UserError(
            f"A replica has {alike} ranks with the same parameters, and not all of them share the optimizer's state.",
            why="each rank exchanges its shard with the same rank of the other replicas",
            do=f"plan.pin.shard.optimizer={alike}",
        )
    paces = outer.paces or (1.0,) * len(world.replicas)
    samples = [sum(plan.ranks[member].samples for member in members) for members in world.replicas]
    rounds = Rounds(outer.steps, paces[replica], samples[replica] / max(samples), outer.adapt)
    choices = chosen_of(outer.method, dict(outer.settings))
    refuse_pieces(choices, len(ranks))
    members = None
    if len(world.replicas) > 1:
        channel: Any = mesh.channel
        everybody = tuple(range(len(world.replicas)))
        ledger = getattr(channel, "ledger", None)
        store = channel.get_group_store()
        crew = MemberGroup(store, replica, everybody, ranks.index(rank), len(ranks), timeout, ledger=ledger)
        members = Members(crew, codec(choices.codec))
    group = mesh.replica
    total: Sum | None = None if group is None else partial(_total, group)
    return OuterSync(owned, choices, members, rounds, total)


def _total(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Adds over the shards of a replica."""
    with traffic(Traffic.CONTROL), torch.no_grad():
        group.allreduce([values], AllreduceOptions()).wait()
    return values


# --- with the outer model on nodes ---------------------------------------------------------------------------------

AT_NODES = replace(CLAIM, name="rounds_at_nodes", needs=CLAIM.needs | {"states on nodes"})


class NodeSide(Protocol):
    """What is needed of a sharding whose outer parameters others hold (see
    `mechanisms.optimizer_node.mechanism.LocalSharding`)."""

    def end_round(self, run: int, rate: float, stop: bool) -> bool:
        """Gives what this replica did and takes what all did; `run`: steps of the run then, `rate`: of the last step.
        Returns whether some replica stops."""


class AtNodes(every_step.StepAgreement):
    """One step of this replica, and a round's end at the nodes. Has state: how far it is in its round.

    `begin` says which rounds: local `steps` of `every` of the run, at the inner optimizer's own `rate`.
    """

    common = False

    def begin(self, nodes: NodeSide, rounds: Rounds, rate: float) -> AtNodes:
        self.nodes = nodes
        self.rounds = rounds
        self.rate = rate
        self.clock = self.begun = 0
        self._asked = False
        return self

    def step(self, outcome: Outcome, learning_rate: float, stop: bool) -> AgreedStep:
        """See `Agreement.step`; the loss is this replica's. All stop at the end of the same round."""
        agreed = super().step(outcome, learning_rate, stop)
        if agreed.faulty or not math.isfinite(agreed.gradient_norm):
            return agreed
        self.clock += 1
        self._asked |= agreed.stop
        if self.clock < self.rounds.own_steps:
            return agreed._replace(stop=False)
        begun = time.perf_counter()
        stopping = self._end(learning_rate)
        return agreed._replace(stop=stopping, exposed=agreed.exposed + time.perf_counter() - begun)

    def _end(self, learning_rate: float) -> bool:
        self.begun = self._reached(self.clock)
        self.clock = 0
        stopping = self.nodes.end_round(self.begun, learning_rate * self.rate, self._asked)
        self._asked = False
        return stopping

    def _reached(self, clock: int) -> int:
        return self.begun + clock * self.rounds.steps // self.rounds.own_steps

    @property
    def level(self) -> bool:  # type: ignore[override]
        """See `Agreement.level`: between rounds, and at the end."""
        return self.clock == 0

    def following(self, step: int) -> int:
        """See `Agreement.following`. A slower replica leaves steps out, so that all end their rounds at one number."""
        return self._reached(self.clock + 1)

    def at(self, step: int) -> None:
        self.begun = step
        self.clock = 0

    def finish(self, learning_rate: float) -> None:
        """Makes all replicas one."""
        if self.clock:
            self._end(learning_rate)


class RoundsAtNodes(Mechanism):
    """Replicas of one rank each, whose outer parameters and outer optimizer are on optimizer nodes."""

    claim = AT_NODES

    def __init__(self, outer: LocalRoundsState) -> None:
        self.outer = outer

    def wrap(self, context: Build) -> None:
        """Makes the agreement."""
        nodes: Any = context.sharding
        paces = self.outer.paces or (1.0,) * len(self.outer.replicas)
        rounds = Rounds(self.outer.steps, paces[context.mesh.coordinates.replica])
        rate = context.recipe.train.optimizer.learning_rate or 0.0
        context.agreement = every_step.agreement(context, AtNodes).begin(nodes, rounds, rate)


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Rounds, where the plan has them."""
    outer = plan.state(LocalRoundsState)
    if not outer.replicas:
        return None
    return RoundsAtNodes(outer) if plan.optimizer_nodes else OuterRounds(outer)
