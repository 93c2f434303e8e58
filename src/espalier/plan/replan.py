"""Re-planning: plans a run anew on the places of its plan, without some of them or at the speeds they showed. No torch.

After FlashFlex (arXiv 2409.01143), which plans for unequal devices, and Acme (arXiv 2403.07648), section 6.1. The
search and the cost model are those of any plan: each rank becomes a device of its own, slowed by what was measured.
Where we deviate: only data-parallel ranks of one machine, and what a choice of the table plans anew itself (unequal
pipelines, waves of tasks); what slowness has nothing to do with (precision, micro-batch, recomputation, whether states
are whole) stays as it was where that fits, so that only what was measured decides. Workers of optimizer nodes hold no
state: they share the batch anew, on any machines, and nothing else changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from espalier.machine.cluster import Cluster
from espalier.plan import base as plans
from espalier.plan import choice, collective_time
from espalier.plan.base import Plan
from espalier.plan.calibration import Calibration
from espalier.plan.compose import Claim
from espalier.plan.decide import decide
from espalier.plan.layout_estimate import Shares, price
from espalier.plan.layouts import of_view
from espalier.plan.measured_cluster import Speeds, equalised, measured
from espalier.plan.request import Request
from espalier.recipe import EveryStep, Pin, Recompute, ShardPin, units
from espalier.recipe.errors import UserError

CLAIM = Claim(
    "replan",
    question="replan",
    forbids={"replicas differ between rounds", "the model is cut", "experts are spread", "several machines"},
)
"""A run on fewer ranks, or on others, goes on from the same state: its ranks hold whole models, on one machine."""
PIPELINES = Claim("replan_pipelines", question="replan", forbids={"replicas differ between rounds"})
"""The same of unequal pipelines and waves, which take up a checkpoint under another cut, over several machines too."""

WORKERS = Claim("replan_workers", question="replan", forbids={"replicas differ between rounds"})
"""The same of workers whose state is on optimizer nodes, on any machines."""

FEWER = 3
"""So many of the slowest are left out at most, one after the other; and all but one, and the slower half."""
_FITTED, _MOST = 40, 1e6  # halvings of a factor between 1 and this


@dataclass(frozen=True)
class Replan:
    """Another plan: which ranks of the one before it keeps, and its step as a multiple of that one's (both by the cost
    model, at the same measured speeds)."""

    plan: Plan
    remaining: tuple[int, ...]
    ratio: float


def cut(plan: Plan) -> bool:
    """Whether its ranks hold unlike parts of the model, cut by their speeds."""
    return _replanner(plan) is not None


def planned_work(request: Request, cluster: Cluster, plan: Plan) -> tuple[float, ...]:
    """Of each trainer, what it computes in a step as planned, in seconds of any unit; empty: all as much, by speed."""
    replanner = _replanner(plan)
    return () if replanner is None else replanner.planned_work(request, cluster, plan)


def describe(plans: Sequence[Plan]) -> str:
    """What ranks of the first plan hold in a few words of whoever has planned one of `plans`; empty: nobody has."""
    replanner = next((candidate for plan in plans if (candidate := _replanner(plan)) is not None), None)
    return "" if replanner is None else replanner.describe(plans[0])


def _replanner(plan: Plan, request: Request | None = None) -> choice.Replanner | None:
    """Who has cut the plan by speeds; None: nobody. `request`: whose parts may all be on one rank."""
    made = (each.replanner for each in choice.of(plan, request))
    return next((replanner for replanner in made if replanner is not None), None)


def equal(plan: Plan) -> Speeds:
    """All as planned."""
    return Speeds((1.0,) * len(plan.ranks))


def speeds(request: Request, cluster: Cluster, plan: Plan, busy: Sequence[float]) -> Speeds:
    """Of ranks that train and spend `busy` seconds a step on their samples. Those that serve them count as equal."""
    if cut(plan):
        return _relative(busy, planned_work(request, cluster, plan))
    each = [seconds / rank.samples for seconds, rank in zip(busy, plan.trainer_ranks, strict=True)]
    middle = statistics.median_low(each)
    ratios = [taken / middle if middle > 0 else 1.0 for taken in each]
    slower = [1.0] * len(plan.ranks)
    for rank, ratio in zip(plan.trainers, ratios, strict=True):
        slower[rank] = equalised(ratio)
    return Speeds(tuple(slower))


def _relative(busy: Sequence[float], planned: Sequence[float]) -> Speeds:
    """Of ranks that compute `busy` seconds a step: over what the plan lets each compute, which differs, and over the
    rank in the middle. A rank without work counts as equal."""
    ratios = [taken / expected if expected > 0 else 0.0 for taken, expected in zip(busy, planned, strict=True)]
    middle = statistics.median_low([ratio for ratio in ratios if ratio > 0] or [0.0])
    return Speeds(tuple(equalised(ratio / middle) if ratio > 0 and middle > 0 else 1.0 for ratio in ratios))


def with_link(request: Request, cluster: Cluster, plan: Plan, speeds: Speeds, excess: float) -> Speeds:
    """`speeds` with the factor on links that makes the plan's step `excess` seconds longer (0 or less: 1)."""
    target = seconds(request, cluster, plan, speeds) + excess
    if excess <= 0 or len(plan.ranks) == 1:
        return speeds
    low = 1.0
    high = _MOST
    for _ in range(_FITTED):
        middle = (low * high) ** 0.5
        slower = seconds(request, cluster, plan, replace(speeds, link=middle)) > target
        low, high = (low, middle) if slower else (middle, high)
    return replace(speeds, link=low)


def seconds(request: Request, cluster: Cluster, plan: Plan, speeds: Speeds) -> float:
    """Of a step of `plan` with the shares it has, by the cost model at the `speeds`: its slowest rank's. Of
    workers of optimizer nodes in units of a usual worker's sample: links are as before."""
    if (replanner := _replanner(plan, request)) is not None:
        return replanner.seconds(request, cluster, plan, speeds)
    if _serving(plan):
        return max(speeds.slower[rank] * (plan.ranks[rank].samples) for rank in plan.trainers)
    threads = plan.ranks[0].threads
    on = collective_time.fleet(measured(cluster, plan.ranks, speeds), len(plan.ranks), threads)
    shares = [rank.samples for rank in plan.ranks]
    layout = replace(of_view(plan.layout), threads=threads)
    asked = request.changed(precision=plan.precision)
    costs = price(asked, replace(on, factors=request.factors), layout, Shares(shares))
    return max(float(priced.step) for priced in costs)


def plan_on(request: Request, cluster: Cluster, plan: Plan, remaining: Sequence[int], speeds: Speeds) -> Plan:
    """The best plan for the places of the ranks `remaining` (of `plan`, in order), at the `speeds` of all its ranks.

    Raises UserError where they cannot hold the run or share its batch.
    """
    if (replanner := _replanner(plan)) is not None:
        return replanner.plan_on(request, cluster, plan, remaining, speeds)
    check_sharing(request, plan, remaining)
    if _serving(plan):
        return _shared(request, plan, remaining, speeds)
    ranks = [plan.ranks[rank] for rank in remaining]
    there = measured(cluster, ranks, speeds.of(remaining))
    pinned = Pin(
        ranks=len(remaining),
        threads=ranks[0].threads,
        algorithm="data",
        pp=1,
        micro_batch=min(plan.micro_batch, -(-request.profile.global_batch // len(remaining))),
        recompute=cast("Recompute", plan.recompute),
        shard=ShardPin(params=1, grads=1, optimizer=1) if plan.replicated else None,
    )
    freer = Pin(ranks=len(remaining), threads=ranks[0].threads, algorithm="data", pp=1)
    asked = request.changed(precision=plan.precision, sync=EveryStep())
    for pin in (pinned, freer):
        decision = decide(asked.changed(pin=pin), there, Calibration(factors=request.factors))
        if decision.fits:
            return seated(decision.taken, ranks, request.profile.global_batch)
    closest = decision.search_result.closest
    over = units.show_size(closest.over) if closest is not None else "some"
    raise UserError(
        f"{units.plural(len(remaining), 'rank')} cannot hold this run: {over} of memory is missing on each.",
        do="mend the place that was lost and run the same command, or a smaller model or micro-batch",
    )


def check_sharing(request: Request, plan: Plan, remaining: Sequence[int]) -> None:
    """Raises UserError unless each of the ranks `remaining` that train has a sample."""
    sharing = len({*remaining}.intersection(plan.trainers))
    if not sharing or sharing > request.profile.global_batch:
        raise UserError(
            f"A batch of {request.profile.global_batch} samples cannot be shared by {sharing} ranks.",
            do="train.batch_tokens as it is, on at least one rank",
        )


def options(request: Request, cluster: Cluster, plan: Plan, speeds: Speeds) -> list[Replan]:
    """Plans for the same run on the same places or without the slowest, at the `speeds`; the fastest first."""
    there = len(plan.trainers)
    now = seconds(request, cluster, plan, speeds)
    slowest = sorted(plan.trainers, key=lambda rank: (-speeds.slower[rank], -rank))
    made = []
    for count in sorted({*range(FEWER + 1), there // 2, there - 1}):
        if count >= there:
            continue
        remaining = (*sorted(slowest[count:]), *_serving(plan))
        try:
            new_plan = plan_on(request, cluster, plan, remaining, speeds)
        except UserError:
            continue  # fewer cannot hold it
        made.append(Replan(new_plan, remaining, seconds(request, cluster, new_plan, speeds.of(remaining)) / now))
    return sorted(made, key=lambda option: option.ratio)


def _serving(plan: Plan) -> list[int]:
    """Ranks that hold the model for the others."""
    return [index for index, rank in enumerate(plan.ranks) if rank.role != "trainer"]


def _shared(request: Request, plan: Plan, remaining: Sequence[int], speeds: Speeds) -> Plan:
    """`plan` whose workers among `remaining` share the batch by their speeds. Raises UserError where one that serves is
    lost."""
    lost = next((rank for rank in _serving(plan) if rank not in remaining), None)
    if lost is not None:
        raise UserError(
            f"Rank {lost} ({plan.ranks[lost].role}) serves the others.", do="mend its place and run the same command"
        )
    workers = [rank for rank in remaining if plan.ranks[rank].role == "trainer"]
    if not 0 < len(workers) <= (batch := request.profile.global_batch):
        raise UserError(
            f"A batch of {batch} samples cannot be shared by {units.plural(len(workers), 'worker')}.",
            do="train.batch_tokens as it is, on at least one worker",
        )
    samples = dict.fromkeys(workers, 1)
    for _ in range(request.profile.global_batch - len(workers)):
        samples[min(workers, key=lambda rank: (samples[rank] + 1) * speeds.slower[rank])] += 1
    ranks = []
    at = 0
    for rank in remaining:
        share = at, at + samples.get(rank, 0)
        at = share[1]
        trains = rank in samples
        ranks.append(plan.ranks[rank].changed(share=share) if trains else plan.ranks[rank])
    made = plan.changed(ranks=tuple(ranks), stages=(), predicted=None, runners_up=())
    return plans.check(made, request.profile.global_batch, "the new plan")


def seated(made: Plan, ranks: Sequence[plans.Rank], samples: int) -> Plan:
    """The plan with its ranks on the devices that they have."""
    seated = tuple(
        new.changed(device=old.device, node=old.node, threads=old.threads)
        for new, old in zip(made.ranks, ranks, strict=True)
    )
    return plans.check(made.changed(ranks=seated, runners_up=()), samples, "the new plan")
