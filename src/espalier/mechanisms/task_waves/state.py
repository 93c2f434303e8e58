"""Waves in a plan: which ranks run which operators of which task, and when. Data only; no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from espalier.plan.base import Cell, ChoiceState, Plan, PlanStruct, nonsense


class WaveSlice(PlanStruct, frozen=True):
    """Operators `[first, last)` of a tower, or the head, on the batch of a task: its ranks divide the samples in their
    order here. `begin`, `end`: seconds of a step, as predicted, and `back` those of the backward pass, where it is
    apart."""

    task: str
    node: str
    first: int
    last: int
    ranks: tuple[int, ...]
    begin: float = 0.0
    end: float = 0.0
    back: tuple[float, float] = (0.0, 0.0)


class TaskWavesState(ChoiceState, frozen=True):
    """Of several tasks, what runs side by side (Spindle). All ranks have the same samples.

    `nested`: micro-batches of each task whose passes through the waves are nested (BigMac): see
    `mechanisms.task_waves.waves`.
    """

    name: ClassVar[str] = "task_waves"
    apart: ClassVar[bool] = True
    waves: tuple[tuple[WaveSlice, ...], ...] = ()
    nested: int = 1

    @property
    def slices(self) -> tuple[WaveSlice, ...]:
        """Of all waves."""
        return tuple(part for wave in self.waves for part in wave)

    @property
    def layout(self) -> dict[str, Any]:
        """See `ChoiceState.layout`."""
        return {"dp": 1, "waves": len(self.waves)}

    def cells(self, plan: Plan, origin: str) -> list[Cell]:
        """See `ChoiceState.cells`: one, of all ranks."""
        strangers = {rank for part in self.slices for rank in part.ranks} - set(plan.trainers)
        if strangers:
            told = ", ".join(map(str, sorted(strangers)))
            raise nonsense(origin, f"its waves have the ranks {told}, which do not train")
        return [(plan.ranks[plan.trainers[0]].share, plan.trainers)]


STATE = TaskWavesState
