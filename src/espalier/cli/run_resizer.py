"""Resizes a running run by planning it anew: the same recipe and batch, on fewer ranks or at measured speeds.

After Acme (arXiv 2403.07648), section 6.1. What a launcher needs is `launch.ranks.resize.Resizer`; here it is
answered by the
planner and the run's folder. `plan.json` becomes the new plan, so that the same command goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from espalier.cli import measurements, resolve_recipe, run_plan
from espalier.cli.start_run import RunStart
from espalier.launch.ranks.resize import FasterShapes, RunShape
from espalier.launch.resilience.slowdown import Evidence
from espalier.plan import base as plans
from espalier.plan import replan
from espalier.plan.base import Plan
from espalier.plan.request import Request
from espalier.recipe.errors import UserError
from espalier.track import events
from espalier.train import rank_spec as launch
from espalier.train import table

Start = Callable[[RunStart], launch.Entrypoint]
"""The task of a run's ranks."""


class RunResizer:
    """Answers for one run. Has state: its plan as it is now, and the shapes it has offered.

    Args:
        job: the run as it was begun.
        start: makes its ranks' task.
    """

    def __init__(self, job: RunStart, start: Start) -> None:
        self.job = job
        self._start = start
        self._offered: list[tuple[RunShape, Plan]] = []

    @property
    def steps(self) -> int:
        return self.job.resolved.recipe.train.steps or 0

    @property
    def plan(self) -> str:
        return _key(self.job.plan)

    @property
    def planned_wait(self) -> float | None:
        """See `Resizer.planned_wait`. Of states that are whole: others are waited for elsewhere too."""
        plan = self.job.plan
        whole = plan.replicated and len(plan.trainers) == len(plan.ranks) and not replan.cut(plan)
        return plan.predicted.terms.get("all_reduce") if plan.predicted is not None and whole else None

    @property
    def planned_work(self) -> Sequence[float]:
        if not replan.cut(self.job.plan):
            return ()
        try:
            return replan.planned_work(self._request(), self.job.cluster, self.job.plan)
        except UserError:
            return ()  # the run goes on; it is only not known

    def without(self, ranks: Collection[int]) -> RunShape:
        """See `Resizer.without`: without further ranks, the last first, where the batch or the memory wants it so."""
        plan = self.job.plan
        request = self._request()
        self._refuse(plan)
        remaining = [rank for rank in range(len(plan.ranks)) if rank not in ranks]
        speeds = replan.equal(plan)
        refusal = UserError("The run has no other rank.", do="run the same command again")
        for count in range(len(remaining), 0, -1):
            try:
                made = replan.plan_on(request, self.job.cluster, plan, remaining[:count], speeds)
            except UserError as error:
                refusal = error
                continue
            return self._offer(replan.Replan(made, tuple(remaining[:count]), self._ratio(request, made)))
        raise refusal

    def faster(self, evidence: Evidence) -> FasterShapes:
        """See `Resizer.faster`. Ranks that the recipe asks for by number are all kept."""
        plan = self.job.plan
        request = self._request()
        cluster = self.job.cluster
        self._refuse(plan)
        speeds = replan.speeds(request, cluster, plan, evidence.busy)
        if evidence.link and self.planned_wait is not None:
            speeds = replan.with_link(request, cluster, plan, speeds, evidence.wait - self.planned_wait)
        self._offered.clear()
        made = replan.options(request, cluster, plan, speeds)
        return [self._offer(option) for option in made if self._possible(option)], dict(enumerate(speeds.slower))

    def _ratio(self, request: Request, made: Plan) -> float:
        """A step of the plan `made` as a multiple of one of the present plan, by the cost model."""
        now, then = (
            replan.seconds(request, self.job.cluster, plan, replan.equal(plan)) for plan in (self.job.plan, made)
        )
        return then / now

    def _possible(self, option: replan.Replan) -> bool:
        """Whether it may be offered for the sake of speed."""
        pinned = self.job.resolved.recipe.plan.pin.ranks is not None
        return not pinned or len(option.remaining) == len(self.job.plan.ranks)

    def saving(self) -> float:
        took = 0.0
        for event in events.read(self.job.folder.events):
            if event["event"] == "checkpoint":
                took = float(event.get("seconds") or 0.0)
        return took

    def adopt(self, shape: RunShape) -> None:
        plan = next(plan for offered, plan in self._offered if offered is shape)
        plan = run_plan.with_chosen(plan, run_plan.batches_of(self.job.plan))
        self.job = replace(self.job, plan=plan)
        self.job.folder.write(self.job.resolved.recipe, self.job.cluster, plan)
        self._offered.clear()

    def again(self, hosts: Collection[int]) -> RunShape:
        """See `Resizer.again`: of one machine there is none."""
        raise UserError(f"The run has no other hosts than its own, not {sorted(hosts)}.", do="--hosts")

    def _refuse(self, plan: Plan) -> None:
        """Raises UserError where the run cannot go on by another plan."""
        claim = replan.PIPELINES if replan.cut(plan) else replan.CLAIM
        table.require_beside(self.job.resolved.recipe, plan, claim)

    def _where(self, option: replan.Replan, hosts: tuple[int, ...]) -> dict[str, Any]:
        """What a shape says of hosts. `hosts`: of each rank, where not all of them had one before."""
        run_plan.refuse_elsewhere(option.plan, None)
        return {}

    def _copies(self, made: Plan) -> bool:
        """Whether copies in memory serve that plan too."""
        now = self.job.plan
        return made.replicated and now.replicated and not (replan.cut(made) or replan.cut(now))

    def _offer(self, option: replan.Replan, hosts: tuple[int, ...] = ()) -> RunShape:
        made = option.plan
        before = len(self.job.plan.ranks)
        samples = ", ".join(str(rank.samples) for rank in made.trainer_ranks)
        work = f"{samples} samples each step"
        if replan.cut(made) or replan.cut(self.job.plan):
            work = replan.describe([made, self.job.plan])
        count = f"{len(made.ranks)} of {before}" if len(made.ranks) < before else f"all {len(made.ranks)}"
        shape = RunShape(
            task=self._start(replace(self.job, plan=made)),
            places=launch.places(made, self.job.folder.logs),
            previous_ranks=option.remaining,
            copies=self._copies(made),
            ratio=option.ratio,
            plan=_key(made),
            says=f"{count} ranks with {work}; by estimate a step takes {option.ratio:.2g} times as long",
            **self._where(option, hosts),
        )
        self._offered.append((shape, made))
        return shape

    def _request(self) -> Request:
        """What the planner is asked, as when the run was planned."""
        job = self.job
        asked = resolve_recipe.request(job.resolved, None, job.workload)
        from espalier.mechanisms.codecs import choice as codecs

        asked, _ = codecs.encoded(asked, job.cluster)
        return replace(asked, factors=measurements.calibration(job.resolved.recipe).factors)


class HostResizer(RunResizer):
    """Answers for a run over several hosts that has unequal pipelines or waves, or whose state is on optimizer nodes: a
    worker that is left out takes nothing with it, and who is slow stays. Has state as `RunResizer`, and the hosts as
    they are.

    Args:
        job, start: as there.
        hosts: of each rank, the number of its host.
        left: called with the number of a host and whether it has no rank any more, or ranks again.
    """

    def __init__(
        self,
        job: RunStart,
        start: Start,
        hosts: Sequence[int],
        left: Callable[[int, bool], None] = lambda host, out: None,
    ) -> None:
        super().__init__(job, start)
        self.hosts = tuple(hosts)
        self._left = left
        self._all = job.plan, self.hosts
        """The plan of all ranks, the last one there was, and the hosts of them."""
        self._seats = tuple(range(len(self.hosts)))
        """Which of all ranks each present one is."""
        self._coming: tuple[RunShape, tuple[int, ...]] | None = None

    def faster(self, evidence: Evidence) -> FasterShapes:
        """See `Resizer.faster`: of workers none."""
        return super().faster(evidence) if replan.cut(self.job.plan) else ([], {})

    def again(self, hosts: Collection[int]) -> RunShape:
        """See `Resizer.again`: with all ranks by the plan that they had, else by a new one."""
        (plan, homes), request, cluster = self._all, self._request(), self.job.cluster
        self._refuse(plan)
        seats = tuple(seat for seat, host in enumerate(homes) if seat in self._seats or host in hosts)
        whole = len(seats) == len(plan.ranks)
        made = plan if whole else replan.plan_on(request, cluster, plan, seats, replan.equal(plan))
        before = {seat: rank for rank, seat in enumerate(self._seats)}
        ranks = tuple(before.get(seat, -1) for seat in seats)
        shape = self._offer(
            replan.Replan(made, ranks, self._ratio(request, made)), tuple(homes[seat] for seat in seats)
        )
        self._coming = shape, seats
        return shape

    def adopt(self, shape: RunShape) -> None:
        super().adopt(shape)
        for host in sorted({*self.hosts} ^ {*shape.hosts}):
            self._left(host, host in self.hosts)
        joins = self._coming is not None and self._coming[0] is shape
        self._seats = (
            self._coming[1] if joins and self._coming else tuple(self._seats[rank] for rank in shape.previous_ranks)
        )
        self.hosts = shape.hosts
        self._coming = None
        if len(self._seats) == len(self._all[1]):
            self._all = self.job.plan, self.hosts

    def _refuse(self, plan: Plan) -> None:
        claim = replan.PIPELINES if replan.cut(plan) else replan.WORKERS
        table.require_beside(self.job.resolved.recipe, plan, claim)

    def _possible(self, option: replan.Replan) -> bool:
        return any(self.hosts[rank] == 0 for rank in option.remaining) and super()._possible(option)

    def _where(self, option: replan.Replan, hosts: tuple[int, ...]) -> dict[str, Any]:
        hosts = hosts or tuple(self.hosts[rank] for rank in option.remaining)
        if 0 not in hosts:
            raise UserError("The first host keeps the run's folder.", do="repair it and run the same command")
        message = plans.dumps(option.plan), hosts, self._copies(option.plan)
        return {"hosts": hosts, "encoded": msgspec.json.encode(message).decode()}


def heard(job: RunStart, start: Start, message: str) -> RunShape:
    """The shape that the first host has told (`RunShape.encoded`)."""
    text, hosts, copies = msgspec.json.decode(message, type=tuple[str, tuple[int, ...], bool])
    plan = plans.loads(text)
    task = start(replace(job, plan=plan))
    places = launch.places(plan)
    return RunShape(
        task, places, previous_ranks=(), copies=copies, ratio=1.0, plan="", says="", hosts=hosts, encoded=message
    )


def _key(plan: Plan) -> str:
    cuts = (f"{stage.pipeline}:{stage.layers[0]}-{stage.layers[1]}" for stage in plan.stages)
    states = (words for state in plan.choices.values() for words in state.cuts)
    return " ".join((*(f"{rank.share[0]}-{rank.share[1]}" for rank in plan.ranks), *cuts, *states))
