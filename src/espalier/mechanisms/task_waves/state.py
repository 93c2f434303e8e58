"""Waves in a plan: which ranks run which operators of which task, and when. Data only; no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from espalier.plan.base import Cell, ChoiceState, Plan, PlanStruct, nonsense
from espalier.recipe import units

if TYPE_CHECKING:
    from espalier.track.charts import TimetableBar

HEAD = "head"
"""The part of a task that gives its losses, as `parallel.workload.HEAD`, which loads torch."""


def rows(samples: int, ranks: int, place: int) -> tuple[int, int]:
    """The samples `[first, last)` of the rank at that place of a group."""
    return place * samples // ranks, (place + 1) * samples // ranks


def crossings(samples: int, source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(sender, receiver, first, last) of the samples that go from one group to another, or stay where sender is
    receiver."""
    for (a, sender), (b, receiver) in itertools.product(enumerate(source), enumerate(target)):
        (low, high), (start, stop) = rows(samples, len(source), a), rows(samples, len(target), b)
        first = max(low, start)
        last = min(high, stop)
        if first < last:
            yield sender, receiver, first, last


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

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.end - self.begin + self.back[1] - self.back[0]

    @property
    def words(self) -> str:
        """What it is, and the seconds that it takes."""
        blocks = f", blocks {self.first} to {self.last}" if self.node != HEAD else ""
        ranks = units.plural(len(self.ranks), "rank")
        return f"{self.node} of {self.task}{blocks} on {ranks}: {units.show_seconds(self.seconds)}"


class TaskWavesState(ChoiceState, frozen=True):
    """Of several tasks, what runs side by side (Spindle). All ranks have the same samples.

    `nested`: micro-batches of each task whose passes through the waves are nested (BigMac): see
    `mechanisms.task_waves.wave_schedule`.
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
        return {"dp": 1, "waves": len(self.waves)}

    @property
    def cuts(self) -> Iterator[str]:
        return (f"{part.task}.{part.node}:{part.first}-{part.last}@{part.ranks}" for part in self.slices)

    def spans(self) -> list[TimetableBar]:
        """See `ChoiceState.spans`: the slices of each rank, forward and backward, coloured by task."""
        from espalier.track.charts import TimetableBar

        bars = (
            (rank, span, part.task, words)
            for part in self.slices
            for rank in part.ranks
            for span, words in (((part.begin, part.end), part.words), (part.back, f"{part.words}, backward"))
            if span[1] > span[0]
        )
        in_order = sorted(bars, key=lambda bar: (bar[0], bar[1][0]))
        return [TimetableBar(f"rank {rank}", *span, task, words) for rank, span, task, words in in_order]

    def cells(self, plan: Plan, origin: str) -> list[Cell]:
        """See `ChoiceState.cells`: one, of all ranks."""
        strangers = {rank for part in self.slices for rank in part.ranks} - set(plan.trainers)
        if strangers:
            named = ", ".join(map(str, sorted(strangers)))
            raise nonsense(origin, f"its waves have the ranks {named}, which do not train")
        return [(plan.ranks[plan.trainers[0]].share, plan.trainers)]


STATE = TaskWavesState
