"""Drawn batches in a plan: whether steps train on them. Data only; no torch."""

from __future__ import annotations

from typing import ClassVar

from espalier.plan.base import ChoiceState
from espalier.recipe.graphs import Batches


class DiskBatchesState(ChoiceState, frozen=True):
    """`batches`: what a step trains on, where the recipe left that open (`graph.fanout = "auto"`)."""

    name: ClassVar[str] = "disk_batches"
    batches: Batches | None = None


STATE = DiskBatchesState
