"""Executable layouts: which of them `train` runs, so that the planner offers nothing else. No torch.

Whether mechanisms run together does not depend on how many ranks there are of each, so layouts are asked for by kind:
one small plan for each set of degrees that are more than 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from espalier.plan.axes.offload import NODE
from espalier.plan.base import ChoiceState, Exchange, Offload, Plan, Rank, Stage, Unit
from espalier.plan.compose import Refusal
from espalier.plan.layouts import Layouts, stage_layers
from espalier.plan.request import SUMS, Request, classes, exchanges

AXES = ("dp", "tp", "hp", "cp", "pp", "chunks", "params", "grads", "optimizer")


class Subject(NamedTuple):
    """What the smallest plan of a kind has of its request, whose `refuses` is asked."""

    refuses: Callable[[Plan], Refusal | None]
    layers: int
    whole: bool
    offload: Offload
    exchanges: tuple[Exchange, ...]
    precision: str
    compile: bool
    choices: tuple[tuple[str, ChoiceState], ...]


class Kind(NamedTuple):
    """Algorithm, recomputation and schedule of layouts, and which of `AXES` are more than one rank, as bits."""

    algorithm: str
    recompute: str
    schedule: str
    several: int


def runs(request: Request, layouts: Layouts) -> Any:
    """Boolean [layouts]: those that whoever asks can run."""
    if request.refuses is None:
        return np.ones(len(layouts), dtype=bool)
    subject = _subject(request)
    schedules, number = np.unique(layouts.schedule, return_inverse=True)
    kinds = number.reshape(-1) << len(AXES)
    for bit, axis in enumerate(AXES):
        kinds = kinds + ((np.asarray(getattr(layouts, axis)) > 1).astype(np.int64) << bit)
    fine = np.zeros(len(schedules) << len(AXES), dtype=bool)
    for kind in np.flatnonzero(np.bincount(kinds, minlength=len(fine))).tolist():
        schedule = str(schedules[kind >> len(AXES)])
        several = kind & (1 << len(AXES)) - 1
        fine[kind] = _refusal(subject, Kind(layouts.algorithm, layouts.recompute, schedule, several)) is None
    return fine[kinds]


def refusal(request: Request, **degrees: int) -> Refusal | None:
    """Why `train` does not run a plan whose given degrees are more than 1; None: it does."""
    if request.refuses is None:
        return None
    several = sum((degrees.get(axis, 1) > 1) << bit for bit, axis in enumerate(AXES))
    kind = Kind("data", request.recompute or "none", request.pin.schedule or "1f1b", several)
    return _refusal(_subject(request), kind)


@lru_cache(maxsize=8192)
def _refusal(subject: Subject, kind: Kind) -> Refusal | None:
    """Searches of one decision ask of the same kinds: other ranks of experts change no answer."""
    return subject.refuses(_smallest(subject, kind))


def _subject(request: Request) -> Subject:
    assert request.refuses is not None
    return Subject(
        request.refuses,
        request.profile.layers,
        request.muon,
        request.offload,
        exchanges(request.crossings, {*SUMS, "activations", "keys_values"}),
        request.precision,
        request.recipe.train.compile,
        _choices(request),
    )


def _smallest(subject: Subject, kind: Kind) -> Plan:
    """The smallest plan of a kind: two ranks along each axis that is more than one rank."""
    degree = {axis: 1 + (kind.several >> bit & 1) for bit, axis in enumerate(AXES)}
    width = degree["tp"] * degree["hp"] * degree["cp"]
    each = degree["dp"] * width
    stages = degree["pp"] * degree["chunks"]
    split = [tuple(range(0, 2 * degree["tp"], degree["tp"])) if degree[name] > 1 else () for name in AXES[-3:]]
    on_node = subject.offload == NODE
    sends = classes(each // degree["tp"], degree["tp"], degree["hp"], degree["cp"], degree["pp"])
    return Plan(
        ranks=(*(Rank(),) * (each * degree["pp"]), *(Rank(role="optimizer"),) * on_node),
        units=(
            Unit(
                params=split[0],
                grads=split[1],
                optimizer=split[2],
                whole=subject.whole and degree["optimizer"] > 1,
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
            for number, layers in enumerate(stage_layers(subject.layers, stages))
        ),
        exchanges=tuple(exchange for exchange in subject.exchanges if exchange.traffic in sends),
        offload=subject.offload,
        schedule=kind.schedule,
        interleave=degree["chunks"],
        algorithm=kind.algorithm,
        recompute="none" if subject.offload.parameters != "device" else kind.recompute,
        precision=subject.precision,
        choices=dict(subject.choices),
        compile=subject.compile,
    )


def _choices(request: Request) -> tuple[tuple[str, ChoiceState], ...]:
    """Experts over ranks, and what is pinned of chunks of tokens; what the planner chooses itself of these runs."""
    table = import_module("espalier.plan.choice").TABLE
    known: dict[str, dict[str, Any]] = {
        "token_chunks": {"loss": request.pin.loss_chunk or 0, "feed_forward": request.pin.feed_forward_chunk or 0},
        "expert_parallel": {"experts": ((0,), (1,)) if request.expert_ranks > 1 else ()},
    }
    return tuple((name, table[name].state(**values)) for name, values in known.items() if any(values.values()))
