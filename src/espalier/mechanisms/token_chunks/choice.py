"""Token chunks in plans: how many tokens loss and feed-forwards take at a time, and why.

Layouts are priced with them (`plan.cost_inputs`). No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from espalier.mechanisms.token_chunks.state import TokenChunksState
from espalier.plan.ask import Ask, PlanDecision
from espalier.plan.base import Plan
from espalier.plan.choice import PlanChoice
from espalier.plan.cost_inputs import CostInputs, limit
from espalier.plan.request import Request
from espalier.plan.search import Option
from espalier.recipe import units
from espalier.recipe.cost import Work


class TokenChunksChoice(PlanChoice):
    """Loss and feed-forwards that take some tokens at a time."""

    def placed(self, plan: Plan, request: Request, option: Option) -> Plan:
        """The plan with its chunks, and what they save."""
        step = CostInputs(request, option.on, option.on.kinds[0], option.layout)
        whole = step.whole(plan.micro_batch)
        loss, feed_forward = (int(np.max(chunk)) for chunk in step.chunks(whole))
        if not loss and not feed_forward:
            return plan
        room = min(limit(kind, request) for kind in option.on.kinds)
        why = [
            *_why("Logits", whole.rest, loss, request.pin.loss_chunk, room),
            *_why("Feed-forwards", whole.layer, feed_forward, request.pin.feed_forward_chunk, room),
        ]
        return plan.with_state(TokenChunksState(loss=loss, feed_forward=feed_forward)).changed(why=(*plan.why, *why))

    def finish(self, best: PlanDecision, ask: Ask) -> Plan:
        """Plans that no search has laid out have the chunks that are pinned."""
        pin, plan = ask.request.pin, best.plan
        if TokenChunksState.name in plan.choices or not (pin.loss_chunk or pin.feed_forward_chunk):
            return plan
        state = TokenChunksState(loss=pin.loss_chunk or 0, feed_forward=pin.feed_forward_chunk or 0)
        return plan.with_state(state)

    def part(self, plan: Plan) -> str:
        """Tokens of a chunk."""
        state = plan.state(TokenChunksState)
        parts = (("loss", state.loss), ("feed-forward", state.feed_forward))
        return ", ".join(f"{name} by {chunk:,} tokens" for name, chunk in parts if chunk)


def _why(what: str, work: Work, chunk: int, pinned: int | None, room: float) -> Iterable[str]:
    """Why something is computed by chunks, if it is."""
    if not chunk or work.chunks is None:
        return
    size = units.show_size(float(work.chunks.size))
    again = "" if work.chunks.divides else ", and once more in backward"
    reason = "it was set" if pinned else f"all at once take {size}, more than a tenth of {units.show_size(room)}"
    yield f"{what} are computed {chunk:,} tokens at a time{again}: {reason}."


CHOICE = TokenChunksChoice()
