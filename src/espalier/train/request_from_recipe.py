"""Request: what the planner is asked, of a recipe or a bare module. Counts only, allocates nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from espalier.parallel.tensor_roles import OWN_PLAN, check_ranks
from espalier.parallel.workload import Workload
from espalier.plan.request import Request
from espalier.recipe import Recipe
from espalier.recipe.cost import Anatomy, Cut, Product, Profile, Work
from espalier.recipe.errors import UserError
from espalier.train import table, workload_registry
from espalier.train.wrap_policy import tally

if TYPE_CHECKING:
    from espalier.recipe import Pin


def of_recipe(recipe: Recipe, workload: Callable[[], Workload] | None = None) -> Request:
    """Of a resolved recipe. `workload` gives its workload; it is called only for kinds whose model depends on data."""
    opened = workload or (lambda: workload_registry.open_workload(workload_registry.Resolved(recipe)))
    profile = workload_registry.row(recipe).profile(recipe, opened)
    for name in ("redundancy", "max_devices"):
        if (value := getattr(recipe.plan, name)) is not None and value < 1:
            raise UserError(f"plan.{name} = {value} is not possible.", do=f"plan.{name}=1 or more")
    return Request(
        recipe=recipe,
        profile=profile,
        refuses=partial(table.refusal, recipe),
        request_of=partial(of_recipe, workload=opened),
    )


def of_module(model: torch.nn.Module, batch: int, precision: str, pin: Pin) -> Request:
    """Of a bare module in somebody's own loop: what it does with a sample is not known, so two operations per parameter
    are counted and no activations. Raises UserError when nothing in it is trainable."""
    counted = tally(model, embeddings=list(model.parameters()))  # any matrix may be one, for all that is known
    if not counted.trainable:
        raise UserError(f"{type(model).__name__} has no trainable parameter.", do="give the model that you train")

    layers = _layers(model)
    if (pin.tp or 1) > 1:
        check_ranks(model, pin.tp or 1)

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        zero = 0.0 * micro_batch
        nothing = Work((), zero, zero, zero, zero, zero, micro_batch, micro_batch)
        product = Product(micro_batch, counted.parameters / layers / cut.tensor, 1)
        return Anatomy(layers, dataclasses.replace(nothing, products=(product,)), nothing)

    profile = Profile(
        **vars(counted),
        layers=layers,
        global_batch=batch,
        tokens_per_sample=1.0,
        anatomy=anatomy,
        tensor=pin.tp or 1,
        remarks=OWN_PLAN if (pin.tp or 1) > 1 else (),
    )
    return Request(profile=profile).changed(precision=precision, pin=pin)


def _layers(model: torch.nn.Module) -> int:
    """The length of the longest list of modules: what is gathered at once when parameters are sharded."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    return max((len(layers) for layers in model.modules() if isinstance(layers, lists)), default=1) or 1
