"""Refusals: why there is no plan, and the cheapest changes after which there is one, each of them planned. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from espalier.machine.cluster import Cluster
from espalier.plan import choice, memory_model, pins, precision, search
from espalier.plan.axes import offload
from espalier.plan.base import RESIDENT
from espalier.plan.collective_time import gpus, seats
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.explain import label
from espalier.plan.layout_estimate import estimate, samples_each
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.plan.search import Option, SearchResult
from espalier.recipe import Adamw, Adapters, Decoder, Gpt, Lora, Muon, Pin, units
from espalier.recipe.errors import UserError

MACHINE = 8
"""Devices that a machine is thought to take before a second machine is bought."""
MOST_MACHINES = 4096
"""Machines up to which a size that fits is looked for."""
HALVINGS = 3
"""Times that sequences are halved in search of a length that fits."""
ABSENT = "not in Espalier: optimizer states in 8 bits"
"""What others do where nothing fits."""
OPTIMIZER = "train.optimizer.kind"
FROZEN = get_args(get_type_hints(Adapters)["frozen"])
"""How weights under adapters are stored, the largest first."""
ASKED = ("free", "factors", "crossings")
"""Of a request, what its recipe does not say."""
SEPARATOR = "\n       "
"""Between two changes: each is a line under the first."""


class DoesNotFit(UserError):
    """No layout fits in memory. Exit code 2."""


def refusal(request: Request, cluster: Cluster, result: SearchResult) -> UserError:
    """The error when nothing fits: the least violating layout, its bytes by kind, and the cheapest changes."""
    nearest = result.closest
    if nearest is None:
        return _no_layout(request, cluster)
    predicted = estimate(request, nearest.cluster, nearest.layout)
    if short := lacking_on_disk(request, nearest):
        return _disk_too_small(request, cluster, nearest, short)
    kinds = {name: size for name, size in predicted.memory_bytes.items() if name != "peak" and size}
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    absent = [ABSENT] if gpus(cluster) and not request.profile.frozen else []
    limit = nearest.peak - nearest.over
    devices = units.plural(int(nearest.layout.world), "device")
    return DoesNotFit(
        f"The model does not fit: rank {_fullest(request, nearest)} needs {units.show_size(nearest.peak)} and may use "
        f"{units.show_size(limit)}, {units.show_size(nearest.over)} are missing, most of it {ordered[0][0]}.",
        why=f"the closest of {result.priced:,} layouts is {label(nearest.layout)} on {devices}: "
        + ", ".join(f"{kind} {units.show_size(size)}" for kind, size in ordered),
        do=SEPARATOR.join([*cures(request, cluster, nearest), *absent]),
    )


def lacking_on_disk(request: Request, option: Option) -> float:
    """Bytes that the disk of a machine lacks for what would wait there; 0: it has room, or nobody knows."""
    if request.free is None or "disk" not in (request.offload.optimizer, request.offload.activations):
        return 0.0
    return max(0.0, away_on_machine(request, option) - offload.SCRATCH * request.free)


def _disk_too_small(request: Request, cluster: Cluster, nearest: Option, short: float) -> DoesNotFit:
    """The error when what waits on disk has no room there."""
    path = nearest.cluster.nodes[0].disks[0].path
    needed = away_on_machine(request, nearest)
    return DoesNotFit(
        f"What is to wait on disk does not fit there: {request.offload} takes {units.show_size(needed)}, and "
        f"{units.show_size(short)} are missing.",
        why=f"the disk of the run's folder has {units.show_size(request.free or 0)} free, of which "
        f"{offload.SCRATCH:.0%} are used ({path} was measured)",
        do=SEPARATOR.join(
            [f"free {units.show_size(short)} there, or --run FOLDER on another disk", *_resident(request, cluster)]
        ),
    )


def _resident(request: Request, cluster: Cluster) -> Iterator[str]:
    """The plan with nothing on disk, where there is one."""
    pin = request.pin.changed(offload="none")
    if cost := planned(request.changed(pin=pin, offload=RESIDENT), cluster):
        yield f'plan.pin.offload="none" ({cost})'


def _no_layout(request: Request, cluster: Cluster) -> UserError:
    """The error when pins and demands leave no layout: which one it is, and the nearest value that leaves some."""
    for name, value in pins.given(request.pin):
        if name in ("threads", "prefetch", "offload", "pipelines"):
            continue
        others = search.search(request.changed(pin=_without(request.pin, name)), cluster)
        there = sorted({_value(option.layout, name) for option in others.options})
        if not there:
            continue
        near = (
            min(there, key=lambda candidate: (abs(candidate - value), candidate))
            if isinstance(value, int)
            else there[0]
        )
        return UserError(
            f"plan.pin.{name} = {value!r} leaves no layout on this cluster, with the other options as they are.",
            why="degrees multiply to the ranks, divide heads and sequence, and shards nest in dp x sp"
            + ", which ep divides" * (request.expert_ranks > 1),
            do=f"plan.pin.{name}={near}, or leave it out",
        )
    for name, free in (("redundancy", 1), ("max_devices", None)):
        if search.search(request.changed(**{name: free}), cluster).options:
            return UserError(
                f"plan.{name} = {getattr(request.recipe.plan, name)} leaves no layout, with the pins as they are.",
                do=f"another plan.{name}, or fewer pins",
            )
    listed = ", ".join(f"plan.pin.{name}" for name, _ in pins.given(request.pin))
    return UserError(
        "No layout satisfies all constraints.",
        why="together the pins, the batch and the cluster allow none" + (f" ({listed})" if listed else ""),
        do="leave some of them out, or a train.batch_tokens that the ranks can share",
    )


def _without(pin: Pin, name: str) -> Pin:
    first, _, state = name.partition(".")
    if not state or pin.shard is None:
        return pin.changed(**{first: None})
    return pin.changed(shard=pin.shard.changed(**{state: None}))


def _value(layout: Layouts, name: str) -> Any:
    known = {"ranks": int(layout.world), "accumulate": 1, "ep": 1}
    name = name.partition(".")[2] or name
    return known[name] if name in known else getattr(layout, name)


def _fullest(request: Request, option: Option) -> int:
    """The first rank of the stage that holds most: the first stage, or the last with the head."""
    layout = option.layout
    on = option.on
    samples = samples_each(request, layout)
    size = np.minimum(layout.micro_batch, samples)
    first, last = memory_model.ends(CostInputs(request, on, on.kinds[0], layout), size, -(-samples // size))
    return 0 if sum(first.values()) >= sum(last.values()) else int(layout.world) - int(layout.world) // layout.pp


# --- what would help ---------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """What to write for an option, by its `key`; what that means for the run; the request after it."""

    key: str
    words: str
    apply: Callable[[Request], Request]
    meaning: str = ""


def cures(request: Request, cluster: Cluster, nearest: Option) -> list[str]:
    """Changes after which a plan fits, the cheapest first; each was planned. Last what only money helps with."""
    groups: dict[str, list[Change]] = {}
    for change in (*_lifted(request), *_held_less(request, cluster)):
        groups.setdefault(change.key, []).append(change)
    advice = [cure for each in choice.asked(request, cluster) for cure in each.cures(request, cluster)]
    for changes in groups.values():
        if _after([changes[-1]], request, cluster):
            mildest = next(change for change in changes if _after([change], request, cluster))
            advice.append(_line([mildest], request, cluster))
    advice = [
        *_room_on_disk(request, cluster),
        *(advice or _together(request, cluster, groups)),
        *_adapters(request, cluster),
    ]
    if more := _more_devices(request, cluster):
        advice.append(more)
    there = min(place.table.device.memory for place in seats(nearest.cluster, int(nearest.layout.world)))
    enough = there * nearest.peak / (nearest.peak - nearest.over)
    if not advice or request.recipe.plan.memory is None:
        advice.append(f"devices with {units.show_size(enough)} of memory or a smaller model")
    return advice


def _after(changes: Iterable[Change], request: Request, cluster: Cluster) -> str:
    """What the plan after all `changes` costs; empty where nothing fits."""
    return planned(reduce(lambda made, change: change.apply(made), changes, request), cluster)


def _line(changes: Iterable[Change], request: Request, cluster: Cluster) -> str:
    """What to write, what it means, and the plan after it."""
    words = " and ".join(change.words for change in changes)
    meanings = "; ".join(change.meaning for change in changes if change.meaning)
    return f"{words}{': ' * bool(meanings)}{meanings} ({_after(changes, request, cluster)})"


def _together(request: Request, cluster: Cluster, groups: Mapping[str, list[Change]]) -> list[str]:
    """Changes that help only together: the strongest of each kind until something fits, then only those that it needs,
    each as mild as it may be."""
    chosen: dict[str, Change] = {}
    for key, changes in groups.items():
        chosen[key] = changes[-1]
        if len(chosen) > 1 and _after(chosen.values(), request, cluster):
            break
    else:
        return []
    for key in [*chosen]:
        fewer = {name: change for name, change in chosen.items() if name != key}
        if _after(fewer.values(), request, cluster):
            chosen = fewer
            continue
        for change in groups[key]:
            if _after({**chosen, key: change}.values(), request, cluster):
                chosen[key] = change
                break
    return [_line(chosen.values(), request, cluster)]


def _room_on_disk(request: Request, cluster: Cluster) -> Iterator[str]:
    """What the disk lacks, where states could wait there."""
    if request.free is None or request.pin.offload not in (None, "disk"):
        return
    asked, result = search.anywhere(replace(request, free=None, offload=RESIDENT), cluster)
    if (best := result.best()) and (short := lacking_on_disk(replace(asked, free=request.free), best)):
        cost = planned(replace(request, free=None, offload=RESIDENT), cluster)
        yield f"free {units.show_size(short)} of the disk, or --run FOLDER on another one ({cost})"


def planned(request: Request, cluster: Cluster) -> str:
    """The seconds and bytes of the plan of `request`; empty where nothing fits."""
    asked, result = search.anywhere(request, cluster)
    if result.best() is None and (groups := pins.expert_groups(request, cluster)):
        asked, result = search.anywhere(replace(request, ep=groups[-1]), cluster)
    if (best := result.best()) is None:
        return ""
    request = asked
    memory = f"{units.show_size(best.peak)} of {units.show_size(best.peak - best.over)}"
    if request.offload != RESIDENT:
        memory += f", {request.offload}: {units.show_size(away_on_machine(request, best))} a machine"
    return f"{units.show_seconds(best.seconds)} a step, {memory}"


def away_on_machine(request: Request, option: Option) -> float:
    """Bytes that wait outside the devices of the machine with most ranks."""
    ranks = Counter(place.node for place in seats(option.cluster, int(option.layout.world)))
    return max(ranks.values()) * sum(estimate(request, option.cluster, option.layout).waiting_bytes.values())


def _lifted(request: Request) -> Iterator[Change]:
    """Without a limit that the recipe set, which costs nothing."""
    pin = request.pin
    options = request.recipe.plan

    def lifted(words: str, **changes: Any) -> Change:
        return Change(words, words, partial(Request.changed, **changes))

    if options.memory is not None:
        yield lifted("leave plan.memory out", memory=None)
    if options.redundancy > 1:
        yield lifted("plan.redundancy=1", redundancy=1)
    if options.max_devices is not None:
        yield lifted("leave plan.max_devices out", max_devices=None)
    given = [name for name in Pin.__struct_fields__ if getattr(pin, name) is not None]
    for name in given if len(given) > 1 else ():
        yield lifted(f"leave plan.pin.{name} out", pin=pin.changed(**{name: None}))
    if given:
        yield lifted(f"leave {', '.join(f'plan.pin.{name}' for name in given)} out", pin=Pin())
    if request.recompute is not None and pin.recompute is None:
        yield lifted("leave train.recompute out", recompute=None)


def _held_less(request: Request, cluster: Cluster) -> Iterator[Change]:
    """Other values of what is trained, in the order of their price: precision, batch, optimizer, states in host memory
    of machines whose size nobody said, sequence; of each option the mildest first."""

    def other(key: str, value: str, meaning: str = "", **changes: Any) -> Change:
        return Change(key, f"{key}={value}", partial(Request.changed, **changes), meaning)

    exact = request.precision in ("fp32", "tf32")
    for name in precision.candidates(cluster) if exact else ():
        if name in ("bf16", "fp16"):
            yield other("train.precision", f'"{name}"', precision=name)
    unknown = bool(gpus(cluster)) and not all(table.memory for table in cluster.nodes)
    whole = request.profile.global_batch
    windows = unknown or any(map(offload.windowed, offload.ways(request, cluster)))
    least = max(pins.expert_groups(request, cluster), default=1)  # each rank of a group needs a sample
    for halved in range(1, (whole // least).bit_length() if windows and request.profile.heads else 0):
        samples = whole >> halved
        tokens = int(samples * request.profile.tokens_per_sample)
        meaning = f"{round(whole / samples)} times as many steps, each noisier"
        yield other("train.batch_tokens", f"{tokens}", meaning, global_batch=samples)
    if request.muon:
        meaning = "Muon works on whole matrices, all of one shape at once"
        yield Change(OPTIMIZER, f"{OPTIMIZER}=adamw", partial(_with_optimizer, options=Adamw()), meaning)
    elif request.profile.hidden:
        meaning = "Muon keeps one moment of a matrix instead of two"
        yield Change(OPTIMIZER, f"{OPTIMIZER}=muon", partial(_with_optimizer, options=Muon()), meaning)
    if unknown and request.pin.offload is None:
        pin = request.pin.changed(offload="host")
        meaning = "if the machines have the memory (nodes.memory)"
        yield other("plan.pin.offload", '"host"', meaning, pin=pin)
    decodes = request.profile.heads > 0 or isinstance(request.recipe.model, Decoder)
    shorter = request.request_of is not None and decodes
    for halved in range(1, HALVINGS + 1 if shorter else 0):
        length = int(request.profile.tokens_per_sample) >> halved
        if length > 1:
            yield Change("train.sequence", f"train.sequence={length}", partial(_with_sequence, length=length))


def _adapters(request: Request, cluster: Cluster) -> Iterator[str]:
    """Adapters beside frozen weights, stored in the first way that fits; else what the smallest takes, and the devices
    that are enough for it."""
    recipe = request.recipe
    batch = request.profile.global_batch
    tune = request.recipe.tune
    if request.request_of is None or not isinstance(recipe.model, Gpt):
        return
    ways = FROZEN
    why = ": adapters beside the frozen weights of model.initial"
    if isinstance(tune, Adapters):
        ways = () if tune.dora else FROZEN[FROZEN.index(tune.frozen) + 1 :]
        why = ""
    made = request
    words = ""
    for frozen in ways:
        fewer = [f'tune.frozen="{frozen}"'] * (frozen != FROZEN[0])
        if isinstance(tune, Adapters):
            made = request.request_of(recipe.changed(tune=tune.changed(frozen=frozen)))
            words = fewer[0]
        else:
            made = request.request_of(recipe.changed(tune=Lora(frozen=frozen)))
            words = ", ".join(['tune.kind="lora"', *fewer])
        made = made.changed(global_batch=batch, **{name: getattr(request, name) for name in ASKED})
        if cost := planned(made, cluster):
            yield f"{words}{why} ({cost})"
            return
    if words and (nearest := search.anywhere(made, cluster)[1].closest):
        peak = units.show_size(nearest.peak)
        limit = units.show_size(nearest.peak - nearest.over)
        more = _more_devices(made, cluster)
        yield f"not enough: {words}, which takes {peak} of {limit}{'; with it ' * bool(more)}{more}"


def _with_optimizer(request: Request, options: Adamw | Muon) -> Request:
    made = request.changed(optimizer=options)
    if request.request_of is None:
        return made
    return replace(made, refuses=request.request_of(made.recipe).refuses)


def _with_sequence(request: Request, length: int) -> Request:
    assert request.request_of is not None
    tokens = int(request.profile.global_batch * request.profile.tokens_per_sample)
    profile = request.request_of(request.changed(sequence=length).recipe).profile
    return replace(request, profile=profile).changed(global_batch=tokens // int(profile.tokens_per_sample))


def _more_devices(request: Request, cluster: Cluster) -> str:
    """The smallest number of devices of the first kind that would be enough; empty where none is found."""
    if not gpus(cluster) or cluster.pairs:
        return ""
    first, *others = cluster.nodes
    alone = first.count == 1 and not others

    def grown_to(count: int, devices: int) -> str:
        more = first.changed(count=count, devices=devices, name="")
        grown = cluster.changed(nodes=(more, *others), between=cluster.between or first.inside)
        return planned(request, grown)

    for devices in range(first.devices + 1, MACHINE + 1) if alone else ():
        if cost := grown_to(1, devices):
            return f"{devices} {first.device.name} in the machine instead of {first.devices} ({cost})"
    each = max(first.devices, MACHINE) if alone else first.devices
    low = first.count
    high = 2 * first.count
    while not grown_to(high, each):
        low = high
        high = 2 * high
        if high > MOST_MACHINES:
            return ""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if grown_to(middle, each) else (middle, high)
    name = first.device.name
    now = f"{first.count * first.devices:,}"
    return f"{high * each:,} {name} in {units.plural(high, 'machine')} instead of {now}"
