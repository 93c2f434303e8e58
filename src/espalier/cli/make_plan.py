"""`espalier.make_plan`: the plan that the verbs take, as a library call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from espalier.cli import measurements
from espalier.machine.cluster import Cluster
from espalier.mechanisms.disk_batches import drawn_batches
from espalier.plan.base import Plan
from espalier.plan.calibration import DATASHEET, Calibration
from espalier.plan.decide import decide
from espalier.plan.trials import Trials, key
from espalier.recipe import Auto, EveryStep, Sync, graphs
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches
from espalier.train import workload_registry
from espalier.train.library_request import asked, cluster_of


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
    where, sync = cluster_of(cluster), pins.pop("sync", None)
    request, recipe = asked(model, batch, precision, pins)
    if sync is not None:
        request = request.changed(sync=_sync(sync))
    if recipe is not None and graphs.is_open(recipe):
        folder = Path(model).absolute().parent if isinstance(model, str | Path) else None
        drawn = cast("Any", workload_registry.open_workload(workload_registry.Resolved(recipe, folder=folder))).drawn()

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
