"""From the search's best option to a plan: ranks, units, stages, and the sentences that defend it. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from espalier import units
from espalier.plan import layouts as space
from espalier.plan import network
from espalier.plan.base import Plan, Predicted, Rank, RunnerUp, Stage, Unit, exchanges
from espalier.plan.calibrate import DATASHEET, Calibration
from espalier.plan.estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.plan.search import Found, Option
from espalier.plan.seats import seats

RUNNERS_UP = 6
"""How many other plans are told, the best of each kind."""


def executable(option: Option) -> bool:
    """True when `espalier train` runs it today."""
    return not missing(option.layout)


def missing(layout: Layouts) -> str:
    """Which parts `espalier train` lacks for this layout; empty when none."""
    lacks = []
    if layout.tp * layout.sp > 1:
        lacks.append(f"the {layout.algorithm} algorithm (`espalier explain buff`)")
    if layout.pp > 1:
        lacks.append("pipeline stages (`espalier explain flashflex`)")
    return " and ".join(lacks)


# --- the plan ----------------------------------------------------------------------------------------------------


def make(request: Request, found: Found, option: Option, calibration: Calibration = DATASHEET) -> Plan:
    """The plan of an option, with reasons and what the others lose."""
    predicted = predict(request, option, calibration)
    layout = option.layout
    return Plan(
        planner="search",
        ranks=_ranks(request, option),
        units=(_unit(request, layout),),
        stages=_stages(request, option),
        exchanges=exchanges(request.crossings) if layout.shards > 1 else (),
        algorithm=layout.algorithm,
        micro_batch=int(min(layout.micro_batch, max(_samples(request, option)))),
        recompute=layout.recompute,
        precision=request.precision,
        compile=request.compile,
        predicted=predicted,
        executable=executable(option),
        missing=missing(layout),
        why=tuple(why(request, found, option, predicted)),
        runners_up=tuple(runners_up(request, found, option)),
    )


def predict(request: Request, option: Option, calibration: Calibration) -> Predicted:
    """What the option should cost, in full."""
    shares = option.shares
    predicted = estimate(request, option.cluster, option.layout, calibration.factors, shares)
    return msgspec.structs.replace(
        predicted, spread=calibration.spread, sources={**predicted.sources, "coefficients": calibration.source}
    )


def _samples(request: Request, option: Option) -> list[int]:
    """Samples of each replica, in order; they add up to the batch."""
    layout, batch = option.layout, request.global_batch
    if option.shares is None:
        each, over = divmod(batch, layout.dp)
        return [each + (index < over) for index in range(layout.dp)]
    kinds = network.kinds(seats(option.cluster, int(layout.world)))
    share = dict(zip(dict.fromkeys(kinds), option.shares, strict=True))
    most = [share[kind] for kind in kinds]
    spare = sum(most) - batch  # shares are rounded up; the last ranks (the slowest) give back one each, then again
    index = len(most) - 1
    while spare > 0:
        most[index] -= 1
        spare -= 1
        index = index - 1 if index else len(most) - 1
    return most


def _ranks(request: Request, option: Option) -> tuple[Rank, ...]:
    layout, at, cuts = option.layout, 0, []
    for samples in _samples(request, option):
        cuts.append((at, at + samples))
        at += samples
    replica = layout.tp * layout.sp
    places = seats(option.cluster, int(layout.world))
    return tuple(
        Rank(
            device="cpu" if place.table.device.kind == "cpu" else f"cuda:{place.slot}",
            node=option.nodes[place.node] if option.nodes else place.node,
            threads=layout.threads,
            share=cuts[index // replica % layout.dp],
        )
        for index, place in enumerate(places)
    )


def _unit(request: Request, layout: Layouts) -> Unit:
    """The shards of the first ranks; other groups are alike, `tp` apart. Muon's matrices stay whole."""

    def group(size: int) -> tuple[int, ...]:
        return tuple(range(0, size * layout.tp, layout.tp)) if size > 1 else ()

    whole = request.optimizer == "muon" and layout.optimizer > 1
    return Unit(params=group(layout.params), grads=group(layout.grads), optimizer=group(layout.optimizer), whole=whole)


def _stages(request: Request, option: Option) -> tuple[Stage, ...]:
    layout = option.layout
    each = layout.dp * layout.tp * layout.sp
    few, over = divmod(request.layers, layout.pp)
    most = max(_samples(request, option))
    made, first = [], 0
    for index in range(layout.pp):
        last = first + few + (index >= layout.pp - over)
        made.append(
            Stage(
                ranks=tuple(range(index * each, (index + 1) * each)),
                layers=(first, last),
                micro_batches=-(-most // min(layout.micro_batch, most)),
                tensor=layout.tp,
                sequence=layout.sp,
            )
        )
        first = last
    return tuple(made)


# --- words -------------------------------------------------------------------------------------------------------


def label(layout: Layouts) -> str:
    """A layout in a few words."""
    parts = [f"dp {layout.dp}"]
    if layout.tp > 1:
        parts.append(f"{layout.algorithm} tp {layout.tp}")
    if layout.sp > 1:
        parts.append(f"isp {layout.sp}")
    if layout.pp > 1:
        parts.append(f"pp {layout.pp}")
    parts.append(f"shard {layout.params}/{layout.grads}/{layout.optimizer}")
    parts.append(f"micro-batch {layout.micro_batch}")
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    return ", ".join(parts)


def why(request: Request, found: Found, option: Option, predicted: Predicted) -> list[str]:
    """The sentences that defend an option, with their numbers."""
    layout = option.layout
    fastest = found.options[0] if found.options else option
    said = [
        f"Of {found.priced:,} layouts priced, {label(layout)} on {layout.world} device{'s' * (layout.world != 1)}: "
        f"{units.show_seconds(predicted.step_seconds)} per step, give or take {predicted.spread:.0%}."
    ]
    if fastest is not option and fastest.seconds < option.seconds:
        gain = option.seconds / fastest.seconds - 1
        said.append(
            f"{label(fastest.layout)} is {gain:.1%} faster by estimate, within the tie of {found.tie:.0%}: "
            "fewer moving parts, then less memory, decide."
        )
    if option.fits:
        said += _states(request, found, option)
        said += _cuts(request, found, option, predicted)
    used = int(layout.world)
    there = len(option.cluster.devices())
    if used < there and not request.pin.ranks:
        whole = found.best(lambda one: one.layout.world == there)
        beside = "no plan uses them" if whole is None else f"with all, {_change(whole.seconds, option.seconds)}"
        said.append(f"{there - used} of {there} devices are left out: {beside}.")
    if option.shares is not None:
        told = " and ".join(str(share) for share in option.shares)
        said.append(f"Devices differ in speed: ranks have up to {told} samples, by their speed.")
    elif len({id(place.table.device) for place in seats(option.cluster, used)}) > 1 and not option.cluster.same_speed:
        said.append("Devices differ in speed and shares are equal, so the slowest sets the step.")
    largest = max((name for name in predicted.memory_bytes if name != "peak"), key=lambda n: predicted.memory_bytes[n])
    room = predicted.memory_limit - predicted.memory_bytes["peak"]
    left = f"{units.show_size(room)} to spare" if room >= 0 else f"{units.show_size(-room)} too much"
    held = units.show_size(predicted.memory_bytes["peak"])
    said.append(f"{held} of {units.show_size(predicted.memory_limit)} per rank, most of it {largest}; {left}.")
    return said


def _states(request: Request, found: Found, option: Option) -> list[str]:
    layout = option.layout
    if layout.shards == 1:
        return []
    if layout.optimizer == 1:
        return ["States are replicated: they fit, and nothing is gathered."]
    factors = f"parameters over {layout.params}, gradients over {layout.grads}, optimizer over {layout.optimizer} ranks"
    if request.pin.shard is not None:
        return [f"States sharded ({factors}): plan.pin.shard was set."]
    looser = found.best(lambda one: one.layout.optimizer == 1 and _same_cut(one.layout, layout))
    if looser is None:
        return [f"States sharded ({factors}): replicated they do not fit."]
    takes = _change(looser.seconds, option.seconds)
    return [f"States sharded ({factors}): replicated they fit, but the step takes {takes}."]


def _same_cut(one: Layouts, other: Layouts) -> bool:
    return (one.tp, one.sp, one.pp, one.world) == (other.tp, other.sp, other.pp, other.world)


def _cuts(request: Request, found: Found, option: Option, predicted: Predicted) -> list[str]:
    layout, said = option.layout, []
    for cut, name, part in (
        (layout.tp > 1, f"Matrices cut over {layout.tp} ranks ({layout.algorithm})", "tensor"),
        (layout.sp > 1, f"Sequences cut over {layout.sp} ranks (isp)", "sequence"),
        (layout.pp > 1, f"{layout.pp} pipeline stages", "pipeline"),
    ):
        if not cut:
            continue
        field = {"tensor": "tp", "sequence": "sp", "pipeline": "pp"}[part]
        without = found.best(lambda one, field=field: getattr(one.layout, field) == 1)  # type: ignore[misc]
        cost = units.show_seconds(predicted.terms.get(part, 0.0))
        if getattr(request.pin, field) is not None:
            said.append(f"{name}, at {cost} a step: it was set.")
        elif without is None:
            said.append(f"{name}, at {cost} a step: without, nothing fits.")
        else:
            said.append(
                f"{name}, at {cost} a step: without, the step takes {_change(without.seconds, option.seconds)}."
            )
    if request.pin.recompute or request.recompute:
        said.append(f"Recompute {layout.recompute}: it was set.")
    elif layout.recompute != "none":
        without = found.best(lambda one: one.layout.recompute == "none")
        there = "nothing fits" if without is None else f"the step takes {_change(without.seconds, option.seconds)}"
        said.append(f"Activations are recomputed ({layout.recompute}): without, {there}.")
    return said


def _change(there: float, here: float) -> str:
    percent = 100 * (there / here - 1)
    if abs(percent) < 0.5:
        return "as long, with more moving parts or memory"
    return f"{percent:.0f} % longer" if percent > 0 else f"{-percent:.0f} % less, with more moving parts or memory"


def runners_up(request: Request, found: Found, option: Option) -> list[RunnerUp]:
    """The best plan of each other kind (algorithm, pipeline, sharding, recomputation), fastest first."""

    def kind(one: Option) -> tuple[Any, ...]:
        layout = one.layout
        sharded = (layout.params > 1, layout.grads > 1, layout.optimizer > 1)
        return layout.algorithm, layout.pp > 1, sharded, layout.recompute, layout.world

    taken, told = {kind(option)}, []
    for one in found.options:
        if kind(one) in taken:
            continue
        taken.add(kind(one))
        told.append(_runner_up(request, one, option))
        if len(told) == RUNNERS_UP:
            break
    return told


def _worse(one: Option, best: Option) -> str:
    """What puts `one` behind `best` although it is no slower."""
    mechanisms, mode, exchanged = (
        here - there for here, there in zip(one.layout.key(), best.layout.key(), strict=True)
    )
    if mechanisms > 0:
        return "has more moving parts"
    if mode > 0:
        return "recomputes more"
    return "exchanges states in every micro-batch" if exchanged > 0 else "holds more"


def _runner_up(request: Request, one: Option, best: Option) -> RunnerUp:
    layout = one.layout
    slower, more = one.seconds / best.seconds - 1, one.peak - best.peak
    loses = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster, within the tie, but {_worse(one, best)}"
    if more > 0:
        loses += f", {units.show_size(more)} more memory"
    samples = -(-request.global_batch // layout.dp)
    return RunnerUp(
        layout=space.view(layout, -(-samples // layout.micro_batch), request.precision),
        ranks=int(layout.world),
        threads=layout.threads,
        step_seconds=one.seconds,
        peak_bytes=one.peak,
        loses=loses,
    )
