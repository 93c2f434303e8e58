"""What copies of the state in memory take of it (`faults.memory`), told once a plan is chosen. No torch.

Copies never decide whether a plan fits: a run keeps none where they take more than it
allows them (`checkpoint.memory`).
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from espalier import units
from espalier.checkpoint import refuge
from espalier.cluster import Cluster
from espalier.plan.base import Plan, Predicted
from espalier.plan.seats import gpus

NAME = "copies"


def priced(plan: Plan, given: int | Literal["auto"], cluster: Cluster) -> Plan:
    """The plan with the bytes of its copies and why it keeps them, or why not; as it is where none were asked for.

    Args:
        given: what a machine's copies may take together; `auto`: a quarter of what training leaves free, 0: nothing.
    """
    predicted = plan.predicted
    if given == 0 or predicted is None:
        return plan
    count = _count(plan)
    size = count * sum(predicted.memory_bytes.get(kind, 0.0) for kind in ("params", "optimizer"))
    taken = f"{count} cop{'y' if count == 1 else 'ies'} of a rank's state (faults.memory) take {units.show_size(size)}"
    if gpus(cluster):
        return _with(plan, f"{taken} of the host's memory, none of the GPU's.")
    here = max(Counter(rank.node for rank in plan.ranks).values())
    if given == "auto":
        least = min(place.table.device.memory for place in cluster.devices())
        allowed = max(0.0, least - here * predicted.memory_bytes["peak"]) / 4 / here
    else:
        allowed = given / here
    room = predicted.memory_limit - predicted.memory_bytes["peak"]
    if size > allowed:
        return _with(plan, f"No copies in memory: {taken}, a rank may use {units.show_size(allowed)} for them.")
    if size > room:
        left = f"{units.show_size(max(0.0, room))} of the limit are left; faults.memory=0 keeps none"
        return _with(plan, f"Copies in memory come on top of the peak: {taken}, {left}.")
    held = {**predicted.memory_bytes, NAME: size, "peak": predicted.memory_bytes["peak"] + size}
    sources = {**predicted.sources, NAME: "parameters and optimizer states, once for each copy in memory"}
    predicted = msgspec.structs.replace(predicted, memory_bytes=held, sources=sources)
    return _with(plan, f"{taken} of memory.", predicted)


def _count(plan: Plan) -> int:
    """Copies in a rank's care: its own, and those of another where a machine's loss would lose a part of the state."""
    if len({rank.node for rank in plan.ranks}) == 1:
        return refuge.slots(len(plan.ranks))
    shards = any(len(part) > 1 for unit in plan.units for part in (unit.params, unit.grads, unit.optimizer))
    cut = shards or len(plan.stages) > 1 or any(stage.tensor > 1 for stage in plan.stages)
    return refuge.SLOTS * (2 if cut else 1)


def _with(plan: Plan, why: str, predicted: Predicted | None = None) -> Plan:
    return msgspec.structs.replace(plan, predicted=predicted or plan.predicted, why=(*plan.why, why))
