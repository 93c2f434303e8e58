"""Packed features in plans (DiskGNN): the levels that a graph's features wait on, and what packing and reading take.

Sizes and seconds are those of `mechanisms.disk_batches.cost`, before anything is sampled. No torch unless a recipe
has a [store].
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from espalier.mechanisms.disk_batches.state import DiskBatchesState
from espalier.plan.base import Plan
from espalier.plan.choice import PlanChoice
from espalier.plan.plan_summary import FEATURES, table_of
from espalier.recipe import units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from espalier.machine.cluster import Cluster, Disk
    from espalier.mechanisms.disk_batches.cost import Levels, StoredFeatures
    from espalier.plan.ask import Ask, PlanDecision


class StoredFeaturesChoice(PlanChoice):
    """Features that a recipe with a [store] packs on disk."""

    def finish(self, best: PlanDecision, ask: Ask) -> Plan:
        """The plan with the levels of its features."""
        return with_levels(best.plan, ask.request.profile.facts["disk_batches"], ask.cluster)


def with_levels(plan: Plan, stored: StoredFeatures, cluster: Cluster) -> Plan:
    """The plan with the bytes of its features, and the seconds by which reading outlasts computing, in sentences too.
    Raises UserError where `store.memory` is too small for a batch."""
    from espalier.mechanisms.disk_batches import cost
    from espalier.mechanisms.disk_batches.mini_batches import MemoryShare
    from espalier.mechanisms.disk_batches.reader import LargestBatch

    predicted, local_ranks = plan.predicted, max(Counter(rank.node for rank in plan.ranks).values())
    rank, draws = plan.ranks[0], stored.draws
    near = 0
    cuts = -(-rank.samples // plan.micro_batch)
    ratio = (draws.inputs or 1.0) / replace(draws, inputs=None).used
    draws = replace(draws, items=draws.items * local_ranks // len(plan.ranks), batch=plan.micro_batch, inputs=None)
    draws = replace(draws, inputs=draws.used * ratio)
    largest = LargestBatch(int(draws.inputs or 0), int(4 * (draws.edges + draws.used)))
    hot = MemoryShare(stored.memory, local_ranks, cuts).hot_bytes(largest, stored.row)
    limit = None if stored.disk is None else stored.disk // stored.row_bytes
    levels = cost.expected(draws, hot // stored.row_bytes, limit, stored.row_bytes)
    disks = table_of(plan, cluster).disks
    why = (_levels(levels, stored), *([_packing(levels, stored, disks[0])] if disks else []))
    if stored.edge_bytes:
        why = (*why, _edges(stored, disks[0] if disks else None))
    if stored.inferred is not None:
        why = (*why, *_inference(stored.inferred(int((stored.memory - levels.hot_bytes) // local_ranks))))
    if predicted is not None:
        resident = (stored.memory - hot + levels.hot_bytes) / local_ranks
        if rank.device.startswith("cuda"):
            free = max(0.0, predicted.memory_limit - predicted.memory_bytes["peak"])
            resident = near = int(min(levels.hot_bytes, free / 2 if stored.device is None else stored.device))
            why = (*why, f"{FEATURES}: {units.show_size(near)} of those in memory are on each GPU too.")
        elif stored.device:
            why = (*why, f"{FEATURES}: store.device has no effect on processors.")
        steps = max(1.0, levels.batches / (local_ranks * cuts))
        wait = cost.epoch_seconds(levels, disks[0]) / steps - predicted.step_seconds if disks else 0.0
        memory = {**predicted.memory_bytes, "features": resident, "peak": predicted.memory_bytes["peak"] + resident}
        predicted = predicted.longer("features", max(0.0, wait)).changed(memory_bytes=memory)
    if near:
        plan = plan.with_state(DiskBatchesState(device=near))
    return plan.changed(predicted=predicted, why=(*why, *plan.why))


def _levels(levels: Levels, stored: StoredFeatures) -> str:
    """How many bytes are where."""
    size = units.show_size
    cache = (
        f"{size(levels.cache_bytes)} in a cache on disk that {levels.length:,} batches share" if levels.cache else ""
    )
    parts = [f"{size(levels.hot_bytes)} in host memory (store.memory = {size(stored.memory)})", cache]
    packed = f"{size(levels.packed_bytes)} packed by batch"
    there = f"{size(levels.disk_bytes)} of disk in {stored.folder}"
    return f"{FEATURES} ({size(stored.file_bytes)}): {', '.join(filter(None, parts))}, {packed}; {there}."


def _edges(stored: StoredFeatures, disk: Disk | None) -> str:
    """Why edges are sampled on disk, and what it takes."""
    size, reading = units.show_size, ""
    if disk is not None:
        read, seconds = stored.sampling(disk)
        reading = f": {size(read)} are read once for the pool, in {units.show_seconds(seconds)}"
    does_not_fit = f"as they do not fit in store.memory = {size(stored.memory)}"
    return f"{FEATURES} come with edges ({size(stored.edge_bytes)}) that are sampled on disk, {does_not_fit}{reading}."


def _inference(layers: Sequence[Any]) -> list[str]:
    """How results of layers lie on disk where all nodes are inferred, and what reading them takes."""
    sentences, show = [], units.show_size
    for at, layer in enumerate(layers, 1):
        results = f"{FEATURES}: where all nodes are predicted, results of layer {at}"
        both = f"{show(layer.condensed)} are read instead of {show(layer.plain)}"
        more = f"{show(layer.written)} more are written"
        if layer.pays:
            sentences.append(
                f"{results} are written by ranges with the rows that each reads (condensed): {both}, {more}."
            )
        elif layer.written:
            sentences.append(f"{results} are written by node: condensed by ranges {both}, but {more}.")
    return sentences


def _packing(levels: Levels, stored: StoredFeatures, disk: Disk) -> str:
    """What packing takes and after how many epochs it pays."""
    from espalier.mechanisms.disk_batches import cost

    nodes = len(stored.draws.degrees)
    once = cost.packing_seconds(levels, stored.file_bytes, disk)
    read, gathered = cost.epoch_seconds(levels, disk), cost.gather_seconds(levels, nodes, disk)
    epochs = cost.break_even(levels, nodes, stored.file_bytes, disk)
    pays = "packing pays in the first epoch" if epochs < 1 else f"packing pays after {epochs:,.1f} epochs"
    pays = pays if epochs < float("inf") else "packing saves no time on this disk"
    show = units.show_seconds
    reads = f"{units.show_size(levels.epoch_bytes)} are read in an epoch, in {show(read)}"
    return (
        f"{FEATURES} are packed once, in {show(once)}; {reads}, page by page from their file {show(gathered)}: {pays}."
    )


CHOICE = StoredFeaturesChoice()
