"""Where does each tensor live? A Sharding spreads a model over ranks and makes its gradients whole again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from espalier.checkpoint.base import StatefulParts
    from espalier.optim.base import Optimizer, Owned


class Sharding(Protocol):
    """What the trainer and the agreements use; made by `Amsp(model, channel, ...)`, which changes the model in place.

    One step is:

        sharding.clear()
        for index, batch in enumerate(batches):
            with sharding.accumulate(last=index == len(batches) - 1):
                loss(sharding.model, batch).backward()
        sharding.wait()
        ...  # the Agreement looks at `owned` and `norm`, and moves what is owned
        sharding.refresh()
    """

    model: nn.Module
    """The model to call."""

    owned: Sequence[Owned]
    """What this rank's optimizer is to be built on: parameters, or pieces of them."""

    together: bool
    """Whether a forward pass needs all ranks, each with as many of them (parameters are gathered in it)."""

    def clear(self) -> None:
        """Forgets the gradients of the step before."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro-batch. The exchange that ends a step begins in the `last`."""

    def alone(self) -> AbstractContextManager[None]:
        """Surrounds forward and backward whose gradients stay on this rank, in the parameters' own `.grad`."""

    def wait(self, totals: Tensor | None = None) -> None:
        """Returns when the gradients of the step, summed over all ranks, are in the `.grad` of what is owned.

        `totals`: float64 [any]; summed over the same ranks, in place, by the one small exchange of a step.
        """

    def norm(self) -> float:
        """2-norm of the summed gradient of the whole model; the same bits on every rank."""

    def refresh(self) -> None:
        """Begins to bring what the optimizers moved to all who hold it; forward passes wait for what they use."""

    def settle(self) -> None:
        """Returns when every parameter that lives here is up to date."""

    def adopt(self) -> None:
        """Takes what was written into what is owned for everybody's parameters."""

    def idle(self, times: int) -> None:
        """Takes part in `times` forward passes of other ranks, without one of its own. Evaluation only."""

    def bytes_held(self) -> Mapping[str, int]:
        """Bytes this rank holds, by state: `params`, `grads`, `masters`."""

    def parts(self, optimizer: Optimizer) -> StatefulParts:
        """`model` and `optimizer` for a checkpoint: whole tensors by name, of which each rank writes and reads its
        own share; they resume under any other sharding."""

    def detach(self) -> None:
        """Takes off every hook; the model is plain again, with all its parameters here."""
