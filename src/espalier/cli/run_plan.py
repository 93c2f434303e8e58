"""New plans: of a run, with trials of real steps in real ranks, and `espalier.make_plan`.

Both are decided by `plan.decide`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from espalier.cli import measurements, resolve_recipe
from espalier.kernels import accelerator
from espalier.machine.cluster import Cluster
from espalier.machine.probe import BUSY
from espalier.parallel.workload import Workload
from espalier.plan import decision_cache
from espalier.plan.base import Plan
from espalier.plan.calibration import DATASHEET, Calibration
from espalier.recipe import Auto, EveryStep, Sync, graphs
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches
from espalier.recipe.terminal import say_progress
from espalier.recipe.units import show_seconds
from espalier.track.progress import waiting
from espalier.track.startup import STARTUP
from espalier.train import version_check, workload_registry
from espalier.train.rank_setup import RankSetup
from espalier.train.workload_registry import Resolved

if TYPE_CHECKING:
    from espalier.mechanisms.disk_batches.state import DiskBatchesState
    from espalier.plan.trials import Trials

PRECISION = "on GPUs the fastest of what they compute fast; on processors fp32, or bf16 where measured steps are faster"
"""Why `train.precision` is what its plan has."""

LONG_STEP = 5.0
"""Of a predicted step, above which it is said that one is tried: a trial takes several."""


def batches_of(plan: Plan) -> Batches | None:
    """What steps of a plan train on, where the recipe left that open."""
    state: DiskBatchesState | None = plan.choices.get("disk_batches")
    return None if state is None else state.batches


def batches(
    resolved: Resolved,
    workload: Workload,
    planned: Callable[[Resolved, Workload], Plan],
    trials: Callable[[Resolved, Workload], Trials | None],
) -> tuple[Batches, str]:
    """What steps train on, and why, of a recipe that leaves it open and was opened with the whole graph (`workload`).
    `planned`, `trials`: the plan of a recipe that does not, and what steps of it take here."""
    opened = cache(partial(with_batches, resolved, workload))

    def tried(chosen: Batches, plan: Plan) -> float | None:
        from espalier.plan.trials import key

        steps = trials(*opened(chosen))
        return None if steps is None else steps.of([plan]).get(key(plan))

    from espalier.mechanisms.disk_batches import drawn_batches

    drawn = cast("Any", workload).drawn()
    return drawn_batches.choose(resolved.recipe, drawn, lambda chosen: planned(*opened(chosen)), tried)


def with_batches(resolved: Resolved, workload: Workload, chosen: Batches | None) -> tuple[Resolved, Workload]:
    """The recipe and its workload as `chosen`, of a recipe that leaves it open."""
    if chosen is None or not graphs.is_open(resolved.recipe):
        return resolved, workload
    resolved = replace(resolved, recipe=graphs.with_batches(resolved.recipe, chosen))
    return resolved, workload_registry.open_workload(resolved, waiting) if chosen.fanout else workload


def with_chosen(plan: Plan, chosen: Batches | None, why: str = "") -> Plan:
    """The plan with what steps train on, and why; where the recipe says it, the plan says nothing of it."""
    if chosen is None:
        states = plan.choices.items()
        return plan.changed(choices={name: state for name, state in states if not getattr(state, "batches", None)})
    from espalier.mechanisms.disk_batches import drawn_batches

    return drawn_batches.told(plan, chosen, why)


def choose(resolved: Resolved, workload: Workload, cluster: Cluster, world: int | None = None) -> Plan:
    """The plan for this recipe on these machines; with `world`, for exactly that many ranks. Raises UserError."""
    pinned = resolved.recipe.plan.pin.ranks
    if world is not None and pinned not in (None, world):
        raise UserError(
            f"plan.pin.ranks = {pinned}, but {world} ranks were started.",
            do=f"start {pinned} ranks, or leave plan.pin.ranks out",
        )

    trials = trials_of(resolved, workload, cluster, world)
    request = resolve_recipe.request(resolved, world, workload)
    calibration = measurements.calibration(resolved.recipe)
    code = f"{version_check.code()} torch {torch.__version__}"
    if trials is not None:
        code += f", trials for {resolved.recipe.train.steps} steps"
    key = partial(decision_cache.key, request, cluster, calibration, code)
    again = trials is not None and trials.doubtful()
    plan = None if again else decision_cache.read(key(None if trials is None else trials.known()))
    if plan is None:
        from espalier.plan.decide import decide

        decision = decide(request, cluster, calibration, trials)
        plan = decision.taken
        if trials is not None and trials.load > BUSY:
            what = f"other programs used {trials.load:.1f} cores while steps were tried"
            say_progress(f"Note: {what}: they are tried again when these have ended.")
        # Trials that ran decide the same for whoever asks next.
        if not decision.cut_off:
            decision_cache.keep(key(None if trials is None else trials.known()), plan)
    STARTUP.ended("Planning")
    return plan


def trials_of(resolved: Resolved, workload: Workload, cluster: Cluster, world: int | None = None) -> Trials | None:
    """Trials of real steps in real ranks of this machine; None where ranks are there already, or none are wanted."""

    def run(plan: Plan, fastest: float) -> float:
        foreseen = 0.0 if plan.predicted is None else plan.predicted.step_seconds
        if foreseen > LONG_STEP:
            say_progress(f"trying steps of {show_seconds(foreseen)} with {key(plan)}")
        return _seconds(plan, resolved, workload, fastest)

    if world is not None or not resolved.recipe.plan.trial:
        return None
    from espalier.plan.trials import Trials, key

    return Trials(resolved.recipe, cluster, run, workload.phases()[0].start, _here)


def _gpus(plan: Plan) -> set[str]:
    """The names of the GPUs that a machine needs."""
    return {rank.device for rank in plan.ranks if rank.device != "cpu"}


def _here(plan: Plan) -> bool:
    """Whether this machine has what the plan needs. Ranks on GPUs are tried as those on processors are: a step ends
    when its loss was read, so that the clock needs no synchronization."""
    wanted = _gpus(plan)
    return all(rank.node == 0 for rank in plan.ranks) and len(wanted) <= (accelerator.count() if wanted else 0)


def _seconds(plan: Plan, resolved: Resolved, workload: Workload, fastest: float) -> float:
    """Seconds per step of `plan`, from real steps in real ranks; `fastest`: of other plans. What it takes is loaded
    here: `plan` does without."""
    from espalier.launch.ranks import agent
    from espalier.plan.trials import HOPELESS, LEAST
    from espalier.train import rank_spec as launch
    from espalier.train import worker

    def task(place: launch.RankSpec) -> float:
        return worker.trial(RankSetup(resolved.recipe, plan, workload, place), LEAST, HOPELESS * fastest)

    worker.warm(plan)
    return max(agent.run(task, launch.places(plan)))


def refuse_elsewhere(plan: Plan, world: int | None) -> None:
    """Raises UserError when this machine has not what `plan` needs. With `world`, its ranks are started by others."""
    gpus = accelerator.count()
    wanted = _gpus(plan)
    elsewhere = max(rank.node for rank in plan.ranks) if world is None else 0
    if elsewhere or (world is None and len(wanted) > gpus) or (wanted and not gpus):
        raise UserError(
            f"The plan is for other machines: {elsewhere + 1} with {len(wanted)} GPUs each; this one has {gpus}.",
            do="leave plan.cluster out to train here, or start the ranks there with torchrun",
        )


# --- as a library call -----------------------------------------------------------------------------------------------


def make_plan(
    model: Any,
    cluster: Cluster | str | Path,
    *,
    batch: int | None = None,
    precision: str = "fp32",
    calibration: Calibration | None = None,
    **pins: Any,
) -> Plan:
    """The plan for a model on a cluster; of a recipe the one that `espalier plan` shows and `espalier train` takes.

    Args:
        model: a recipe (or its path), or any `nn.Module`; of a bare module only its parameters are known.
        cluster: or the path of a cluster file.
        batch: samples per step; a recipe says its own.
        precision: of a bare module; a recipe says its own.
        calibration: what measurements say of the coefficients; None: what the recipe names (a file or a
            run's folder), else datasheets.
        pins: decisions already taken, by the names of a plan's layout: `dp=8`, `shard={"optimizer": 8}`, …; and `sync`,
            when replicas agree: by default as the recipe says, and of a module `"auto"`, which is by rounds where links
            between machines leave little else (`"every_step"`, or a `Co2(…)` of
            `espalier.mechanisms.local_rounds.options`).

    Returns:
        The plan.

    Raises:
        UserError: a pin is not known or cannot be met, or nothing fits in memory (exit code 2 on the command line).
    """
    from espalier.plan.decide import decide
    from espalier.plan.trials import Trials, key
    from espalier.train.library_request import asked, cluster_of

    where = cluster_of(cluster)
    sync = pins.pop("sync", None)
    request, recipe = asked(model, batch, precision, pins)
    if sync is not None:
        request = request.changed(sync=_sync(sync))
    if recipe is not None and graphs.is_open(recipe):
        from espalier.mechanisms.disk_batches import drawn_batches

        folder = Path(model).absolute().parent if isinstance(model, str | Path) else None
        drawn = cast("Any", workload_registry.open_workload(Resolved(recipe, folder=folder))).drawn()

        def planned(batches: Batches) -> Plan:
            settled = graphs.with_batches(recipe, batches)
            return make_plan(settled, where, batch=batch, calibration=calibration, sync=sync, **pins)

        def tried(batches: Batches, plan: Plan) -> float | None:
            return Trials(graphs.with_batches(recipe, batches), where).of([plan]).get(key(plan))

        chosen, why = drawn_batches.choose(recipe, drawn, planned, tried)
        return drawn_batches.told(planned(chosen), chosen, why)
    known = calibration or (DATASHEET if recipe is None else measurements.calibration(recipe))
    decision = decide(request, where, known, None if recipe is None else Trials(recipe, where))
    if not decision.fits:
        raise decision.refusal()
    return decision.plan


def _sync(given: Any) -> Sync:
    known: dict[str, Sync] = {"auto": Auto(), "every_step": EveryStep()}
    choice = known.get(given) if isinstance(given, str) else given
    if not isinstance(choice, Sync):
        raise UserError(
            f"sync = {given!r} is not possible.",
            do='"auto", "every_step", or espalier.mechanisms.local_rounds.options.Co2(…)',
        )
    return choice
