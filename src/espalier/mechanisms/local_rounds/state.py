"""Rounds of local steps in a plan: which ranks make a replica, how these agree, and how long rounds are. Data only; no
torch."""

from __future__ import annotations

from typing import ClassVar

from espalier.plan.base import RoundsState


class LocalRoundsState(RoundsState, frozen=True):
    """Of replicas that agree round by round. `adapt`: whether the steps of a round follow the measured waits."""

    name: ClassVar[str] = "local_rounds"
    adapt: bool = True


STATE = LocalRoundsState
