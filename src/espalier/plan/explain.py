"""Why this plan and what the others lose, in sentences; what it costs is in `plan_summary`. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from espalier.machine.cluster import Cluster, Place, machine_order
from espalier.plan import layouts as space
from espalier.plan import plan_summary, step_time
from espalier.plan.axes.flat_layout import BUCKET
from espalier.plan.axes.placement_plan import Prefetch
from espalier.plan.base import RESIDENT, RunnerUp
from espalier.plan.collective_time import gpus, seats
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layout_estimate import fullness, samples_each, slowest
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.plan.search import Option, SearchResult
from espalier.recipe import units

RUNNERS_UP = 6
"""How many other plans are told, the best of each kind."""


def label(layout: Layouts) -> str:
    """A layout in a few words."""
    return str(space.view(layout, 1, ""))


def why(request: Request, result: SearchResult, option: Option) -> list[str]:
    """The sentences that defend an option against the others that were priced."""
    layout = option.layout
    fastest = result.options[0] if result.options else option
    sentences = [f"{request.pin.ranks} ranks were asked for."] if (request.pin.ranks or 0) > 1 else []
    best = "is the best" if option.fits else "lacks the fewest bytes"
    sentences.append(f"It {best} of {units.plural(result.priced, 'layout')} that were priced.")
    if fastest is not option and fastest.seconds < option.seconds:
        sentences.append(_passed_over(result, fastest, option))
    if request.offload != RESIDENT:
        names = ("optimizer states", "parameters", "activations", "frozen weights")
        kinds = " and ".join(name for name in names if name.split()[0] in str(request.offload))
        why = "it was set" if request.pin.offload else "with all on their devices nothing fits"
        sentences.append(f"{kinds[0].upper()}{kinds[1:]} wait outside the devices between uses: {why}.")
    if option.fits and request.offload.parameters == "device":
        sentences += _states(request, result, option)
        sentences += _gathers(request, option) if layout.params > 1 else _pieces(request, option)
        sentences += _cuts(request, result, option)
    used = int(layout.world)
    able = [place for place in option.cluster.devices() if request.precision in place.table.device.flops]
    if used < len(able) and not request.pin.ranks:
        sentences.append(_left_out(result, option, able))
    if option.shares is not None:
        listed = " and ".join(str(share) for share in option.shares)
        sentences.append(f"Devices differ in speed: ranks have up to {listed} samples, by their speed.")
    elif option.speeds is not None:
        listed = " and ".join(f"{speed:.2f}" for speed in option.speeds)
        sentences.append(f"Devices differ in speed: ranks have {listed} of the mean number of tokens, by their speed.")
    elif len({id(place.table.device) for place in seats(option.cluster, used)}) > 1 and not option.cluster.same_speed:
        sentences.append("Devices differ in speed and shares are equal, so the slowest sets the step.")
    sentences += _crowded(option)
    return sentences


def _left_out(result: SearchResult, option: Option, places: Sequence[Place]) -> str:
    """Those of `places` that a plan does not use, and what it would lose with them, over which link."""
    used = seats(option.cluster, int(option.layout.world))
    left = Counter(place.table.device.name for place in places)
    left -= Counter(place.table.device.name for place in used)
    names = " and ".join(f"{count} {name}" for name, count in left.items())
    whole = result.best(lambda other: other.layout.world == len(places))
    loss = "no plan uses them" if whole is None else f"with all, {_change(whole.seconds, option.seconds)}"
    if whole is not None and option.cluster.machines > len({place.node for place in used}):
        between = option.cluster.slowest([place.rank for place in places], "between")
        loss += f" over {plan_summary.link_words(between, 'between')}"
    return f"{left.total()} of {len(places)} devices are left out ({names}): {loss}."


def _states(request: Request, result: SearchResult, option: Option) -> list[str]:
    layout = option.layout
    if layout.shards == 1:
        return []
    if layout.optimizer == 1:
        return ["States are replicated: they fit, and nothing is gathered."]
    over = {"parameters": layout.params, "gradients": layout.grads, "optimizer": layout.optimizer}
    factors = ", ".join(f"{name} over {ranks} ranks" for name, ranks in over.items() if ranks > 1)
    if request.pin.shard is not None:
        why = "plan.pin.shard was set"
    elif (seconds := _replicated(request, result, option)) is None:
        why = "replicated they do not fit"
    else:
        why = f"replicated they fit, but {_change(seconds, option.seconds)}"
    return [f"States sharded ({factors}): {why}."]


def _replicated(request: Request, result: SearchResult, option: Option) -> float | None:
    """Seconds of a step with the same cut and replicated states; None where no micro-batch of it fits. The search keeps
    the fastest of each kind only, so what it dropped is priced here."""
    layout = option.layout
    looser = result.best(lambda other: other.layout.optimizer == 1 and _same_cut(other.layout, layout))
    if looser is not None:
        return looser.seconds
    sizes = {layout.micro_batch, 1}
    plain = [replace(layout, params=1, grads=1, optimizer=1, micro_batch=size) for size in sizes]
    fitting = [each for each in plain if np.all(fullness(request, option.on, each)[1] <= 0)]
    return min((float(slowest(request, option.on, each)) for each in fitting), default=None)


def prefetch(request: Request, option: Option) -> Prefetch:
    """When the gather of the next layer's weights begins: what takes the shortest time."""
    return "block" if option.layout.params == 1 else next(iter(_gathering(request, option)))


def bucket(request: Request, option: Option) -> int:
    """Bytes of gradients exchanged at once."""
    return int(_inputs(request, option).bucket_bytes)


def _inputs(request: Request, option: Option) -> CostInputs:
    """What is priced of an option, on its first kind of rank."""
    on = replace(option.on, factors=request.factors)
    return CostInputs(request, on, on.kinds[0], option.layout)


def _gathering(request: Request, option: Option) -> dict[Prefetch, float]:
    size = np.minimum(option.layout.micro_batch, samples_each(request, option.layout))
    return step_time.prefetch(_inputs(request, option), size)


def _pieces(request: Request, option: Option) -> list[str]:
    """Why gradients are exchanged in larger pieces than usual."""
    chosen = bucket(request, option)
    if request.recipe.comm.bucket != "auto" or chosen <= BUCKET:
        return []
    ranks = option.layout.shards // option.layout.grads
    return [
        f"Gradients are exchanged in pieces of {units.show_size(chosen)} instead of {units.show_size(BUCKET)}: "
        f"each waits for a hop of {ranks:,} ranks."
    ]


_STARTS: dict[Prefetch, str] = {
    "block": "as the block before begins",
    "attention": "when the attention before has ended",
    "none": "when they are needed",
}


def _gathers(request: Request, option: Option) -> list[str]:
    """When weights are gathered, and what the other choices lose."""
    (chosen, taken), *others = _gathering(request, option).items()
    lost = [f"{_STARTS[start]}, {slower(seconds, taken)}" for start, seconds in others]
    why = f"({'; '.join(lost)}, in each layer)" if lost else "(it was set)"
    return [f"Weights of a block are gathered {_STARTS[chosen]} {why}."]


def _same_cut(layout: Layouts, other: Layouts) -> bool:
    return (layout.tp, layout.sp, layout.pp, layout.world) == (other.tp, other.sp, other.pp, other.world)


def _cuts(request: Request, result: SearchResult, option: Option) -> list[str]:
    layout = option.layout
    sentences = []
    for field, name in (
        ("tp", f"Matrices cut over {layout.tp} ranks ({layout.algorithm})"),
        ("sp", _sequence(layout) if layout.sp > 1 else ""),
        ("pp", f"{layout.pp} pipeline stages"),
    ):
        if getattr(layout, field) > 1:
            why = "it was set" if getattr(request.pin, field) is not None else _without_it(result, option, field, 1)
            sentences.append(f"{name}: {why}.")
    if request.pin.micro_batch is not None:
        sentences.append(f"Micro-batch {layout.micro_batch}: it was set.")
    if request.recompute:
        sentences.append(f"Recompute {layout.recompute}: it was set.")
    elif request.offload.activations != "device":
        sentences.append("Activations are recomputed (block): what blocks give to the next waits on disk.")
    elif layout.recompute != "none":
        why = _without_it(result, option, "recompute", "none")
        sentences.append(f"Activations are recomputed ({layout.recompute}): {why}.")
    return sentences


def _sequence(layout: Layouts) -> str:
    parts = [f"{layout.hp} of heads"] * (layout.hp > 1) + [f"{layout.cp} of context"] * (layout.cp > 1)
    rings = f", in rings of {layout.window}" if 1 < layout.window < layout.cp else ""
    return f"Sequences cut over {layout.sp} ranks ({' x '.join(parts)}{rings})"


def _without_it(result: SearchResult, option: Option, field: str, value: Any) -> str:
    """What the best layout whose `field` has that plain `value` loses."""
    without = result.best(lambda other: getattr(other.layout, field) == value)
    nothing = f"nothing fits in {units.show_size(option.peak - option.over)}"
    return "without, " + (nothing if without is None else _change(without.seconds, option.seconds))


def _passed_over(result: SearchResult, fastest: Option, option: Option) -> str:
    """Why the fastest by estimate is not the plan."""
    gain = _gain(option, fastest)
    tie = f"a tie (within {result.tie:.0%}), and this plan {_preferred(option, fastest)}"
    faster = f"{label(fastest.layout)} is {_faster(gain)} by estimate"
    return f"{faster}, but {_STAY_WHOLE}." if gain > result.tie else f"{faster}: {tie}."


def _preferred(option: Option, other: Option) -> str:
    """What decides between two options within a tie (`Option.order`)."""
    if other.tight and not option.tight:
        return "leaves memory to spare"
    if option.leaving < other.leaving and other.order(option.leaving)[1]:
        return "sends fewer bytes between machines"
    if option.layout.key() < other.layout.key():
        return "has fewer moving parts"
    if option.layout.micro_batch > other.layout.micro_batch:
        return "has larger micro-batches"
    return "holds less memory" if option.peak < other.peak else "exchanges fewer states in each micro-batch"


_STAY_WHOLE = "on one machine states are not sharded where they fit, as the gain is below the error of the estimate"


def _gain(option: Option, other: Option) -> float:
    """By how much `other` is faster: as many times the steps a second, less one."""
    return option.seconds / other.seconds - 1


def _faster(gain: float) -> str:
    if gain < 0.0005:
        return "as fast"
    return f"{gain:.1%} faster" if gain < 1 else f"{1 + gain:.3g} times as fast"


def _crowded(option: Option) -> list[str]:
    """The remark when ranks have more threads than there are cores."""
    cluster = option.cluster
    layout = option.layout
    cores = min(max(1, table.cores) for table in cluster.nodes)
    nodes = [place.node for place in seats(cluster, int(layout.world))]
    ranks = max(Counter(nodes).values())
    if gpus(cluster) or ranks * layout.threads <= cores:
        return []
    return [f"{ranks} ranks x {layout.threads} threads share {cores} cores."]


def seating(cluster: Cluster) -> list[str]:
    """The remarks when ranks do not sit on machines in the order of the cluster file, or not on all of them."""
    remarks = []
    asked = tuple(range(cluster.machines))
    if cluster.ring != asked:
        ours, plain = (machine_order.crossings(cluster.links, ring) for ring in (cluster.ring, asked))
        machines = ", ".join(map(str, cluster.ring))
        remarks += [
            f"Ranks follow machines {machines}: a ring crosses the slowest links {ours} times, in their order {plain}."
        ]
    if gpus(cluster) and any(table.device.kind == "cpu" for table in cluster.nodes):
        remarks.append("Machines without a GPU are left out.")
    return remarks


def slower(seconds: float, reference: float) -> str:
    """How much longer `seconds` takes than `reference`, in words."""
    percent = round(100 * (seconds / reference - 1))
    if percent == 0:
        return "as fast"
    if percent >= 100:
        times = seconds / reference
        return f"{round(times, 1):g}x slower" if times < 10 else f"{times:,.0f}x slower"
    return f"{percent} % slower" if percent > 0 else f"{-percent} % faster"


def _change(seconds: float, reference: float) -> str:
    """How much longer the best plan without something takes. Trials and ties are stronger than an estimate."""
    return f"{'it' if seconds > 1.005 * reference else 'by estimate it'} is {slower(seconds, reference)}"


# --- what the others lose ----------------------------------------------------------------------------------------


def runners_up(request: Request, result: SearchResult, option: Option) -> list[RunnerUp]:
    """The best plan of each other kind (algorithm, pipeline, sharding, recomputation), fastest first."""
    first: dict[tuple[Any, ...], Option] = {}
    for candidate in (option, *result.options):
        layout = candidate.layout
        sharded = (layout.params > 1, layout.grads > 1, layout.optimizer > 1)
        first.setdefault((layout.algorithm, layout.pp > 1, sharded, layout.recompute, layout.world), candidate)
        if len(first) > RUNNERS_UP:
            break
    return [_runner_up(request, candidate, option, result.tie) for candidate in list(first.values())[1:]]


def _runner_up(request: Request, candidate: Option, best: Option, tie: float) -> RunnerUp:
    layout = candidate.layout
    slower = _gain(candidate, best)
    gain = _gain(best, candidate)
    more = candidate.peak - best.peak
    mechanisms, mode, exchanged = (
        key > best_key for key, best_key in zip(layout.key(), best.layout.key(), strict=True)
    )
    worse = "exchanges states in every micro-batch" if exchanged else "holds more"
    worse = "is more complex" if mechanisms else "recomputes more" if mode else worse
    why = f", within the tie, but {worse}" if gain <= tie else f" by estimate, but {_STAY_WHOLE}"
    loses = f"{slower:.1%} slower" if slower >= 0 else f"{_faster(gain)}{why}"
    if more > 0:
        loses += f", {units.show_size(more)} more memory"
    samples = -(-request.profile.global_batch // layout.dp)
    return RunnerUp(
        layout=space.view(layout, -(-samples // layout.micro_batch), request.precision),
        ranks=int(layout.world),
        threads=layout.threads,
        step_seconds=candidate.seconds,
        peak_bytes=candidate.peak,
        loses=loses,
    )
