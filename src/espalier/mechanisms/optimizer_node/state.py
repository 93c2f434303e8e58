"""Optimizer nodes in a plan: what their workers hold, and their link. Data only; no torch."""

from __future__ import annotations

from typing import ClassVar

from espalier.plan.base import ChoiceState


class OptimizerNodeState(ChoiceState, frozen=True):
    """Of workers whose model other ranks hold.

    Attributes:
        layer_window: layers whose parameters a worker holds at once; 0: as many as its memory has room for.
        node_link: bytes/s, each way, between a worker (or what aggregates its machine's) and all optimizer nodes;
            0: not known.
    """

    name: ClassVar[str] = "optimizer_node"
    layer_window: int = 0
    node_link: float = 0.0


STATE = OptimizerNodeState
