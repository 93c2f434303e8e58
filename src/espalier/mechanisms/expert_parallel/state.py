"""Experts over ranks in a plan: which rank of a group holds which. Data only; no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from espalier.plan.base import Cell, ChoiceState, Plan, nonsense


class ExpertParallelState(ChoiceState, frozen=True):
    """`experts`: of each rank of an expert group, the experts of every layer that it holds; empty: every rank holds
    all. The groups are consecutive ranks of those that hold the same parameters."""

    name: ClassVar[str] = "expert_parallel"
    experts: tuple[tuple[int, ...], ...] = ()

    @property
    def exchanged(self) -> str:
        return "experts on several ranks" if self.experts else ""

    @property
    def layout(self) -> dict[str, Any]:
        return {"ep": max(1, len(self.experts))}

    def cells(self, plan: Plan, origin: str) -> list[Cell]:
        """See `ChoiceState.cells`: those of the stages. Raises UserError unless each expert is held once."""
        numbers = sorted(expert for experts in self.experts for expert in experts)
        if numbers != list(range(len(numbers))):
            listed = ", ".join(map(str, numbers))
            raise nonsense(origin, f"its expert ranks hold the experts {listed}; each is held once, numbered from 0")
        return []


STATE = ExpertParallelState
