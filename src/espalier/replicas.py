"""Replicas of a run that agree round by round: a group of ranks for each, and the engine between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from espalier.comm.base import Traffic, traffic
from espalier.comm.codecs import codec
from espalier.errors import UserError
from espalier.launch.recall import Recall
from espalier.plan.base import Outer, Plan
from espalier.shard.base import Sharding
from espalier.sync.base import Agreement
from espalier.sync.by_rounds import ByRounds
from espalier.sync.co2 import chosen_of
from espalier.sync.members import Crew, Members
from espalier.sync.outer import OuterSync, Rounds
from espalier.sync.update import Sum


def mine(outer: Outer, channel: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks of this rank's replica; None where it is alone. All ranks call it."""
    if channel is None:
        return None
    found = None
    for ranks in outer.replicas:
        group = dist.new_group(list(ranks), backend="espalier") if len(ranks) > 1 else None
        if channel.rank() in ranks:
            found = group
    return found


def place(outer: Outer, rank: int) -> tuple[int, int]:
    """The number of a rank's replica, and its own number in it."""
    replica = next(index for index, ranks in enumerate(outer.replicas) if rank in ranks)
    return replica, outer.replicas[replica].index(rank)


def engine(plan: Plan, sharding: Sharding, channel: Any, group: Any, timeout: float) -> OuterSync:
    """The outer engine of what this rank owns.

    Args:
        plan: with `outer`.
        sharding: of the replica.
        channel: all ranks; None: one alone. group: those of the replica; None: one alone.
        timeout: seconds of any wait.

    Raises UserError: what is owned is not cut by all ranks of a replica, so several would send the same.
    """
    outer = plan.outer
    assert outer is not None
    rank = 0 if channel is None else channel.rank()
    replica, shard = place(outer, rank)
    shards = len(outer.replicas[replica])
    if any((len(unit.optimizer) or 1) != shards for unit in plan.units):
        raise UserError(
            f"A replica has {shards} ranks, and the optimizer's state is not cut among all of them.",
            why="each rank sends what it owns to its like in the other replicas",
            do=f"plan.pin.shard.optimizer={shards}",
        )
    choices = chosen_of(outer.method, dict(outer.settings))
    members = None
    if len(outer.replicas) > 1:
        everybody = tuple(range(len(outer.replicas)))
        crew = Crew(channel.get_group_store(), replica, everybody, shard, shards, timeout, ledger=channel.ledger)
        members = Members(crew, codec(choices.codec))
    paces = outer.paces or (1.0,) * len(outer.replicas)
    samples = [sum(plan.ranks[one].share[1] - plan.ranks[one].share[0] for one in ranks) for ranks in outer.replicas]
    rounds = Rounds(outer.steps, paces[replica], samples[replica] / max(samples), outer.adapt)
    return OuterSync([one.tensor for one in sharding.owned], choices, members, rounds, _total(group))


def heed(agreement: Agreement, outer: Outer | None, recall: Recall) -> None:
    """Replicas that hear from their launcher who was lost, and that one in its place waits for them."""
    if outer is None or not isinstance(agreement, ByRounds):
        return
    engine = agreement.engine
    shards = len(outer.replicas[0])

    def lost() -> set[int]:
        return {
            member * shards + shard
            for member, ranks in enumerate(outer.replicas)
            for shard, rank in enumerate(ranks)
            if rank in recall.gone
        }

    engine.summoned = recall.called.is_set
    if engine.members is not None:
        engine.members.crew = engine.members.crew._replace(lost=lost)


def leave(agreement: Agreement) -> None:
    """Ends the threads between replicas, whatever is under way."""
    if isinstance(agreement, ByRounds):
        agreement.engine.close()


def _total(group: Any) -> Sum | None:
    """Adds over the shards of a replica."""
    if group is None:
        return None

    def total(values: Tensor) -> Tensor:
        with traffic(Traffic.CONTROL), torch.no_grad():
            group.allreduce([values], AllreduceOptions()).wait()
        return values

    return total
