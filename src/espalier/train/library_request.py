"""What is asked of the planner in a library call: a recipe, a published decoder, or anybody's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import pins as pinned
from espalier.plan.base import Layout, Predicted
from espalier.plan.calibration import DATASHEET, Calibration, own_stack
from espalier.plan.layout_estimate import estimate as priced
from espalier.plan.layouts import of_view
from espalier.plan.reference_models import ReferenceDecoder
from espalier.plan.request import Request
from espalier.recipe import Auto, Pin, Recipe
from espalier.recipe.errors import UserError, nearest

Estimate = Predicted
"""Seconds by part, bytes by kind, bytes sent by class, and where each number comes from."""


def estimate(
    model: Any,
    cluster: Cluster | str | Path,
    layout: Layout,
    calibration: Calibration | None = None,
) -> Estimate:
    """What one step of `layout` should cost.

    Args:
        model: as for `make_plan`; the batch is the layout's `dp · micro_batch · accumulate`.
        cluster: or the path of a cluster file; its first `dp · tp · sp · pp` devices are used.
        layout: what a plan shows under `layout`.
        calibration: what measurements say of the coefficients; None: datasheets.

    Raises:
        UserError: the layout does not nest, or asks for more devices than there are.
    """
    known = calibration or DATASHEET
    if not isinstance(layout, Layout):
        raise UserError(f"{layout!r} is not a layout.", do="espalier.plan.base.Layout(dp=8, …), or plan.layout")
    where = cluster_of(cluster)
    batch = layout.dp * layout.micro_batch * layout.accumulate
    layouts = of_view(layout)
    request = asked(model, batch, layout.precision, {})[0].changed(precision=layout.precision)
    degrees = {name: getattr(layout, name) for name in ("tp", "sp", "pp") if getattr(layout, name) > 1}
    pinned.check(request.changed(pin=Pin(**degrees), redundancy=1), where)
    there = len(where.devices())
    if int(layouts.world) > there and where.nodes[0].device.kind == "cuda":
        raise UserError(f"The layout needs {layouts.world} devices; the cluster has {there}.", do="a smaller dp")
    prices = priced(request, where, layouts, known.factors)
    certain = known.on(where, int(layouts.world), own_stack(where))
    return prices.changed(spread=certain.spread)


def cluster_of(cluster: Any) -> Cluster:
    """A cluster, or the one in a file. Raises UserError."""
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | Path):
        raise UserError(f"{cluster!r} is not a cluster.", do="a Cluster, or the path of a cluster file")
    return clusters.read(cluster)


def asked(model: Any, batch: int | None, precision: str, pins: dict[str, Any]) -> tuple[Request, Recipe | None]:
    """The request of any kind of model, and the resolved recipe where it is one. Raises UserError."""
    import torch

    from espalier.recipe import recipe_file
    from espalier.train import request_from_recipe, workload_registry

    pin = pins_of(pins)
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise UserError(f"batch = {batch!r} is not possible.", do="a whole number of samples, such as batch=64")
    folder = None
    recipe = None
    if isinstance(model, str | Path):
        folder = Path(model).absolute().parent
        model = recipe_file.load(model, [])
    if isinstance(model, Recipe):
        resolved = workload_registry.settle(model, folder)
        recipe = resolved.recipe
        request = request_from_recipe.of_recipe(recipe, lambda: workload_registry.open_workload(resolved))
        pin = pins_of(pins, request.pin)
    elif isinstance(model, Request):
        request = model
    elif isinstance(model, ReferenceDecoder):
        request = model.request(batch or 1, precision)
    elif isinstance(model, torch.nn.Module):
        if batch is None:
            raise UserError("make_plan needs a batch size for a module.", do="make_plan(model, cluster, batch=64)")
        request = request_from_recipe.of_module(model, batch, precision, pin).changed(sync=Auto())
    else:
        raise UserError(f"{type(model).__name__} is not a model.", do="a recipe, its path, or an nn.Module")
    given = request.profile.global_batch if batch is None else batch
    return request.changed(pin=pin, global_batch=given), recipe


def pins_of(pins: dict[str, Any], before: Pin | None = None) -> Pin:
    """Pins given as keywords, joined to those `before`. Raises UserError naming the nearest known one."""
    known = list(Pin.__struct_fields__)
    for name, value in pins.items():
        if name not in known:
            near = nearest(name, known)
            raise UserError(f"{name!r} cannot be pinned.", do=f"{near}=…" if near else ", ".join(known))
        if isinstance(value, bool):
            raise UserError(f"{name} = {value} is not possible.", do=f"{name} = a number")
    given = {name: msgspec.to_builtins(value) for name, value in pins.items()}
    table = {**(msgspec.to_builtins(before) if before is not None else {}), **given}
    try:
        return msgspec.convert({name: value for name, value in table.items() if value is not None}, Pin)
    except (msgspec.ValidationError, TypeError) as error:
        raise UserError(f"A pin is not possible: {error}.", do="the names and values of a plan's layout") from None
