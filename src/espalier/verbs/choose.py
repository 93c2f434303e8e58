"""Chooses a run's plan: the best that the search finds and `train` can run.

On a CPU, whether one rank of N threads or N ranks of one thread is faster depends on the model's sizes in ways that no
short formula catches, so the candidates run a few real steps; what was measured is kept for the next run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from espalier import cluster as clusters
from espalier import run as runs
from espalier import units
from espalier.config import Auto, ByRounds, Eager, load
from espalier.errors import UserError
from espalier.folders import cache_folder
from espalier.plan import base as plans
from espalier.plan import chosen, co2, reasons, refusals, saving, search, uniform
from espalier.plan.calibrate import Calibration
from espalier.plan.request import Request
from espalier.plan.seats import gpus
from espalier.verbs import crossing, ready
from espalier.workload import Workload

TRIAL_SECONDS, ROUNDS = 1.0, 2
"""How long each candidate runs in each round, warm-up not counted."""

Measured = dict[tuple[int, int], float]


def choose(
    resolved: ready.Resolved, workload: Workload, cluster: clusters.Cluster, world: int | None = None
) -> plans.Plan:
    """The plan for this recipe on these machines; with `world`, for exactly that many ranks. Raises UserError."""
    pinned = resolved.recipe.plan.pin.ranks
    if world is not None and pinned not in (None, world):
        raise UserError(
            f"plan.pin.ranks = {pinned}, but {world} ranks were started.",
            do=f"start {pinned} ranks, or leave plan.pin.ranks out",
        )
    request = ready.request(resolved, world, ready.resident(), workload)

    def trials() -> Measured:
        candidates = uniform.candidates(request, cluster)
        if world is None and _worth_trying(candidates, resolved):
            return _measured(candidates, resolved, workload, cluster)
        return {}

    decision = decide(request, cluster, ready.calibration(resolved.recipe), trials)
    if decision.taken is None:
        raise decision.refusal()
    return saving.paced(decision.taken, resolved.recipe.checkpoint.every, cluster)


@dataclass(frozen=True)
class Decision:
    """What the search found, the best plan of all, and the best that `espalier train` runs today (None: there is none).

    `best` does not fit either when `fits` is False: it is then the one that lacks the fewest bytes.
    """

    request: Request
    cluster: clusters.Cluster
    found: search.Found
    best: plans.Plan
    taken: plans.Plan | None
    fits: bool

    def refusal(self) -> UserError:
        """Why there is nothing to train with."""
        if not self.fits:
            return refusals.refusal(self.request, self.cluster, self.found)
        layout = self.best.layout
        return reasons.DoesNotFit(
            "No plan that `train` can run today fits in memory.",
            why=f"the best plan is not executable yet, as {self.best.missing} is missing",
            do=f"espalier plan shows it ({layout.algorithm}, dp {layout.dp}, tp {layout.tp}, sp {layout.sp}, "
            f"pp {layout.pp}, shard {'/'.join(map(str, layout.shard.values()))}); a smaller model or batch runs today",
        )


def decide(
    request: Request, cluster: clusters.Cluster, calibration: Calibration, trials: Callable[[], Measured]
) -> Decision:
    """Searches all layouts; on processors `trials` (called when there is a choice) settle ranks and threads. Where
    replicas are to agree by rounds, each is planned by itself."""
    if isinstance(request.sync, ByRounds):
        return _by_rounds(request, cluster, calibration, request.sync)
    found = _every_step(request, cluster, calibration, trials)
    if isinstance(request.sync, Auto) and cluster.machines > 1 and found.taken is not None and found.fits:
        return _if_rounds_pay(found, request, cluster, calibration)
    return found


def _if_rounds_pay(found: Decision, request: Request, cluster: clusters.Cluster, calibration: Calibration) -> Decision:
    """Rounds instead, where the links between machines leave little else."""
    assert found.taken is not None
    try:
        made = co2.cut(request, cluster, Eager())
        options = co2.instead(found.taken, _apart(made, calibration))
        return found if options is None else _by_rounds(request, cluster, calibration, options)
    except UserError:
        return found  # pins, batches or memory that rounds cannot have: they were not asked for


def _apart(made: co2.Cut, calibration: Calibration) -> list[plans.Plan]:
    """A plan of each replica by itself, made once for equal ones. Raises UserError when one cannot be had."""
    known: dict[str, plans.Plan] = {}
    found = []
    for one in made.clusters:
        name = clusters.dumps(one)
        if name not in known:
            known[name] = _alone(made.request, one, calibration)
        found.append(known[name])
    return found


def _alone(request: Request, cluster: clusters.Cluster, calibration: Calibration) -> plans.Plan:
    decision = _every_step(request, cluster, calibration, dict)
    if decision.taken is not None and not co2.whole(decision.taken):
        ranks = len(decision.taken.ranks)
        decision = _every_step(co2.sharded(request, ranks), cluster, calibration, dict)
    if decision.taken is None:
        raise decision.refusal()
    return decision.taken


def _by_rounds(request: Request, cluster: clusters.Cluster, calibration: Calibration, options: ByRounds) -> Decision:
    made = co2.cut(request, cluster, options)
    parts = _apart(made, calibration)
    counts = sorted({len(part.ranks) for part in parts})
    if len(counts) > 1:
        raise UserError(
            f"Replicas of {' and '.join(map(str, counts))} ranks cannot agree by rounds.",
            why="each rank sends what it owns to its like in the other replicas",
            do=f"plan.pin.ranks={made.count * counts[0]}",
        )
    step = min(part.predicted.step_seconds if part.predicted else 1.0 for part in parts)
    chosen = co2.round_of(options, made, step, 4.0 * request.trainable)
    plan = co2.join(parts, made, chosen, options)
    return Decision(request, cluster, search.Found((), None, 0, 0.0), plan, plan, True)


def _every_step(
    request: Request, cluster: clusters.Cluster, calibration: Calibration, trials: Callable[[], Measured]
) -> Decision:
    request, told = crossing.encoded(request, cluster)
    request = replace(request, factors=calibration.factors, remarks=(*request.remarks, *told, *reasons.ring(cluster)))
    found = _decided(request, cluster, calibration, trials)
    if not request.remarks:
        return found
    best, taken = (
        None if plan is None else msgspec.structs.replace(plan, why=(*plan.why, *request.remarks))
        for plan in (found.best, found.taken)
    )
    assert best is not None
    return replace(found, best=best, taken=best if found.taken is found.best else taken)


def _decided(
    request: Request, cluster: clusters.Cluster, calibration: Calibration, trials: Callable[[], Measured]
) -> Decision:
    refusals.check_pins(request, cluster)
    if not gpus(cluster):
        reasons.check(request, cluster)
    found = search.search(request, cluster, calibration)
    option, runs = found.best(), found.best(chosen.executable)
    if option is None:
        if found.closest is None:
            raise refusals.refusal(request, cluster, found)
        best = msgspec.structs.replace(chosen.make(request, found, found.closest, calibration), executable=False)
        lacks = f"{units.show_size(found.closest.over)} of memory per rank"
        return Decision(request, cluster, found, msgspec.structs.replace(best, missing=lacks), None, False)
    taken = None
    if runs is not None:
        taken = chosen.make(request, found, runs, calibration)
        if not gpus(cluster) and _replicated(request, cluster, found, runs):
            measured = trials()
            taken = uniform.plan(request, cluster, measured)
            if taken.predicted is not None and not measured:
                spread = msgspec.structs.replace(taken.predicted, spread=calibration.spread)
                taken = msgspec.structs.replace(taken, predicted=spread)
    if taken is not None and runs is not None and runs.seconds <= found.options[0].seconds * (1 + found.tie):
        return Decision(request, cluster, found, taken, taken, True)
    best = chosen.make(request, found, option, calibration)
    if taken is not None and runs is not None:
        best, taken = _told_apart(best, taken, option, runs)
    return Decision(request, cluster, found, best, taken, True)


def _replicated(request: Request, cluster: clusters.Cluster, found: search.Found, runs: search.Option) -> bool:
    """Whether the plain planner and its trials decide: on one machine wherever whole states fit (what
    sharding gains there is less than what an estimate is wrong by), on several when the search finds its like."""
    free = request.pin.shard is None and request.redundancy == 1
    if free and len(cluster.devices()) == 1:
        return found.best(lambda one: chosen.executable(one) and one.layout.optimizer == 1) is not None
    return runs.layout.optimizer == 1 and runs.cluster is cluster and runs.shares is None


def _told_apart(
    best: plans.Plan, taken: plans.Plan, option: search.Option, runs: search.Option
) -> tuple[plans.Plan, plans.Plan]:
    """Both plans, each saying what the other is."""
    slower = runs.seconds / option.seconds - 1
    here = f"`train` takes {chosen.label(runs.layout)} today, {slower:.0%} slower by estimate."
    there = (
        f"A better plan is not executable yet: {chosen.label(option.layout)}, "
        f"{units.show_seconds(option.seconds)} per step by estimate, {1 - option.seconds / runs.seconds:.0%} less; "
        f"it needs {best.missing}."
    )
    return (
        msgspec.structs.replace(best, why=(*best.why, here)),
        msgspec.structs.replace(taken, why=(*taken.why, there)),
    )


def refuse_elsewhere(plan: plans.Plan, world: int | None) -> None:
    """Raises UserError when this machine has not what `plan` needs. With `world`, its ranks are started by others."""
    if not plan.executable:
        raise UserError(
            f"`train` cannot run this plan: {plan.missing}.", do="espalier plan answers for it all the same"
        )
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = {rank.device for rank in plan.ranks if rank.device.startswith("cuda")}
    elsewhere = max(rank.node for rank in plan.ranks) if world is None else 0
    if elsewhere or (world is None and len(wanted) > here) or (wanted and not here):
        raise UserError(
            f"The plan is for other machines: {elsewhere + 1} with {len(wanted)} GPUs each; this one has {here}.",
            do="leave plan.cluster out to train here, or start the ranks there with torchrun",
        )


def _worth_trying(candidates: list[plans.Plan], resolved: ready.Resolved) -> bool:
    local_cpu = all(rank.device == "cpu" and rank.node == 0 for plan in candidates for rank in plan.ranks)
    return resolved.recipe.plan.trial and local_cpu and len(_first_of_each(candidates)) > 1


def _first_of_each(candidates: list[plans.Plan]) -> Mapping[tuple[int, int], plans.Plan]:
    """The best candidate for each (ranks, threads); candidates come best first."""
    found: dict[tuple[int, int], plans.Plan] = {}
    for plan in candidates:
        found.setdefault((len(plan.ranks), plan.ranks[0].threads), plan)
    return found


def tried_before(request: Request, resolved: ready.Resolved, cluster: clusters.Cluster) -> Measured:
    """What trials of this recipe on these machines have measured already; runs nothing."""
    known = _read(cache_folder() / "trials.json")
    named = _trials(uniform.candidates(request, cluster), resolved, cluster)
    return {key: known[name] for key, (name, _) in named.items() if name in known}


def _measured(
    candidates: list[plans.Plan], resolved: ready.Resolved, workload: Workload, cluster: clusters.Cluster
) -> Measured:
    file = cache_folder() / "trials.json"
    known = _read(file)
    named = _trials(candidates, resolved, cluster)
    if any(name not in known for name, _ in named.values()):
        # In turn and the better of each, so that the machine's mood strikes all alike.
        rounds = [{name: _try(plan, resolved, workload) for name, plan in named.values()} for _ in range(ROUNDS)]
        known |= {name: min(one[name] for one in rounds) for name, _ in named.values()}
        _write(file, known)
    return {key: known[name] for key, (name, _) in named.items()}


def _trials(
    candidates: list[plans.Plan], resolved: ready.Resolved, cluster: clusters.Cluster
) -> dict[tuple[int, int], tuple[str, plans.Plan]]:
    """The plans to be tried, each under a name that says everything its speed depends on."""
    table = load.to_table(resolved.recipe)
    asked = {key: table[key] for key in ("model", "comm")} | {
        key: table["train"].get(key) for key in ("sequence", "batch_tokens", "precision", "compile", "optimizer")
    }
    if "graph" in table:
        asked |= {key: table[key] for key in ("graph", "data")}
    key = runs.hashed([clusters.dumps(cluster), asked])
    return {
        (ranks, threads): (f"{key}/{ranks}x{threads}/{plan.micro_batch}/{plan.recompute}", plan)
        for (ranks, threads), plan in _first_of_each(candidates).items()
    }


def _try(plan: plans.Plan, resolved: ready.Resolved, workload: Workload) -> float:
    """Seconds per step of `plan`, from real steps in real ranks. What it takes is loaded here: `plan` does without."""
    from espalier import rank, trainer
    from espalier.launch import base as launch
    from espalier.launch import local

    def task(place: launch.Place) -> float:
        return rank.trial(trainer.Setting(resolved.recipe, plan, workload, place), TRIAL_SECONDS)

    return max(local.run(task, launch.places(plan)))


def _read(file: Path) -> dict[str, float]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, known: Mapping[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    runs.replace(file, json.dumps(dict(known), indent=1))
