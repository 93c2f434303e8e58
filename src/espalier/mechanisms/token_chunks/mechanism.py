"""Token chunks as mechanisms: loss and feed-forwards take some tokens at a time, as the plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from espalier.mechanisms.token_chunks.feed_forward import by_chunks
from espalier.mechanisms.token_chunks.state import TokenChunksState
from espalier.plan.compose import Claim
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism
from espalier.train.seams import fields_of

if TYPE_CHECKING:
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

LOSS = Claim(
    "loss_chunk",
    question="loss",
    needs={"a model"},
    forbids={"the loss is scaled", "a window of layers"},
    option="plan.pin.loss_chunk=2048",
)
"""Its gradients are made before the scale of the loss is known."""
FEED_FORWARD = Claim(
    "feed_forward_chunk",
    question="feed-forward",
    needs={"a model"},
    changes={"feed-forwards by chunks"},
    forbids={"compiles blocks", "products of cut matrices", "a window of layers"},
    option="plan.pin.feed_forward_chunk=8192",
)
"""Ranks that share matrices would exchange every chunk by itself, twice."""


class LossChunk(Mechanism):
    """The logits of so many tokens are there at a time."""

    claim = LOSS

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def wrap(self, context: Build) -> None:
        """Tells the model. Raises UserError for one whose loss takes no chunks."""
        model: Any = context.model
        if context.recipe.tune is not None or not hasattr(model, "loss_chunk"):
            raise _no_chunks("loss_chunk", "the loss")
        model.loss_chunk = self.chunk


class FeedForwardChunk(Mechanism):
    """The inner activations of so many tokens are there at a time."""

    claim = FEED_FORWARD

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def wrap(self, context: Build) -> None:
        """Replaces the forward of every feed-forward. Raises UserError for a model without (experts are none)."""
        assert context.model is not None
        modules = [getattr(block, field) for block, field in fields_of(context.model, "feed_forward")]
        if context.recipe.tune is not None or not modules:
            raise _no_chunks("feed_forward_chunk", "the feed-forward")
        for module in modules:
            module.forward = by_chunks(module, self.chunk)


def _no_chunks(pin: str, what: str) -> UserError:
    return UserError(
        f"plan.pin.{pin}: {what} of this model is not computed by chunks.",
        why="loss: decoders trained on text; feed-forward: those of them without experts",
        do=f"leave plan.pin.{pin} out",
    )


def choose_loss(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the plan has chunks of the loss."""
    chunk = plan.state(TokenChunksState).loss
    return LossChunk(chunk) if chunk else None


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the plan has chunks of feed-forwards."""
    chunk = plan.state(TokenChunksState).feed_forward
    return FeedForwardChunk(chunk) if chunk else None
