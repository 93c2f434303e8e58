"""What checkpoints cost a plan: how often it saves (`checkpoint.every`), what copies in memory take (`faults.memory`).

After Acme (arXiv 2403.07648), section 6.1: only the copy stops training, so that is the stall foretold here, by Young's
formula; the run measures its own saves and corrects it (`checkpoint.save_interval`). Copies in memory never decide
whether a plan fits: a run keeps none where they take more than it allows them (`checkpoint.in_memory`).
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from espalier.checkpoint import save_interval, shared_memory, young_daly
from espalier.machine.cluster import Cluster, catalogue
from espalier.plan import plan_summary
from espalier.plan.axes.offload import NODE, PCIE
from espalier.plan.base import RESIDENT, AdaptiveRule, Plan, Predicted
from espalier.plan.collective_time import gpus
from espalier.recipe import Checkpoint, units
from espalier.recipe.cache_dir import free_bytes
from espalier.recipe.errors import UserError

NAME = "checkpoint.every"
FAILURES = "mtbf"
COPIES = "copies"
STAGING = "staging"
"""Kind of memory: what a checkpoint is written from while training goes on; 0: training waits."""
LEAST = 1
MOST = 1_000_000


def paced(plan: Plan, options: Checkpoint, cluster: Cluster) -> Plan:
    """The plan with the rule that its checkpoints follow, and why; as it is where `options` say how often."""
    if options.every != "auto" or plan.predicted is None or plan.offload == NODE:
        return plan  # the files of optimizer nodes are the checkpoint
    state = sum(plan.predicted.state_bytes.values())
    ranks = max(Counter(rank.node for rank in plan.ranks).values())  # that copy at once on one machine
    bandwidth = min(table.device.memory_bandwidth for table in cluster.nodes)  # of reading plus writing
    seconds = state / PCIE if gpus(cluster) else 2 * state * ranks / bandwidth
    step = plan.predicted.step_seconds
    disks = [disk.write for node in cluster.nodes for disk in node.disks if disk.write]
    machines = len({rank.node for rank in plan.ranks})
    limits = [units.rate(options.rate, "checkpoint.rate") * machines] if options.rate else []
    written = checkpoint_bytes(plan) / min([*disks, *limits], default=math.inf)
    writer = "checkpoint.rate" if limits and limits[0] < min(disks, default=math.inf) else "the disk"
    between, sources = between_failures(plan, cluster)
    interval = save_interval.choose(seconds, written, step, between)
    often = "every step" if interval.steps == 1 else f"every {interval.steps} steps"
    why = (
        f"A checkpoint {often} at first: a copy of {units.show_size(state)} should take {units.show_seconds(seconds)}, "
        + (f"{writer} writes one in {units.show_seconds(written)}, " if written else "")
        + f"and a failure is expected every {between / 3600:,.{int(between < 36e3)}f} hours ({sources}); what saves "
        "really cost, and failures, correct it."
    )
    rules = (
        AdaptiveRule(name=NAME, start=float(interval.steps), low=LEAST, high=MOST, signal="cost of a save, failures"),
        AdaptiveRule(name=FAILURES, start=between, low=0, high=3600 * MOST, signal="failures"),
    )
    return plan.changed(rules=(*plan.rules, *rules), why=(*plan.why, why))


def between_failures(plan: Plan, cluster: Cluster) -> tuple[float, str]:
    """Mean seconds between two failures of the devices and machines of a plan's ranks, and what that rests on."""
    places = plan_summary.places_of(plan, cluster)
    rate_of = {id(table): catalogue.failure_rate(table) for table in {id(p.table): p.table for p in places}.values()}
    parts: dict[catalogue.FailureRate, set[int]] = {}
    for place in places:
        rate = rate_of[id(place.table)]
        parts.setdefault(rate, set()).add(place.rank if rate.of == "device" else place.node)
    sources = "; ".join(f"{rate.hours:,.6g} of a {rate.of}, {rate.source}" for rate in parts)
    return 3600 / sum(len(failing) / rate.hours for rate, failing in parts.items()), sources


def checkpoint_bytes(plan: Plan) -> float:
    """Parameters and optimizer states of the whole model: what one checkpoint takes, without its manifest."""
    if plan.predicted is None:
        return 0.0
    cut = plan.layout.tp * plan.layout.pp
    return cut * sum(size * plan.layout.shard.get(kind, 1) for kind, size in plan.predicted.state_bytes.items())


def refuse_full(plan: Plan, options: Checkpoint, folder: Path) -> None:
    """Raises UserError where the disk of `folder` has no room for the checkpoints that are kept, the best among them,
    and the next one beside them. Those that are there already are replaced."""
    size = checkpoint_bytes(plan)
    count = options.keep + options.keep_best + 1
    place = Path(options.target).expanduser() if options.target else folder
    if options.target and "://" in options.target:
        return  # not a disk of this machine
    present = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    free = free_bytes(place)
    if (lacking := count * size - present - free) > 0:
        raise UserError(
            f"The checkpoints in {place} need {units.show_size(lacking)} ({lacking:,.0f} bytes) more than is free.",
            why=f"{count} of {units.show_size(size)} each: checkpoint.keep = {options.keep}"
            + (", the best one" if options.keep_best else "")
            + f" and the next beside them; {units.show_size(free)} are free",
            do="free some space, checkpoint.target = a folder on another disk, or checkpoint.keep = 1",
        )


def first(plan: Plan) -> tuple[int, float]:
    """Steps until the first checkpoint, and seconds between two failures, as the plan expects them."""
    starts = {rule.name: rule.start for rule in plan.rules}
    return max(1, round(starts.get(NAME, save_interval.FIRST))), starts.get(FAILURES, young_daly.ASSUMED)


def with_staging(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the bytes of the copy of its state from which a checkpoint is written; where a rank on a processor
    has no room for it, training waits for the writing."""
    predicted = plan.predicted
    if predicted is None or gpus(cluster) or plan.offload != RESIDENT:
        return plan  # the host's memory; and what waits on a disk is not copied
    size = sum(predicted.state_bytes.values())
    room = predicted.memory_limit - predicted.memory_bytes["peak"]
    if size <= room:
        return plan.changed(predicted=_holding(predicted, STAGING, size, "parameters and optimizer states, once"))
    predicted = _holding(predicted, STAGING, 0.0, "no room")
    left = f"a copy of its state takes {units.show_size(size)}, {units.show_size(max(0.0, room))} are left"
    return _with(plan, f"Training waits while a checkpoint is written: {left}.", predicted)


def _holding(predicted: Predicted, kind: str, size: float, source: str) -> Predicted:
    """The same with so many more bytes, of a new kind."""
    peak = predicted.memory_bytes["peak"] + size
    return predicted.changed(
        memory_bytes={**predicted.memory_bytes, kind: size, "peak": peak},
        sources={**predicted.sources, kind: source},
    )


def with_copies(plan: Plan, memory: int | str, cluster: Cluster) -> Plan:
    """The plan with the bytes of its copies and why it keeps them, or why not; as it is where none were asked for.

    Args:
        memory: what a machine's copies may take together; `auto`: a quarter of what training leaves free, 0: nothing.
    """
    predicted = plan.predicted
    given = memory if memory == "auto" else units.size(memory, "faults.memory")
    if given == 0 or predicted is None or (given == "auto" and plan.offload != RESIDENT):
        return plan
    count = _count(plan)
    size = count * sum(predicted.state_bytes.values())
    taken = f"{count} cop{'y' if count == 1 else 'ies'} of a rank's state (faults.memory): {units.show_size(size)}"
    on_gpus = gpus(cluster)
    ranks = max(Counter(rank.node for rank in plan.ranks).values())
    used = sum(predicted.waiting_bytes.values()) if on_gpus else predicted.memory_bytes["peak"]
    if isinstance(given, str):
        tables = [place.table for place in cluster.devices()]
        sizes = [table.memory or math.inf if on_gpus else table.device.memory for table in tables]
        allowed = max(0.0, min(sizes) - ranks * used) / 4 / ranks
    else:
        allowed = given / ranks
    if size > allowed:
        return _with(plan, f"No copies in memory: {taken}, a rank may use {units.show_size(allowed)} for them.")
    if on_gpus:
        return _with(plan, f"{taken} of the host's memory, none of the GPU's.")
    room = predicted.memory_limit - predicted.memory_bytes["peak"]
    if size > room:
        left = f"{units.show_size(max(0.0, room))} of the limit are left; faults.memory=0 keeps none"
        return _with(plan, f"Copies in memory come on top of the peak: {taken}, {left}.")
    source = "parameters and optimizer states, once for each copy in memory"
    return _with(plan, f"{taken} of memory.", _holding(predicted, COPIES, size, source))


def _count(plan: Plan) -> int:
    """Copies in a rank's care: its own, and those of another where a machine's loss would lose a part of the state."""
    if len({rank.node for rank in plan.ranks}) == 1:
        return shared_memory.slots(len(plan.ranks))
    shards = any(len(part) > 1 for unit in plan.units for part in (unit.params, unit.grads, unit.optimizer))
    cut = shards or len(plan.stages) > 1 or any(stage.tensor > 1 for stage in plan.stages)
    return shared_memory.SLOTS * (2 if cut else 1)


def _with(plan: Plan, why: str, predicted: Predicted | None = None) -> Plan:
    return plan.changed(predicted=predicted or plan.predicted, why=(*plan.why, why))
