"""`espalier plan RECIPE [--cluster FILE]`: how the recipe would run, what it would cost, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from espalier.cli import measurements, printing, run_plan, split_runs
from espalier.cli.resolve_recipe import machines, request, resolve
from espalier.machine.cluster import Cluster, whatif
from espalier.parallel.workload import Workload
from espalier.plan import base as plans
from espalier.plan import explain, search
from espalier.plan.ask import PlanDecision
from espalier.plan.collective_time import gpus
from espalier.plan.decide import decide
from espalier.plan.layouts import view
from espalier.plan.request import AUTO
from espalier.plan.trials import Trials
from espalier.recipe import Recipe, graphs, model_kinds, recipe_errors
from espalier.recipe.base import Derivation
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import say
from espalier.track.progress import waiting
from espalier.train import workload_registry
from espalier.train.workload_registry import Resolved
from espalier.train.workload_row import CutsIntoParts


def run(arguments: argparse.Namespace) -> int:
    """Prints the best plan; allocates no model and starts no rank. When none fits: that, what would help, the closest
    plan, and exit code 2."""
    torch.set_num_threads(1)
    if arguments.score is not None:
        return _score(arguments)
    if arguments.recipe is None:
        raise UserError("espalier plan needs a recipe.", do="espalier plan recipe.toml, or --score FILE")
    if arguments.out is not None:
        raise UserError("--out goes with --score.", do="--html FILE for the picture, --json > plan.json for the plan")
    resolved = resolve(arguments.recipe, arguments.overrides)
    cluster = machines(resolved.recipe, arguments.cluster)
    splits = split_runs.count(resolved)
    decision = decided(resolved, cluster, arguments.calibrate_on)
    if arguments.parts is not None:
        _write_parts(arguments, resolved, decision)
    changed, lines = _what_if(arguments, resolved, cluster, decision.plan)
    if arguments.html is not None:
        _page(arguments.html, decision, resolved.recipe, lines, splits)
    refusal = None if decision.fits else decision.refusal()
    if arguments.json:
        print(plans.dumps(decision.plan, **changed), end="", flush=True)
        if refusal is not None:
            say(f"espalier: {refusal}", file=sys.stderr)  # standard output holds one object, the plan
    else:
        _tell(resolved, decision.plan, [*lines, *([f"{refusal}\n"] if refusal else [])], splits)
        if arguments.sources:
            printing.sources(decision.plan)
    return 0 if refusal is None else refusal.exit_code


def _score(arguments: argparse.Namespace) -> int:
    for name in ("recipe", "--html", "--cluster", "--what-if", "--parts", "--sources"):
        if getattr(arguments, name.strip("-").replace("-", "_")):
            raise UserError(f"--score takes no {name}.", do="give one or the other")
    return measurements.run(arguments.score, arguments.calibrate_on, arguments.out, arguments.json)


def decided(
    resolved: Resolved, cluster: Cluster, calibrate_on: str | None, workload: Workload | None = None
) -> PlanDecision:
    """The plan of a recipe on a cluster, which may not fit. `calibrate_on`: see `measurements.calibration`; `workload`:
    of the recipe, where it is open."""
    if graphs.is_open(resolved.recipe):
        plan_of = partial(decided, cluster=cluster, calibrate_on=calibrate_on)
        workload = workload_registry.open_workload(resolved, waiting)
        chosen, why = run_plan.batches(
            resolved,
            workload,
            lambda asked, opened: plan_of(asked, workload=opened).plan,
            lambda asked, _: Trials(asked.recipe, cluster),
        )
        settled, workload = run_plan.with_batches(resolved, workload, chosen)
        decision = plan_of(settled, workload=workload)
        return replace(decision, plan=run_plan.with_chosen(decision.plan, chosen, why))
    known = measurements.calibration(resolved.recipe, calibrate_on)
    asked = request(resolved, None, workload)
    if not cluster.machine:  # described in a file: this machine's disk is not theirs
        asked = replace(asked, free=None)
    return decide(asked, cluster, known, Trials(resolved.recipe, cluster))


def _what_if(
    arguments: argparse.Namespace, resolved: Resolved, cluster: Cluster, plan: plans.Plan
) -> tuple[dict[str, plans.Plan | dict[str, str]], list[str]]:
    """With `--what-if`: changes of the cluster, and of the recipe's options, as `--json` and as lines say what they do
    to `plan`, or why they cannot run."""
    if not arguments.what_if:
        return {}, []
    sections = {key.partition(".")[0] for key in recipe_errors.known_keys()}
    options = [change for change in arguments.what_if if change.partition("=")[0].partition(".")[0] in sections]
    if options:
        resolved = resolve(arguments.recipe, [*arguments.overrides, *options])
    others = [change for change in arguments.what_if if change not in options]
    changed = whatif.changed(cluster, others) if others else cluster
    try:
        other = decided(resolved, changed, arguments.calibrate_on).plan
    except UserError as error:
        return {"what_if": error.table}, [f"What if: {error}\n"]
    return {"what_if": other}, [*printing.what_if(plan, other), ""]


def _tell(resolved: Resolved, plan: plans.Plan, first: Sequence[str], splits: int) -> None:
    """`first` what was asked for, then the plan of all `splits`, and what was derived for it."""
    for text in first:
        say(text)
    recipe = resolved.recipe
    derived = [*resolved.derivations]
    if recipe.train.precision == AUTO:
        derived.append(Derivation("train.precision", plan.precision, run_plan.PRECISION))
    chosen = run_plan.batches_of(plan)
    steps = (recipe.train.steps or 0) * (1 if chosen is None else chosen.steps) * splits
    if splits > 1:
        derived.append(Derivation("graph.split", f"{splits} splits", "each is trained in turn; steps are of all"))
    printing.plan(plan, derived, steps or None, model_kinds.of(recipe.model).unit)


def _write_parts(arguments: argparse.Namespace, resolved: Resolved, decision: PlanDecision) -> None:
    """Cuts a graph over the ranks of the plan. Raises UserError where there is nothing to cut, or no plan that fits."""
    row = workload_registry.row(resolved.recipe)
    plan = decision.plan
    if not isinstance(row, CutsIntoParts):
        raise UserError("--parts is for graphs.", do="espalier plan RECIPE, without it")
    if not decision.fits:
        raise decision.refusal()
    if len(plan.trainers) == 1:
        raise UserError("The plan has one rank, and a graph for one rank has no parts.", do="plan.pin.ranks=2, or more")
    samples = [rank.samples for rank in plan.trainer_ranks]
    folder = arguments.parts
    row.cut(workload_registry.open_workload(resolved, waiting), samples, Path(folder))
    say(
        f"{folder}: the parts of {len(samples)} ranks. A machine needs manifest.json, nodes.safetensors and those of "
        f"its ranks.\n  espalier train {arguments.recipe} data.path={folder} plan.pin.ranks={len(samples)}",
        file=sys.stderr,
    )


def _page(path: str, decision: PlanDecision, recipe: Recipe, what_if: Sequence[str], splits: int) -> None:
    from espalier.cli import plan_page

    layout = decision.plan.layout

    def is_best(option: search.Option) -> bool:
        names = ("dp", "tp", "sp", "pp", "shard", "recompute")
        other = view(option.layout, layout.accumulate, layout.precision)
        return all(getattr(other, name) == getattr(layout, name) for name in names)

    best = next((option for option in decision.search_result.options if is_best(option)), None)
    points = search.points(decision.search_result, best, explain.label)
    asked = plan_page.PlanQuestion((recipe.train.steps or 0) * splits, what_if)
    plan_page.write(path, decision.plan, points, recipe.name or "plan", asked)
    where = "" if gpus(decision.cluster) else " (processors)"
    say(f"Picture{where}: {path}", file=sys.stderr)
