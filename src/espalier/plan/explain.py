"""Every sentence about a plan: why this one, what the others lose, and why none can be made. No torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from espalier import units
from espalier.cluster import Cluster, machine_order
from espalier.config import Pin
from espalier.errors import UserError
from espalier.plan import collective_time, memory_model, pins, search, step_time
from espalier.plan import layouts as space
from espalier.plan.base import Predicted, RunnerUp
from espalier.plan.collective_time import gpus, seats
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.estimate import by_mechanism, estimate, samples_each
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.plan.search import Found, Option
from espalier.shard.flat_layout import BUCKET
from espalier.shard.placement_plan import Prefetch

RUNNERS_UP = 6
"""How many other plans are told, the best of each kind."""
MOST_GROWTH = 10
"""How many times the cluster is doubled in search of a size that fits."""


class DoesNotFit(UserError):
    """No layout fits in memory. Exit code 2."""


def label(layout: Layouts) -> str:
    """A layout in a few words."""
    return str(space.view(layout, 1, ""))


def why(request: Request, found: Found, option: Option, predicted: Predicted) -> list[str]:
    """The sentences that defend an option, with their numbers."""
    layout = option.layout
    fastest = found.options[0] if found.options else option
    said = [f"{request.pin.ranks} ranks were asked for."] if (request.pin.ranks or 0) > 1 else []
    device = "GPU" if gpus(option.cluster) else "rank"
    said += [
        f"Of {found.priced:,} layouts priced, {label(layout)} on {units.plural(layout.world, device)}: "
        f"{units.show_seconds(predicted.step_seconds)} per step, give or take {predicted.spread:.0%}."
    ]
    if fastest is not option and fastest.seconds < option.seconds:
        said.append(_passed_over(found, fastest, option))
    if option.fits:
        said += _states(request, found, option)
        said += _gathers(request, option) + _pieces(request, option)
        said += _cuts(request, found, option, predicted)
    used = int(layout.world)
    there = sum(request.precision in place.table.device.flops for place in option.cluster.devices())
    if used < there and not request.pin.ranks:
        whole = found.best(lambda one: one.layout.world == there)
        beside = "no plan uses them" if whole is None else f"with all, {_change(whole.seconds, option.seconds)}"
        said.append(f"{there - used} of {there} devices are left out: {beside}.")
    if option.shares is not None:
        told = " and ".join(str(share) for share in option.shares)
        said.append(f"Devices differ in speed: ranks have up to {told} samples, by their speed.")
    elif option.speeds is not None:
        told = " and ".join(f"{speed:.2f}" for speed in option.speeds)
        said.append(f"Devices differ in speed: ranks have {told} of the mean number of tokens, by their speed.")
    elif len({id(place.table.device) for place in seats(option.cluster, used)}) > 1 and not option.cluster.same_speed:
        said.append("Devices differ in speed and shares are equal, so the slowest sets the step.")
    said += _crowded(option)
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
    looser = found.best(lambda one: one.layout.optimizer == 1 and _same_cut(one.layout, layout))
    if request.pin.shard is not None:
        why = "plan.pin.shard was set"
    elif looser is None:
        why = "replicated they do not fit"
    else:
        why = f"replicated they fit, but {_change(looser.seconds, option.seconds)}"
    return [f"States sharded ({factors}): {why}."]


def prefetch(request: Request, option: Option) -> Prefetch:
    """When the gather of the next layer's weights begins: what takes the shortest time."""
    return next(iter(_gathering(request, option)), "block")


def bucket(request: Request, option: Option) -> int:
    """Bytes of gradients exchanged at once."""
    return int(_inputs(request, option).bucket_bytes)


def _inputs(request: Request, option: Option) -> CostInputs:
    """What is priced of an option, on its first kind of rank."""
    layout = option.layout
    on = collective_time.fleet(option.cluster, int(layout.world), layout.threads)
    return CostInputs(request, replace(on, factors=request.factors), on.kinds[0], layout)


def _gathering(request: Request, option: Option) -> dict[Prefetch, float]:
    size = np.minimum(option.layout.micro_batch, samples_each(request, option.layout))
    return step_time.prefetch(_inputs(request, option), size)


def _pieces(request: Request, option: Option) -> list[str]:
    """Why gradients are exchanged in larger pieces than usual."""
    chosen = bucket(request, option)
    if request.bucket_bytes is not None or chosen <= BUCKET or option.layout.params > 1:
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
    (chosen, taken), *others = [*_gathering(request, option).items()] or [("block", 0.0)]
    if not taken:
        return []
    lost = [f"{_STARTS[start]}, {slower(seconds, taken)}" for start, seconds in others]
    why = f"({'; '.join(lost)}, in each layer)" if lost else "(it was set)"
    return [f"Weights of a block are gathered {_STARTS[chosen]} {why}."]


def _same_cut(one: Layouts, other: Layouts) -> bool:
    return (one.tp, one.sp, one.pp, one.world) == (other.tp, other.sp, other.pp, other.world)


def _cuts(request: Request, found: Found, option: Option, predicted: Predicted) -> list[str]:
    layout, said = option.layout, []
    for field, name, part in (
        ("tp", f"Matrices cut over {layout.tp} ranks ({layout.algorithm})", "tensor"),
        ("sp", _sequence(layout), "sequence"),
        ("pp", f"{layout.pp} pipeline stages", "pipeline"),
    ):
        if getattr(layout, field) > 1:
            why = "it was set" if getattr(request.pin, field) is not None else _without_it(found, option, field, 1)
            said.append(f"{name}, at {units.show_seconds(by_mechanism(predicted.terms)[part])} a step: {why}.")
    if request.pin.micro_batch is not None:
        said.append(f"Micro-batch {layout.micro_batch}: it was set.")
    if request.pin.recompute or request.recompute:
        said.append(f"Recompute {layout.recompute}: it was set.")
    elif layout.recompute != "none":
        why = _without_it(found, option, "recompute", "none")
        said.append(f"Activations are recomputed ({layout.recompute}): {why}.")
    return said


def _sequence(layout: Layouts) -> str:
    """How sequences are cut."""
    parts = [f"{layout.hp} of heads"] * (layout.hp > 1) + [f"{layout.cp} of context"] * (layout.cp > 1)
    rings = f", in rings of {layout.window}" if 1 < layout.window < layout.cp else ""
    return f"Sequences cut over {layout.sp} ranks ({' x '.join(parts)}{rings})"


def _without_it(found: Found, option: Option, field: str, value: Any) -> str:
    """What the best layout whose `field` has that plain `value` loses."""
    without = found.best(lambda one: getattr(one.layout, field) == value)
    return "without, " + ("nothing fits" if without is None else _change(without.seconds, option.seconds))


def _passed_over(found: Found, fastest: Option, option: Option) -> str:
    """Why the fastest by estimate is not the plan."""
    gain = _gain(option, fastest)
    tie = f"a tie (within {found.tie:.0%}), which goes to the simpler plan, then to less memory"
    faster = f"{label(fastest.layout)} is {_faster(gain)} by estimate"
    return f"{faster}, but {_STAY_WHOLE}." if gain > found.tie else f"{faster}: {tie}."


_STAY_WHOLE = "on one machine states are not sharded where they fit, as the gain is below the error of the estimate"


def _gain(option: Option, other: Option) -> float:
    """By how much `other` is faster: as many times the steps a second, less one."""
    return option.seconds / other.seconds - 1


def _faster(gain: float) -> str:
    """A gain in words."""
    return f"{gain:.1%} faster" if gain < 1 else f"{1 + gain:.3g} times as fast"


def _crowded(option: Option) -> list[str]:
    """The remark when ranks have more threads than there are cores."""
    cluster, layout = option.cluster, option.layout
    cores = min(max(1, table.cores) for table in cluster.nodes)
    nodes = [place.node for place in seats(cluster, int(layout.world))]
    here = max(Counter(nodes).values())
    if gpus(cluster) or here * layout.threads <= cores:
        return []
    return [f"{here} ranks x {layout.threads} threads share {cores} cores."]


def seating(cluster: Cluster) -> list[str]:
    """The remarks when ranks do not sit on machines in the order of the cluster file, or not on all of them."""
    said, asked = [], tuple(range(cluster.machines))
    if cluster.ring != asked:
        ours, plain = (machine_order.crossings(cluster.links, one) for one in (cluster.ring, asked))
        machines = ", ".join(map(str, cluster.ring))
        said += [
            f"Ranks follow machines {machines}: a ring crosses the slowest links {ours} times, in their order {plain}."
        ]
    if gpus(cluster) and any(table.device.kind == "cpu" for table in cluster.nodes):
        said.append("Machines without a GPU are left out.")
    return said


def slower(there: float, here: float) -> str:
    """How much longer `there` takes than `here`, in words."""
    percent = round(100 * (there / here - 1))
    if percent == 0:
        return "as fast"
    if percent >= 100:
        times = there / here
        return f"{round(times, 1):g}x slower" if times < 10 else f"{times:,.0f}x slower"
    return f"{percent} % slower" if percent > 0 else f"{-percent} % faster"


def _change(there: float, here: float) -> str:
    beside = "" if there > 1.005 * here else ", and more complex or larger"
    return f"it is {slower(there, here)}{beside}"


# --- what the others lose ----------------------------------------------------------------------------------------


def runners_up(request: Request, found: Found, option: Option) -> list[RunnerUp]:
    """The best plan of each other kind (algorithm, pipeline, sharding, recomputation), fastest first."""
    first: dict[tuple[Any, ...], Option] = {}
    for one in (option, *found.options):
        layout = one.layout
        sharded = (layout.params > 1, layout.grads > 1, layout.optimizer > 1)
        first.setdefault((layout.algorithm, layout.pp > 1, sharded, layout.recompute, layout.world), one)
        if len(first) > RUNNERS_UP:
            break
    return [_runner_up(request, one, option, found.tie) for one in list(first.values())[1:]]


def _runner_up(request: Request, one: Option, best: Option, tie: float) -> RunnerUp:
    layout = one.layout
    slower, gain, more = _gain(one, best), _gain(best, one), one.peak - best.peak
    mechanisms, mode, exchanged = (here > there for here, there in zip(layout.key(), best.layout.key(), strict=True))
    worse = "exchanges states in every micro-batch" if exchanged else "holds more"
    worse = "is more complex" if mechanisms else "recomputes more" if mode else worse
    why = f", within the tie, but {worse}" if gain <= tie else f" by estimate, but {_STAY_WHOLE}"
    loses = f"{slower:.1%} slower" if slower >= 0 else f"{_faster(gain)}{why}"
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


# --- why there is none -------------------------------------------------------------------------------------------


def refusal(request: Request, cluster: Cluster, found: Found) -> UserError:
    """The error when nothing fits: the least-violating layout, its missing bytes by kind, and what would help."""
    nearest = found.closest
    if nearest is None:
        return _no_layout(request, cluster)
    predicted = estimate(request, nearest.cluster, nearest.layout)
    kinds = {name: size for name, size in predicted.memory_bytes.items() if name != "peak" and size}
    told = ", ".join(
        f"{kind} {units.show_size(size)}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1])
    )
    limit = nearest.peak - nearest.over
    largest = max(kinds, key=lambda kind: kinds[kind])
    return DoesNotFit(
        f"The model does not fit: rank {_fullest(request, nearest)} needs {units.show_size(nearest.peak)} and may use "
        f"{units.show_size(limit)}, {units.show_size(nearest.over)} are missing, most of it {largest}.",
        why=f"the closest of {found.priced:,} layouts is {label(nearest.layout)} on "
        f"{nearest.layout.world} devices: {told}",
        do=", or ".join([*cures(request, cluster, nearest), *_smaller(largest)]),
    )


def _smaller(largest: str) -> list[str]:
    """What makes the largest kind of memory smaller at a price that the reader must judge."""
    return {"activations": ["a smaller train.sequence"], "buckets": ['comm.bucket="1MiB"']}.get(largest, [])


def _no_layout(request: Request, cluster: Cluster) -> UserError:
    """The error when pins and demands leave no layout: which one it is, and the nearest value that leaves some."""
    for name, value in pins.given(request.pin):
        if name in ("threads", "prefetch"):
            continue
        others = search.search(replace(request, pin=_without(request.pin, name)), cluster)
        there = sorted({_value(option.layout, name) for option in others.options})
        if not there:
            continue
        near = min(there, key=lambda one: (abs(one - value), one)) if isinstance(value, int) else there[0]
        return UserError(
            f"plan.pin.{name} = {value!r} leaves no layout on this cluster, with the other options as they are.",
            why="degrees multiply to the ranks, divide heads and sequence, and shards nest in dp x sp",
            do=f"plan.pin.{name}={near}, or leave it out",
        )
    free = {"redundancy": replace(request, redundancy=1), "max_devices": replace(request, max_devices=None)}
    for name, other in free.items():
        if search.search(other, cluster).options:
            return UserError(
                f"plan.{name} = {getattr(request, name)} leaves no layout, with the pins as they are.",
                do=f"another plan.{name}, or fewer pins",
            )
    told = ", ".join(f"plan.pin.{name}" for name, _ in pins.given(request.pin))
    return UserError(
        "No layout satisfies all constraints.",
        why="together the pins, the batch and the cluster allow none" + (f" ({told})" if told else ""),
        do="leave some of them out, or a train.batch_tokens that the ranks can share",
    )


def _without(pin: Pin, name: str) -> Pin:
    first, _, state = name.partition(".")
    if not state or pin.shard is None:
        return msgspec.structs.replace(pin, **{first: None})
    return msgspec.structs.replace(pin, shard=msgspec.structs.replace(pin.shard, **{state: None}))


def _value(layout: Layouts, name: str) -> Any:
    known = {"ranks": int(layout.world), "accumulate": 1}
    name = name.partition(".")[2] or name
    return known[name] if name in known else getattr(layout, name)


def _fullest(request: Request, option: Option) -> int:
    """The first rank of the stage that holds most: the first stage, or the last with the head."""
    layout = option.layout
    on = collective_time.fleet(option.cluster, int(layout.world), layout.threads)
    samples = samples_each(request, layout)
    size = np.minimum(layout.micro_batch, samples)
    first, last = memory_model.ends(CostInputs(request, on, on.kinds[0], layout), size, -(-samples // size))
    return 0 if sum(first.values()) >= sum(last.values()) else int(layout.world) - int(layout.world) // layout.pp


def cures(request: Request, cluster: Cluster, nearest: Option) -> list[str]:
    """Changes after which a plan fits, the cheapest first; each was tried. Last the devices that would do as it is."""
    tried = ((change, search.search(wanted, cluster).best()) for change, wanted in _changes(request, cluster))
    told = list(itertools.islice((change for change, best in tried if best is not None), 2))
    if len(told) < 2 and (more := _growth(request, cluster)):
        told.append(more)
    there = min(place.table.device.memory for place in seats(nearest.cluster, int(nearest.layout.world)))
    enough = there * nearest.peak / (nearest.peak - nearest.over)
    larger = f"devices with {units.show_size(enough)} of memory or a smaller model"
    return told if told and request.memory is not None else [*told, larger]


def _changes(request: Request, cluster: Cluster) -> Iterator[tuple[str, Request]]:
    """What costs nothing but a word in the recipe."""
    if request.memory is not None:
        yield "leave plan.memory out", replace(request, memory=None)
    if request.redundancy > 1:
        yield "plan.redundancy=1", replace(request, redundancy=1)
    if request.max_devices is not None:
        yield "leave plan.max_devices out", replace(request, max_devices=None)
    if _pinned(request.pin):
        yield f"leave {_pinned(request.pin)} out", replace(request, pin=Pin())
    if request.recompute is not None and request.pin.recompute is None:
        yield "leave train.recompute out", replace(request, recompute=None)
    hidden = sum(rows * columns * count for rows, columns, count in request.matrix_shapes)
    if request.optimizer == "adamw" and hidden:
        muon = replace(request, optimizer="muon", matrix_parameters=hidden)
        yield "train.optimizer.kind=muon, which keeps one moment of a matrix instead of two", muon
    if request.optimizer == "muon":
        adamw = replace(request, optimizer="adamw", matrix_parameters=0)
        yield "train.optimizer.kind=adamw, as Muon works on all matrices of one shape at once", adamw
    bf16 = all("bf16" in table.device.flops for table in cluster.nodes)
    if request.precision == "fp32" and bf16 and gpus(cluster):
        yield 'train.precision="bf16"', replace(request, precision="bf16")


def _pinned(pin: Pin) -> str:
    return ", ".join(f"plan.pin.{name}" for name in Pin.__struct_fields__ if getattr(pin, name) is not None)


def _growth(request: Request, cluster: Cluster) -> str:
    """How many machines of the first kind would be enough; empty when not found."""
    if not gpus(cluster) or cluster.pairs:
        return ""

    first, *others = cluster.nodes

    def fits(count: int) -> bool:
        more = msgspec.structs.replace(first, count=count, name="")
        grown = msgspec.structs.replace(cluster, nodes=(more, *others), between=cluster.between or first.inside)
        return search.search(request, grown).best() is not None

    enough = next((first.count << k for k in range(1, MOST_GROWTH) if fits(first.count << k)), 0)
    return f"{enough} machines of {first.devices} {first.device.name} instead of {first.count}" if enough else ""
