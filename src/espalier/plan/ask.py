"""Ask: what a planner is asked, on what, and by which measurements; and what it decides. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.machine.cluster import Cluster
from espalier.plan.base import Plan
from espalier.plan.calibration import DATASHEET, Calibration
from espalier.plan.request import Request
from espalier.plan.search import SearchResult
from espalier.recipe.errors import UserError

Trials = Callable[[Sequence[Plan]], Mapping[Any, float]]
"""Seconds of a step of each plan, measured; empty where nothing was."""


@dataclass(frozen=True)
class Ask:
    """A question to the planner.

    Attributes:
        calibration: what measurements say of the coefficients.
        trials: what settles ranks, threads and micro-batch of a processor, and between cut plans;
            None: estimates do.
        below: seconds of a step that is there already: on many ranks only what may be faster is searched.
    """

    request: Request
    cluster: Cluster
    calibration: Calibration = DATASHEET
    trials: Trials | None = None
    below: float = math.inf

    def changed(self, **changes: Any) -> Ask:
        """The same question of another request."""
        return replace(self, request=self.request.changed(**changes))


@dataclass(frozen=True)
class PlanDecision:
    """What the search found, and the plan.

    Attributes:
        plan: the best, or where `fits` is False the one that lacks the fewest bytes.
        finished: every choice has added what it adds.
        cut_off: the search stopped before its end, as `plan.seconds` were over.
        refuse: why nothing fits, of request, cluster and what the search found; None: the plan fits.
    """

    request: Request
    cluster: Cluster
    search_result: SearchResult
    plan: Plan
    fits: bool = True
    finished: bool = False
    cut_off: bool = False
    refuse: Callable[[Request, Cluster, SearchResult], UserError] | None = None

    @property
    def taken(self) -> Plan:
        """The plan, if it can be trained. Raises UserError: see `refusal`."""
        if not self.fits:
            raise self.refusal()
        return self.plan

    def changed(self, **changes: Any) -> PlanDecision:
        """The same decision with another plan."""
        return replace(self, plan=self.plan.changed(**changes))

    def refusal(self) -> UserError:
        """Why there is nothing to train with."""
        assert self.refuse is not None
        return self.refuse(self.request, self.cluster, self.search_result)
