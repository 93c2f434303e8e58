"""How often a run will save, before any save was measured: Young's formula over what copying its state should take.

After Acme (arXiv 2403.07648), section 6.1: only the copy stops training, so that is the stall foretold here. The run
measures its own saves and corrects this (`checkpoint.pace`).
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from espalier import units
from espalier.checkpoint import interval, pace
from espalier.cluster import Cluster
from espalier.plan.base import Plan, Rule
from espalier.plan.seats import gpus

NAME = "checkpoint.every"
PCIE = 15.75e9
"""Bytes/s from a GPU: PCIe 3.0 with 16 lanes, 8 GT/s each at 128/130 (PCI-SIG), the slowest still in use."""
LEAST, MOST = 1, 1_000_000


def paced(plan: Plan, every: int | Literal["auto"] | None, cluster: Cluster) -> Plan:
    """The plan with the rule that its checkpoints follow, and why; as it is where `every` says how often."""
    if every != "auto" or plan.predicted is None:
        return plan
    state = sum(plan.predicted.memory_bytes.get(kind, 0.0) for kind in ("params", "optimizer"))
    beside = max(Counter(rank.node for rank in plan.ranks).values())  # that copy at once on one machine
    bandwidth = min(place.table.device.memory_bandwidth for place in cluster.devices())  # of reading plus writing
    seconds = state / PCIE if gpus(cluster) else 2 * state * beside / bandwidth
    step = plan.predicted.step_seconds
    found = pace.choose(seconds, 0.0, step, interval.ASSUMED)
    why = (
        f"A checkpoint every {found.steps} steps at first: a copy of {units.show_size(state)} should take "
        f"{units.show_seconds(seconds)}, a step {units.show_seconds(step)}, and with one failure an hour sqrt(2 s M) "
        f"is {units.show_seconds(interval.optimal(seconds, interval.ASSUMED))}; what saves really cost corrects it."
    )
    rule = Rule(name=NAME, start=float(found.steps), low=LEAST, high=MOST, signal="cost of a save, failures")
    return msgspec.structs.replace(plan, rules=(*plan.rules, rule), why=(*plan.why, why))


def first(plan: Plan) -> int:
    """Steps until the first checkpoint."""
    return next((max(1, round(rule.start)) for rule in plan.rules if rule.name == NAME), pace.FIRST)
