"""Steps that candidates of a recipe's plan took on this machine: measured once, kept, and read by whoever plans."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from espalier.machine import cluster as clusters
from espalier.machine import probe, resource_limits
from espalier.plan.base import Plan, RunnerUp
from espalier.plan.explain import slower
from espalier.recipe import Recipe, recipe_file
from espalier.recipe.cache_dir import cache_folder, hashed, replace, table
from espalier.recipe.units import plural, show_seconds
from espalier.track.startup import STARTUP


class Key(NamedTuple):
    """What a trial is of.

    Attributes:
        threads: of each rank.
        cut: how the model is cut and states are split, in words; empty: every rank has all of it.
    """

    ranks: int
    threads: int
    micro_batch: int
    cut: str = ""
    recompute: str = "none"
    precision: str = "fp32"

    def __str__(self) -> str:
        cut = f"{self.cut}, " if self.cut else ""
        cut += f"{self.precision}, " if self.precision != "fp32" else ""
        divided = f"{plural(self.ranks, 'rank')} x {plural(self.threads, 'thread')}"
        return f"{divided}, {cut}micro-batch {self.micro_batch}"


Measured = Mapping[Key, float]
"""Seconds of a step in trials."""
LOAD = "/load"
"""Ends the name under which is kept how many cores other programs used meanwhile."""
ROUNDS = 2
"""How often each candidate runs, in turn with the others, so that the machine's mood strikes all alike."""
SHARE = 0.1
"""Of the run as it is predicted, which all trials of its plan may take."""
LEAST, STEPS = 0.6, 3
"""Seconds and steps that a trial takes at least."""
HOPELESS = 2.0
"""So many times slower than the fastest: a trial ends after its first steps, and there is no other."""


@dataclass(frozen=True)
class Trials:
    """Trials of one recipe on one cluster.

    `run`: seconds of a step of a plan, measured now, given those of the fastest so far; None: only what was measured
    before counts. `is_local`: whether all ranks of a plan can run on this machine. `phase`: the first step of the phase
    that is planned, as a model may change its shape on the way. `spent`: seconds of each trial so far.
    """

    recipe: Recipe
    cluster: clusters.Cluster
    run: Callable[[Plan, float], float] | None = None
    phase: int = 0
    is_local: Callable[[Plan], bool] = lambda plan: all(rank.device == "cpu" and rank.node == 0 for rank in plan.ranks)
    spent: list[float] = field(default_factory=list)

    def __call__(self, plans: Sequence[Plan]) -> dict[Key, float]:
        """Seconds of a step of those of `plans` that were tried; empty where they cannot be here, or fewer than two
        were."""
        measured = self.of(plans) if len(plans) > 1 else {}
        return measured if len(measured) > 1 else {}

    def of(self, plans: Sequence[Plan]) -> dict[Key, float]:
        """The same of any number: one is compared with that of another recipe."""
        if not (self.recipe.plan.trial and all(map(self.is_local, plans))):
            return {}
        file = cache_folder() / "trials.json"
        known = table(file)
        asked = self._asked()
        names = {key(plan): f"{asked}/{key(plan)}/{plan.recompute}/{plan.precision}" for plan in plans}
        due = self.run is not None and (any(name not in known for name in names.values()) or self.doubtful())
        plans = sorted(plans, key=lambda plan: plan.step_seconds)
        if due and self._allows(plans[0], 2):
            STARTUP.ended("Searching plans")
            load = resource_limits.busy(probe.LOOK_SECONDS)
            tried = {names[name]: seconds for name, seconds in self._tried(plans).items()}
            load = round(max(load, resource_limits.busy(probe.LOOK_SECONDS)), 2)
            for name, seconds in tried.items():
                known[name] = min(seconds, known.get(name, seconds))
                known[name + LOAD] = min(load, known.get(name + LOAD, load))
            file.parent.mkdir(parents=True, exist_ok=True)
            replace(file, json.dumps(known, indent=1))
            STARTUP.ended(f"Trying {len(tried)} of {plural(len(plans), 'plan')}")
        return {candidate: known[name] for candidate, name in names.items() if name in known}

    def _tried(self, plans: list[Plan]) -> dict[Key, float]:
        """Seconds of a step of each of `plans`, in turn, as far as time allows: of two at least."""
        assert self.run is not None
        measured: dict[Key, float] = {}
        for plan in plans * ROUNDS:
            fastest, before = min(measured.values(), default=math.inf), measured.get(key(plan), math.inf)
            if HOPELESS * fastest < before < math.inf:
                continue
            if len(measured) > 1 and not self._allows(plan):
                break
            began = time.monotonic()
            measured[key(plan)] = min(before, self.run(plan, fastest))
            self.spent.append(time.monotonic() - began)
        return measured

    def _allows(self, plan: Plan, count: int = 1) -> bool:
        """Whether `count` trials more, of plans like `plan`, and all so far take no more than SHARE of the run.
        After the first no, none is."""
        step = plan.step_seconds
        cost = sum(self.spent) + count * max(LEAST, STEPS * step, *self.spent[-1:])
        allowed = not step or cost <= SHARE * step * (self.recipe.train.steps or math.inf)
        if not allowed:
            self.spent.append(math.inf)
        return allowed

    def known(self) -> dict[str, float]:
        """What was measured so far of this recipe's candidates on this cluster, and under which load."""
        asked = self._asked()
        return {
            name: seconds for name, seconds in table(cache_folder() / "trials.json").items() if name.startswith(asked)
        }

    @property
    def load(self) -> float:
        """Cores that other programs used while candidates were measured, at most."""
        return max((load for name, load in self.known().items() if name.endswith(LOAD)), default=0.0)

    def doubtful(self) -> bool:
        """Whether the machine was busy when they were measured, and is not now."""
        return self.load > probe.BUSY and resource_limits.busy(probe.LOOK_SECONDS) <= probe.BUSY

    def forget(self) -> bool:
        """Has the candidates measured anew when they are planned the next time, as steps took another time; whether
        any was measured."""
        file = cache_folder() / "trials.json"
        old = self.known()
        if old:
            replace(
                file, json.dumps({name: seconds for name, seconds in table(file).items() if name not in old}, indent=1)
            )
        return bool(old)

    def _asked(self) -> str:
        """Says everything that the speed of a plan depends on, besides the plan."""
        recipe = recipe_file.to_table(self.recipe)
        asked = {name: recipe[name] for name in ("model", "comm")} | {
            name: recipe["train"].get(name) for name in ("sequence", "batch_tokens", "compile", "optimizer")
        }
        if self.phase:
            asked["phase"] = self.phase
        if "graph" in recipe:
            asked |= {name: recipe[name] for name in ("graph", "data")}
        return hashed([clusters.dumps(self.cluster), asked])


def key(plan: Plan) -> Key:
    """What a trial of `plan` is of."""
    cut = ", ".join((*plan.layout.cut, *plan.layout.split))
    return Key(len(plan.ranks), plan.ranks[0].threads, plan.micro_batch, cut, plan.recompute, plan.precision)


def sentence(plans: Sequence[Plan], measured: Measured) -> str:
    """What the trials took, fastest first."""
    ordered = sorted((plan for plan in plans if key(plan) in measured), key=lambda plan: measured[key(plan)])
    each = [f"{name}: {show_seconds(measured[name])}" for name in map(key, ordered)]
    return f"Measured steps: {'; '.join(each)}."


def runner_up(plan: Plan, best: Plan, measured: Measured) -> RunnerUp:
    """A plan that was tried beside the one that is taken."""
    assert plan.predicted is not None
    there = measured[key(plan)]
    return RunnerUp(
        layout=plan.layout,
        ranks=len(plan.ranks),
        threads=plan.ranks[0].threads,
        step_seconds=there,
        peak_bytes=plan.predicted.memory_bytes["peak"],
        loses=f"{slower(there, measured[key(best)])} (measured {show_seconds(there)})",
    )
