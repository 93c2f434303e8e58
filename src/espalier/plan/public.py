"""The planner as library calls: for a recipe, a published decoder, or anybody's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from espalier import cluster as clusters
from espalier.cluster import Cluster
from espalier.config import Pin, Recipe, Shard
from espalier.errors import UserError, nearest
from espalier.plan import chosen, refusals, search
from espalier.plan.base import Layout, Plan, Predicted
from espalier.plan.calibrate import DATASHEET, Calibration
from espalier.plan.estimate import estimate as priced
from espalier.plan.layouts import of_view
from espalier.plan.published import Decoder
from espalier.plan.request import Request

Estimate = Predicted
"""Seconds by part, bytes by kind, bytes sent by class, and where each number comes from."""

Model = "Recipe | Request | Decoder | torch.nn.Module | str | Path"


def make_plan(
    model: Any,
    cluster: Cluster | str | Path,
    *,
    batch: int | None = None,
    precision: str = "fp32",
    calibration: Calibration = DATASHEET,
    **pins: Any,
) -> Plan:
    """The best plan for a model on a cluster.

    Args:
        model: a recipe (or its path), or any `nn.Module`; of a bare module only its parameters are known.
        cluster: or the path of a cluster file.
        batch: samples per step; a recipe says its own.
        precision: of a bare module; a recipe says its own.
        calibration: what measurements say of the coefficients.
        pins: decisions already taken, by the names of a plan's layout: `dp=8`, `shard={"optimizer": 8}`, …

    Returns:
        The plan; `plan.executable` says whether `espalier train` runs it today.

    Raises:
        UserError: a pin is not known or cannot be met, or nothing fits in memory (exit code 2 on the command line).
    """
    request = _asked(model, batch, precision, pins)
    where = cluster if isinstance(cluster, Cluster) else clusters.read(cluster)
    refusals.check_pins(request, where)
    found = search.search(request, where, calibration)
    best = found.best()
    if best is None:
        raise refusals.refusal(request, where, found)
    return chosen.make(request, found, best, calibration)


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
    where = cluster if isinstance(cluster, Cluster) else clusters.read(cluster)
    batch = layout.dp * layout.micro_batch * layout.accumulate
    request = _asked(model, batch, layout.precision, {})
    layouts = of_view(layout)
    there = len(where.devices())
    if int(layouts.world) > there and where.nodes[0].device.kind == "cuda":
        raise UserError(f"The layout needs {layouts.world} devices; the cluster has {there}.", do="a smaller dp")
    found = priced(request, where, layouts, known.factors)
    return msgspec.structs.replace(found, spread=known.spread)


def _asked(model: Any, batch: int | None, precision: str, pins: dict[str, Any]) -> Request:
    """The request of any kind of model."""
    import dataclasses

    import torch

    from espalier.config import derive, load
    from espalier.plan import asking

    pin = pins_of(pins)
    if isinstance(model, str | Path):
        model = derive.resolve(load.load(model, []))[0]
    if isinstance(model, Recipe):
        request = asking.of_recipe(derive.resolve(model)[0])
        pin = pin if pins else request.pin
    elif isinstance(model, Request):
        request = model
    elif isinstance(model, Decoder):
        request = model.request(batch or 1, precision)
    elif isinstance(model, torch.nn.Module):
        if batch is None:
            raise UserError("A bare module does not say its batch.", do="make_plan(model, cluster, batch=64)")
        request = asking.of_module(model, batch, precision, pin)
    else:
        raise UserError(f"{type(model).__name__} is not a model.", do="a recipe, its path, or an nn.Module")
    given = request.global_batch if batch is None else batch
    return dataclasses.replace(request, pin=pin, global_batch=given)


def pins_of(pins: dict[str, Any]) -> Pin:
    """Pins given as keywords. Raises UserError naming the nearest known one."""
    known = list(Pin.__struct_fields__)
    for name in pins:
        if name not in known:
            near = nearest(name, known)
            raise UserError(f"There is nothing called {name!r} to pin.", do=f"{near}=…" if near else ", ".join(known))
    shard = pins.get("shard")
    if isinstance(shard, dict):
        pins = {**pins, "shard": Shard(**shard)}
    return Pin(**pins)
