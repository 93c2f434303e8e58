"""Request: what the planner is asked, from a recipe or a bare module. Counts only, allocates nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from espalier.parallel.tensor_roles import OWN_PLAN, check_ranks
from espalier.parallel.workload import Workload
from espalier.plan.request import Request
from espalier.recipe import Adapters, Gpt, Lora, Moe, Muon, Recipe, decoder_shapes, units
from espalier.recipe.cost import Anatomy, Cut, ModelCosts, Product, Work
from espalier.recipe.errors import UserError
from espalier.train import table, workload_registry
from espalier.train.workload_row import tally
from espalier.train.wrap_policy import running_of, sizes_of

if TYPE_CHECKING:
    from espalier.recipe import Pin

_SHARED = [part.name for part in dataclasses.fields(ModelCosts)]


def of_recipe(recipe: Recipe, workload: Callable[[], Workload] | None = None) -> Request:
    """Of a resolved recipe. `workload` gives its workload; it is called only for kinds whose model depends on data."""
    opened = workload or (lambda: workload_registry.open_workload(workload_registry.Resolved(recipe)))
    profile = workload_registry.row(recipe).profile(recipe, opened)
    train, options, counted = recipe.train, recipe.plan, profile.tally
    for name in ("redundancy", "max_devices"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"plan.{name} = {value} is not possible.", do=f"plan.{name}=1 or more")
    is_muon, sizes = isinstance(train.optimizer, Muon), counted.sizes
    if train.precision == "fp64":  # else as the trainer keeps them: fp32 masters also under bf16
        sizes = tuple(one._replace(element_bytes=8, kind=("torch.float64", False)) for one in sizes)
    return Request(
        **{name: getattr(profile, name) for name in _SHARED},
        parameters=counted.parameters,
        trainable=counted.trainable,
        tensors=counted.tensors,
        experts=getattr(recipe.model, "experts", 0),
        active=getattr(recipe.model, "active", 0),
        expert_parameters=_expert_parameters(recipe),
        expert_rows=recipe.comm.experts,
        optimizer="muon" if is_muon else "adamw",
        matrix_parameters=sum(rows * columns * n for (rows, columns), n in counted.matrices.items()) if is_muon else 0,
        matrix_shapes=tuple((rows, columns, count) for (rows, columns), count in sorted(counted.matrices.items())),
        precision=train.precision,
        compile=train.compile,
        recompute=recipe.plan.pin.recompute or train.recompute,
        pin=recipe.plan.pin,
        bucket_bytes=None if recipe.comm.bucket == "auto" else units.size(recipe.comm.bucket, "comm.bucket"),
        memory=None if options.memory is None else float(units.size(options.memory, "plan.memory")),
        redundancy=options.redundancy,
        max_devices=options.max_devices,
        codec=recipe.comm.codec,
        sync=recipe.sync,
        saves=recipe.checkpoint.every,
        write_rate=None if (rate := recipe.checkpoint.rate) is None else units.rate(rate, "checkpoint.rate"),
        copies="auto" if recipe.faults.memory == "auto" else units.size(recipe.faults.memory, "faults.memory"),
        sizes=sizes,
        running=_running_bytes(counted.running, train.precision),
        recipe=recipe,
        **_variants(recipe, opened, profile.heads),
        refuses=partial(table.refusal, recipe),
    )


def _expert_parameters(recipe: Recipe) -> float:
    """Of the experts of one layer; 0: there are none."""
    if not isinstance(recipe.model, Moe):
        return 0.0
    size = decoder_shapes.sizes(recipe.model)
    return 3.0 * size.width * size.feed_forward * size.experts


def _with_sequence(recipe: Recipe, workload: Callable[[], Workload], length: int) -> Request:
    train = recipe.train.changed(sequence=length)
    return of_recipe(recipe.changed(train=train), workload)


def _variants(recipe: Recipe, opened: Callable[[], Workload], heads: int) -> dict[str, Any]:
    """What else may be asked of the same recipe, see `Request`."""
    adapters = isinstance(recipe.model, Gpt) and not isinstance(recipe.tune, Adapters)
    return {
        "with_sequence": partial(_with_sequence, recipe, opened) if heads else None,
        "with_adapters": partial(_with_adapters, recipe, opened) if adapters else None,
    }


def _with_adapters(recipe: Recipe, workload: Callable[[], Workload], frozen: Any) -> Request:
    return of_recipe(recipe.changed(tune=Lora(frozen=frozen)), workload)


def of_module(model: torch.nn.Module, batch: int, precision: str, pin: Pin) -> Request:
    """Of a bare module in somebody's own loop: what it does with a sample is not known, so two operations per parameter
    are counted and no activations. Raises UserError when nothing in it is trainable."""
    counted = tally(model, ())
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

    return Request(
        parameters=counted.parameters,
        trainable=counted.trainable,
        tensors=counted.tensors,
        sizes=sizes_of(model),
        running=_running_bytes(running_of(model), precision),
        layers=layers,
        global_batch=batch,
        tokens_per_sample=1.0,
        anatomy=anatomy,
        precision=precision,
        pin=pin,
        tensor=pin.tp or 1,
        remarks=OWN_PLAN if (pin.tp or 1) > 1 else (),
    )


def _running_bytes(counted: tuple[int, int], precision: str) -> int:
    """Bytes of running statistics: so many floats and whole numbers."""
    floats, whole = counted
    return (8 if precision == "fp64" else 4) * floats + 8 * whole


def _layers(model: torch.nn.Module) -> int:
    """The length of the longest list of modules: what is gathered at once when parameters are sharded."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    return max((len(one) for one in model.modules() if isinstance(one, lists)), default=1) or 1
