"""What a plan says of the toy schedule."""

from __future__ import annotations

from typing import ClassVar

from espalier.plan.base import ChoiceState


class ReversedBatchesState(ChoiceState, frozen=True):
    """Of how many micro-batches the order is reversed."""

    name: ClassVar[str] = "reversed_batches"
    batches: int = 0


STATE = ReversedBatchesState
