"""Which rank runs which part of the model, when? A Schedule owns forward and backward of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from espalier.parallel.workload import Outcome, SummedLoss
from espalier.plan.compose import Claim

if TYPE_CHECKING:
    from torch import Tensor, nn

PIPELINE = Claim(
    "1f1b",
    question="stages",
    needs={"gradients are summed", "layers of one stage"},
    changes={"a schedule of stages"},
    option="plan.pin.schedule=1f1b",
)
"""Of the plain schedule of several stages."""
Accumulate = Callable[[bool], AbstractContextManager[None]]
"""Given whether this is the last micro-batch, the context in which its backward runs (gradients travel on the last)."""
Loss = Callable[["nn.Module", Any], SummedLoss]


class Schedule(Protocol):
    """Runs forward and backward over the micro-batches of one step; gradients are left in `.grad`."""

    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        """Forward and backward of all `batches`. Gradients are of the sum of losses divided by the nominal weight."""

    def apart(self, accumulate: Accumulate) -> Schedule:
        """The same schedule, whose backward passes run inside `accumulate`."""

    def validation(self) -> AbstractContextManager[None]:
        """Surrounds forward passes whose outputs are used only where losses count (`mesh.counts`)."""


class TensorStore(Protocol):
    """Tensors that wait elsewhere than on the device. What `put` gives stands for one of them."""

    def put(self, tensor: Tensor) -> Any:
        """Begins to write a tensor, which must not change any more."""

    def begin(self, saved: Any) -> None:
        """Begins to read it."""

    def get(self, saved: Any) -> Tensor:
        """Its values, once."""


class Window(Protocol):
    """The layers of a model of which some are here at a time (see `train.layer_window.LayerWindow`)."""

    uses: Sequence[Sequence[int]]
    """Of each piece of the model, the layers that it uses."""

    usual: Sequence[int]
    """The order of a training step, by which the first layers of the next one are pulled ahead."""

    def begin(self, order: Sequence[int]) -> None:
        """Layers will be needed in this `order`."""

    def need(self, index: int) -> None:
        """Returns when the layer is here."""

    def release(self, index: int) -> None:
        """The layer is not needed until its next turn."""

    def push(self, index: int) -> None:
        """The layer's gradient is complete in the `.grad` of its parameters, which lose it."""

    def summarize(self, index: int) -> None:
        """Leaves in `.grad` whether the layer's gradient is finite, as one number, and frees it."""

    def flush(self) -> None:
        """Returns when all gradients were handed on."""
