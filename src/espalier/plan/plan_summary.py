"""Plan summary: what a plan is, which hardware sets the length of its step, and what its memory is made of. No torch.

Every number is one of `Plan.predicted`; what the search compared is in `plan.explain`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from espalier.machine.cluster import Cluster, Link, Node, Place
from espalier.plan import choice as choices
from espalier.plan.base import Plan, Predicted, Stage
from espalier.plan.choice import Waits
from espalier.recipe import units

COMPUTING = ("forward", "backward", "recompute", "optimizer", "launch")
"""Terms of a step in which its devices compute; in the others they wait for links, or for one another."""
FEATURES = "Features"
"""How sentences about features on disk begin (`mechanisms.disk_batches.choice`)."""
SHOWN = 0.001
"""Share of a step below which a term is not worth a sentence."""


def sentences(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The plan with its numbers, what the step waits for and over which links, and its memory."""
    predicted = plan.predicted
    if predicted is None:
        return ()
    kinds = [(size, kind) for kind, size in predicted.memory_bytes.items() if kind != "peak" and size]
    listed = ", ".join(
        f"{kind.replace('_', ' ')} {units.show_size(size)}" for size, kind in sorted(kinds, reverse=True)
    )
    peak = units.show_size(predicted.memory_bytes["peak"])
    limit = units.show_size(predicted.memory_limit)
    each = "rank" if plan.ranks[0].device == "cpu" else "GPU"
    memory = f"Memory per {each}: {peak} of {limit} ({listed})."
    return (
        _headline(plan, predicted, cluster),
        *_waits(plan, predicted, cluster),
        memory,
        *(_away(plan, predicted, cluster) if predicted.waiting_bytes else ()),
    )


def _away(plan: Plan, predicted: Predicted, cluster: Cluster) -> Iterator[str]:
    """What waits outside the devices: where, how many bytes of it, and how much longer that makes a step."""
    away = predicted.waiting_bytes
    tier = plan.offload.optimizer
    tier = plan.offload.activations if tier == "device" else tier
    kinds = " and ".join(f"{_WORDS[kind]} ({units.show_size(size)})" for kind, size in away.items())
    slower = f"a step takes {units.show_seconds(predicted.terms.get('offload', 0.0))} longer"
    served = [sentence for choice in choices.of(plan) for sentence in choice.away(plan, kinds, slower)]
    if served:
        yield from served
        return
    each = max(Counter(rank.node for rank in plan.ranks).values()) * sum(away.values())
    where = "host memory"
    if tier == "disk":
        disk = table_of(plan, cluster).disks[0]
        read, written = (units.show_size(speed) for speed in (disk.read, disk.write))
        where = f"disk ({disk.path}: {read}/s read, {written}/s written)"
    yield f"Of each rank {kinds} wait on {where}, {units.show_size(each)} of each machine; {slower}."


_WORDS = {
    "params": "parameters", "grads": "gradients", "optimizer": "optimizer states", "activations": "activations",
    "outer": "what rounds keep", "frozen": "frozen weights",
}  # fmt: skip


def _headline(plan: Plan, predicted: Predicted, cluster: Cluster) -> str:
    layout = plan.layout
    splits = "/".join(str(layout.shard[name]) for name in ("params", "grads", "optimizer"))
    parts = [
        (layout.dp > 1, f"{layout.dp} replicas"),
        *((True, words) for choice in choices.of(plan) if (words := choice.part(plan))),
        (layout.tp > 1, f"matrices cut over {layout.tp}"),
        (layout.heads > 1, f"heads over {layout.heads}"),
        (layout.cp > 1, f"context over {layout.cp}"),
        (layout.pp > 1, f"a pipeline of {layout.pp} stages"),
        (layout.split != (), f"states sharded {splits} (parameters/gradients/optimizer)"),
        (True, f"micro-batch {layout.micro_batch}"),
        (layout.recompute != "none", f"recompute {layout.recompute}"),
    ]
    summary = ", ".join(words for holds, words in parts if holds)
    band = f", give or take {predicted.spread:.0%}" if predicted.spread else ""
    ranks = units.plural(len(plan.trainers), "rank" if plan.ranks[0].device == "cpu" else "GPU")
    summary = f"{summary[0].upper()}{summary[1:]}, {plan.precision}, on {ranks}"
    lacks = "" if plan.executable else f" It does not fit: {plan.missing} are missing."
    return f"{summary}: {units.show_seconds(predicted.step_seconds)} a step{band} ({hardware(plan, cluster)}).{lacks}"


def hardware(plan: Plan, cluster: Cluster) -> str:
    """The devices of a plan, by kind: `8 RTX 4090 in one machine`."""
    places = {place.rank: place for place in places_of(plan, cluster)}.values()
    machines = len({place.node for place in places})
    where = f" in {machines:,} machines" if machines > 1 else " in one machine" if len(places) > 1 else ""
    listed = []
    for (name, cores), count in Counter((place.table.device.name, place.table.cores) for place in places).items():
        many = "one" if count == 1 else f"{count:,}"
        listed.append(f"{many} processor{'s' * (count > 1)} of {cores} cores" if name == "cpu" else f"{many} {name}")
    return ", ".join(listed[:-1]) + " and " * (len(listed) > 1) + listed[-1] + where


def link_words(link: Link, level: Literal["inside", "between"]) -> str:
    """A link by the name of its hardware, or by its bandwidth: `PCI Express 4.0 x16`, `100 Mbit/s between machines`."""
    number, unit = units.show_bits(link.bandwidth).split()
    if level == "between":
        return f"{float(number):g} {unit} between machines"
    clauses = [clause.partition("(")[0].strip() for clause in re.split("[;,]", link.source)]
    return next(
        (clause for clause in clauses if re.search("NVLink|PCI|Infinity Fabric", clause)),
        f"{float(number):g} {unit} inside a machine",
    )


def table_of(plan: Plan, cluster: Cluster) -> Node:
    """The machine of the first rank."""
    return places_of(plan, cluster)[0].table


def places_of(plan: Plan, cluster: Cluster) -> list[Place]:
    """Where each rank sits."""
    slot = {name: int(name.partition(":")[2] or 0) for name in {rank.device for rank in plan.ranks}}
    place_at = {(place.node, place.slot): place for place in cluster.devices()}
    return [place_at[rank.node, slot[rank.device]] for rank in plan.trainer_ranks]


# --- seconds ---------------------------------------------------------------------------------------------------------


def _waits(plan: Plan, predicted: Predicted, cluster: Cluster) -> list[str]:
    """What takes most of the step, and of each mechanism everything that it makes a step wait for."""
    places = places_of(plan, cluster)
    costs = []
    most = (0.0, "")
    for what, names, groups in _mechanisms(plan):
        taken = {words: predicted.terms.get(name, 0.0) for name, words in names.items()}
        total = sum(taken.values())
        if total < SHOWN * predicted.step_seconds:
            continue
        far = any(len({places[rank].node for rank in group}) > 1 for group in groups)
        level: Literal["inside", "between"] = "between" if far else "inside"
        link = link_words(cluster.slowest({places[rank].rank for group in groups for rank in group}, level), level)
        listed = ", ".join(f"{units.show_seconds(value)} {words}" for words, value in taken.items() if value)
        costs.append(f"{what} costs {listed}, over {link}.")
        most = max(most, (total, link))
    step = predicted.step_seconds
    computing = sum(predicted.terms.get(name, 0.0) for name in COMPUTING)
    used = f", at {predicted.mfu:.0%} of the peak" if predicted.mfu else ""
    if computing < most[0]:
        first = f"Waiting for {most[1]} takes {most[0] / step:.0%} of the step, computing {computing / step:.0%}{used}."
    else:
        devices = " and ".join(dict.fromkeys(place.table.device.name for place in places)).replace("cpu", "processors")
        first = f"Computing in {plan.precision} on {devices} takes {computing / step:.0%} of the step{used}."
    return [first, *costs]


def _mechanisms(plan: Plan) -> Iterator[Waits]:
    """Each mechanism that waits for others: its name, its terms of a step in words, and ranks that exchange."""
    stages = plan.stages or (Stage(ranks=plan.trainers),)
    stage = stages[0]
    width = stage.tensor * stage.sequence
    cells = [each.ranks[first : first + width] for each in stages for first in range(0, len(each.ranks), width)]
    alike = [each.ranks[first::width] for each in stages for first in range(width)]
    yield Waits("Cutting matrices", {"tensor": "for exchanges of activations"}, cells)
    yield Waits("Cutting sequences", {"sequence": "for exchanges in attention"}, cells)
    unit = plan.units[0]
    if plan.offload.parameters == "device":
        weights = "Sharding", "for gathers and scatters in every micro-batch", unit.params or unit.grads
    else:
        weights = "Keeping parameters elsewhere", "for gathers of what each rank has of a layer", plan.trainers
    yield Waits(weights[0], {"weights": weights[1]}, [weights[2]])
    yield Waits("Sharding the optimizer", {"refresh": "for gathers of new parameters"}, [unit.optimizer])
    yield Waits("Summing gradients", {"all_reduce": "beyond what backward hides"}, alike)
    waiting = {"pipeline": "to fill and drain", "send": "for messages"}
    columns = [
        column
        for number in dict.fromkeys(each.pipeline for each in stages)
        for column in zip(*(each.ranks[:: each.tensor] for each in stages if each.pipeline == number), strict=False)
    ]
    yield Waits(f"The pipeline of {plan.layout.pp} stages", waiting, columns)
    for choice in choices.of(plan):
        yield from choice.waits(plan)
