"""Late rows in a plan: how old they may be, by machines. Data only; no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from espalier.plan.base import ChoiceState, PlanStruct


class HaloAge(PlanStruct, frozen=True):
    """How many steps old rows between two machines, or inside one, may be where a step does not wait for all."""

    nodes: tuple[int, int]
    steps: Annotated[int, msgspec.Meta(ge=0)]


class HaloExchangeState(ChoiceState, frozen=True):
    """Of rows of a cut graph that may be late, where these differ from one step; see
    `mechanisms.halo_exchange.quantized_exchange`."""

    name: ClassVar[str] = "halo_exchange"
    halo_ages: tuple[HaloAge, ...] = ()


STATE = HaloExchangeState
