"""Drawn batches in a plan: whether steps train on them, and what of their features GPUs hold. Data only; no torch."""

from __future__ import annotations

from typing import ClassVar

from espalier.plan.base import ChoiceState
from espalier.recipe.graphs import Batches


class DiskBatchesState(ChoiceState, frozen=True):
    """`batches`: what a step trains on, where the recipe left that open (`graph.fanout = "auto"`); `device`: bytes of
    packed features that each rank keeps on its GPU."""

    name: ClassVar[str] = "disk_batches"
    batches: Batches | None = None
    device: int = 0


STATE = DiskBatchesState
