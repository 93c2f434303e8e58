"""Elastic resize: carries out what `resilience` decides, fewer ranks after a loss or another plan.

After Acme (arXiv 2403.07648), section 6.1, which puts faulty nodes aside and starts again without them. Where we
deviate: the run goes on with fewer ranks where nothing stands ready, and what stays slow is planned anew too, but only
if the switch pays. Who plans is the caller's (`Resizer`): a launcher knows tasks and places, not models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from espalier.launch.resilience import replan_payoff
from espalier.launch.resilience.place_budget import Blame
from espalier.launch.resilience.replan_payoff import Payoff, Turns
from espalier.launch.resilience.slowdown import Evidence, Slowness
from espalier.recipe.errors import UserError
from espalier.train.failure import Failure, RestartDecision
from espalier.train.heartbeat import Sign
from espalier.train.rank_spec import Entrypoint, RankSpec


@dataclass(frozen=True)
class RunShape:
    """One way to run.

    Attributes:
        task, places: as `supervisor.run` takes them.
        previous_ranks: which rank of the shape before each rank is; -1: none, its host was left out before.
        copies: whether copies in memory of those ranks serve this shape as they are.
        ratio: its step as a multiple of the step before, by the cost model.
        plan: what tells it from others, the same text for the same decisions; says: it in words.
        hosts: of each rank, the number of its host, where there are several; encoded: what their supervisors need to
            make this shape themselves (`supervisor.RestartOptions.heard`).
    """

    task: Entrypoint
    places: Sequence[RankSpec]
    previous_ranks: tuple[int, ...]
    copies: bool
    ratio: float
    plan: str
    says: str
    hosts: tuple[int, ...] = ()
    encoded: str = ""


FasterShapes = tuple[list[RunShape], Mapping[int, float]]
"""Shapes, the fastest first; and by present rank, how many times as long as on the others its samples take."""


class Resizer(Protocol):
    """Who plans. All raise UserError where there is no plan, and nothing else."""

    @property
    def steps(self) -> int:
        """Of the whole run."""

    @property
    def plan(self) -> str:
        """The present shape, as `RunShape.plan`."""

    @property
    def planned_wait(self) -> float | None:
        """Seconds a step that ranks wait for exchanges by the present plan; None: not known."""

    @property
    def planned_work(self) -> Sequence[float]:
        """Of each rank that trains, what it computes in a step by the present plan, in any unit; empty: all as much."""

    def without(self, ranks: Collection[int]) -> RunShape:
        """The run without these of its present ranks, or without more of them."""

    def again(self, hosts: Collection[int]) -> RunShape:
        """The run with the ranks that these hosts had, which were left out, beside the present ones."""

    def faster(self, evidence: Evidence) -> FasterShapes:
        """Other shapes at measured speeds, the fastest first; and, by present rank, how many times as long as on the
        others its samples take."""

    def saving(self) -> float:
        """Seconds that the last checkpoint took; 0 where there was none."""

    def adopt(self, shape: RunShape) -> None:
        """The run goes on as `shape`."""


@dataclass(frozen=True)
class PlannedResize:
    """A decided change, of a run whose ranks still go on: what it goes on as, whether that pays, since when (seconds of
    `time.monotonic`), and why if not for what stays slow."""

    shape: RunShape
    verdict: Payoff
    at: float
    why: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """The numbers of the decision: seconds of a step as measured and as predicted, of the switch, and saved."""
        verdict = self.verdict
        return {"before": verdict.step, "predicted": verdict.then, "cost": verdict.cost, "gain": verdict.gain}


class Reshaping:
    """What a supervisor knows of changing shape. Has state: who is to blame, what stays slow, what switches took.

    Args:
        shapes: who plans; None: the run keeps its shape.
        tell: as `supervisor.RestartOptions.tell`.
    """

    def __init__(self, shapes: Resizer | None, tell: Callable[..., Any]) -> None:
        self.shapes = shapes
        self.tell = tell
        self.turn: PlannedResize | None = None
        """Set once ranks are to end for the sake of another plan."""
        self.blamed: int | None = None
        """The rank whose place is to blame for the last failure, after which nothing is started again."""
        self.work: Sequence[float] = ()
        """See `Resizer.planned_work`, of the attempt; empty also where nobody plans."""
        self._blame = Blame()
        self._turns = Turns()
        self._starting = 0.0
        self._begun = 0.0
        self._seats: list[int] = []
        self._refused: tuple[float, ...] | None = None
        self._declined: dict[int, str] = {}
        self._joined: dict[int, int] = {}
        self._slowness = Slowness()

    def begin(self, now: float, places: Sequence[RankSpec]) -> None:
        """An attempt starts at `now`."""
        self._begun = now
        self.turn = None
        self._refused = None
        self._seats = [place.seat for place in places]
        self.work = self.shapes.planned_work if self.shapes is not None else ()
        self._slowness = Slowness(self.shapes.planned_wait if self.shapes is not None else None, self.work)

    def took(self, shape: RunShape) -> None:
        """The next attempt is of `shape`."""
        if self.shapes is not None:
            self.shapes.adopt(shape)

    # --- after a loss ------------------------------------------------------------------------------------------------

    def after(self, failure: Failure, decision: RestartDecision) -> tuple[RestartDecision, RunShape | None]:
        """What becomes of `decision` where a place is to blame: the run without it, or why that cannot be had."""
        self._blame.take(failure)
        self.blamed = rank = self._blame.place() if len(self._seats) > 1 and not decision.restart else None
        if rank is None or self.shapes is None:
            return decision, None
        try:
            shape = self.shapes.without({rank})
        except UserError as error:
            why = f"{decision.why}; it cannot go on without rank {rank}: {error.what}"
            return replace(decision, why=why), None
        self._blame.given_up()
        why = f"{decision.why}, each time on rank {rank} (place {self._seats[rank]}), which is left out from now on"
        return RestartDecision(True, 0.0, f"{why}: {shape.says}"), shape

    # --- what stays slow ---------------------------------------------------------------------------------------------

    def compared(self, now: float, signs: Sequence[Sign]) -> PlannedResize | None:
        """One comparison of ranks that have all made steps. A turn to carry out, if one pays."""
        self._notice(signs)
        if self.shapes is None or self.turn is not None:
            return None
        evidence = self._slowness.take([sign.usual for sign in signs], [sign.waited for sign in signs])
        if evidence is None or (self._refused is not None and not replan_payoff.news(self._refused, _shown(evidence))):
            return None  # what did not pay then pays less now
        step = max(sign.step for sign in signs)
        self.turn = self._decided(now, step, evidence)
        return self.turn

    def _notice(self, signs: Sequence[Sign]) -> None:
        """How long this attempt took to begin."""
        self._starting = max(self._starting, max(sign.first for sign in signs) - self._begun)

    # --- what comes back ---------------------------------------------------------------------------------------------

    def joined(self, now: float, signs: Sequence[Sign], back: Mapping[int, str]) -> PlannedResize | None:
        """The turn to carry out for the sake of hosts that are `back` (number and name of each), if it pays. One that
        was taken in before and then lost must save four times as much each time. What does not pay now pays less later,
        so a host is asked about once."""
        self._notice(signs)
        self._declined = {host: name for host, name in self._declined.items() if host in back}
        if self.shapes is None or self.turn is not None or not {*back} - {*self._declined}:
            return None
        step = max(sign.step for sign in signs)
        usual = max(sign.usual for sign in signs)
        names = " and ".join(back.values())
        try:
            shape = self.shapes.again(back)
        except UserError as error:
            self._without(back, step, f"Host {names} is there again, and is left out: {error.what}")
            return None
        cost = (self._starting + self.shapes.saving()) * 4 ** max(self._joined.get(host, 0) for host in back)
        verdict = replan_payoff.weigh(usual, shape.ratio, self.shapes.steps - step, cost)
        if not verdict.worth:
            self._without(back, step, f"Host {names} is there again, which does not pay: {verdict}.")
            return None
        for host in back:
            self._joined[host] = self._joined.get(host, 0) + 1
        self.turn = PlannedResize(shape, verdict, now, f"host {names}, which was left out, is there again")
        return self.turn

    def _without(self, back: Mapping[int, str], step: int, what: str) -> None:
        self._declined = dict(back)
        self.tell("incident", kind="slow", what=what, step=step, action="none")

    # --- what stays slow ---------------------------------------------------------------------------------------------

    def _decided(self, now: float, step: int, evidence: Evidence) -> PlannedResize | None:
        assert self.shapes is not None
        try:
            shapes, speeds = self.shapes.faster(evidence)
        except UserError as error:
            self._stays(step, evidence, error.what)
            return None
        seats = {self._seats[rank]: value for rank, value in speeds.items()}
        cost = self._starting + self.shapes.saving()
        left = self.shapes.steps - step
        for shape in shapes:
            verdict = replan_payoff.weigh(evidence.step, shape.ratio, left, cost)
            if not verdict.worth:
                self._stays(step, evidence, f"the best other plan ({shape.says}) does not pay: {verdict}")
                return None
            if self._turns.allowed(now, (tuple(self._seats[rank] for rank in shape.previous_ranks), shape.plan), seats):
                self._turns.took(now, cost, (tuple(self._seats), self.shapes.plan), seats)
                return PlannedResize(shape, verdict, now)
        return None

    def _stays(self, step: int, evidence: Evidence, why: str) -> None:
        """Says why nothing is changed; not again until ranks show something else."""
        self._refused = _shown(evidence)
        self.tell("incident", kind="slow", what=f"The plan is kept: {why}.", step=step, action="none")


def _shown(evidence: Evidence) -> tuple[float, ...]:
    return (*evidence.busy, evidence.wait) if evidence.link else evidence.busy
