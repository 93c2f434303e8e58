"""Token chunks in a plan: how many tokens loss and feed-forwards take at a time. Data only; no torch."""

from __future__ import annotations

from typing import ClassVar

from espalier.plan.base import ChoiceState


class TokenChunksState(ChoiceState, frozen=True):
    """Tokens whose logits (`loss`), and whose inner activations of one layer (`feed_forward`), are there at a time;
    0: those of the whole micro-batch."""

    name: ClassVar[str] = "token_chunks"
    loss: int = 0
    feed_forward: int = 0


STATE = TokenChunksState
