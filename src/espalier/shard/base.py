"""Where does each tensor live? A Sharding spreads a model over ranks and makes its gradients whole again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


class Sharding(Protocol):
    """What the trainer uses; made by `Replicate(model, channel, ...)` and its like, which wrap the model then.

    One step is:

        for index, batch in enumerate(batches):
            with sharding.accumulate(last=index == len(batches) - 1):
                loss(sharding.model, batch).backward()
        sharding.wait()
        ...  # the Agreement moves the parameters, then clears gradients with zero_grad(set_to_none=True)
    """

    model: nn.Module
    """The model to call. Its parameters are what the optimizer is to be built on (DTensors where sharded)."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro-batch. Exchange of gradients begins inside the `last` one."""
        ...

    def wait(self) -> None:
        """Returns when the gradients of the step, summed over all ranks, are in `.grad`."""
        ...

    def detach(self) -> None:
        """Takes off every hook; the model is plain again."""
        ...
