"""Executable layouts: which of them `train` runs, so that the planner offers nothing else. No torch.

Whether mechanisms run together does not depend on how many ranks there are of each, so layouts are asked for by kind:
one small plan for each set of degrees that are more than 1.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from espalier.plan.axes.offload import NODE
from espalier.plan.base import ChoiceState, Plan, Rank, Stage, Unit
from espalier.plan.compose import Refusal
from espalier.plan.layouts import Layouts, stage_layers
from espalier.plan.request import Request, exchanges

AXES = ("dp", "tp", "hp", "cp", "pp", "chunks", "params", "grads", "optimizer")


Kind = tuple[str, str, str, int]
"""Algorithm, recomputation, schedule, and which degrees are more than 1."""


def runs(request: Request, layouts: Layouts, known: dict[Kind, bool]) -> Any:
    """Boolean [layouts]: those that whoever asks can run. `known`: answers to this request so far."""
    if request.refuses is None:
        return np.ones(len(layouts), dtype=bool)
    schedules, number = np.unique(layouts.schedule, return_inverse=True)
    kinds = number.reshape(-1) << len(AXES)
    for bit, axis in enumerate(AXES):
        kinds = kinds + ((np.asarray(getattr(layouts, axis)) > 1).astype(np.int64) << bit)
    fine = np.zeros(len(schedules) << len(AXES), dtype=bool)
    for kind in np.flatnonzero(np.bincount(kinds, minlength=len(fine))).tolist():
        schedule = str(schedules[kind >> len(AXES)])
        key = layouts.algorithm, layouts.recompute, schedule, kind & (1 << len(AXES)) - 1
        if key not in known:
            more = {axis: bool(kind >> bit & 1) for bit, axis in enumerate(AXES)}
            known[key] = None is request.refuses(_smallest(request, replace(layouts, schedule=schedule), more))
        fine[kind] = known[key]
    return fine[kinds]


def refusal(request: Request, **degrees: int) -> Refusal | None:
    """Why `train` does not run a plan whose given degrees are more than 1; None: it does."""
    if request.refuses is None:
        return None
    kind = {axis: degrees.get(axis, 1) > 1 for axis in AXES}
    layouts = Layouts(recompute=request.recompute or "none", schedule=request.pin.schedule or "1f1b")
    return request.refuses(_smallest(request, layouts, kind))


def _smallest(request: Request, layouts: Layouts, kind: dict[str, bool]) -> Plan:
    """The smallest plan of a kind: two ranks along each axis that is more than one rank."""
    degree = {axis: 2 if more else 1 for axis, more in kind.items()}
    width = degree["tp"] * degree["hp"] * degree["cp"]
    each = degree["dp"] * width
    stages = degree["pp"] * degree["chunks"]
    split = [tuple(range(0, 2 * degree["tp"], degree["tp"])) if kind[name] else () for name in AXES[-3:]]
    on_node = request.offload == NODE
    return Plan(
        ranks=(*(Rank(),) * (each * degree["pp"]), *(Rank(role="optimizer"),) * on_node),
        units=(
            Unit(
                params=split[0],
                grads=split[1],
                optimizer=split[2],
                whole=request.muon and kind["optimizer"],
            ),
        ),
        stages=tuple(
            Stage(
                ranks=tuple(range(number % degree["pp"] * each, (number % degree["pp"] + 1) * each)),
                layers=layers,
                tensor=degree["tp"],
                heads=degree["hp"],
                context=degree["cp"],
                window=degree["cp"],
            )
            for number, layers in enumerate(stage_layers(request.profile.layers, stages))
        ),
        exchanges=exchanges(request.crossings) if each > degree["tp"] else (),
        offload=request.offload,
        schedule=layouts.schedule,
        interleave=degree["chunks"],
        algorithm=layouts.algorithm,
        recompute="none" if request.offload.parameters != "device" else layouts.recompute,
        precision=request.precision,
        choices=_choices(request),
        compile=request.recipe.train.compile,
    )


def _choices(request: Request) -> dict[str, ChoiceState]:
    """Experts over ranks, and what is pinned of chunks of tokens; what the planner chooses itself of these runs."""
    table = import_module("espalier.plan.choice").TABLE
    known: dict[str, dict[str, Any]] = {
        "token_chunks": {"loss": request.pin.loss_chunk or 0, "feed_forward": request.pin.feed_forward_chunk or 0},
        "expert_parallel": {"experts": ((0,), (1,)) if request.expert_ranks > 1 else ()},
    }
    return {name: table[name].state(**values) for name, values in known.items() if any(values.values())}
