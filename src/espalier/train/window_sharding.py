"""Sharding and optimizer of a model of which a window of layers is here: where the layers wait, they are moved too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from espalier.checkpoint.base import StateDict
from espalier.optim.base import Owned
from espalier.parallel.layer_client import LayerClient, StepLost

if TYPE_CHECKING:
    from espalier.train.layer_window import LayerWindow


class WindowSharding:
    """See `Sharding`, but for `parts`: nothing lives here but a window of layers. Has state: the step, and
    the norm of its gradient.

    Args:
        model: its trainable parameters are those of the window's layers.
        window: the layers, and the way to the nodes.
        rate: factor of the learning rate of each step, by which nodes step ahead of a decision; None: they do not.

    Attributes:
        owned: one number, whose gradient is what the summed gradient is to be multiplied with before it is used.
    """

    def __init__(self, model: nn.Module, window: LayerWindow, rate: Callable[[int], float] | None = None) -> None:
        self.model = model
        self.window = window
        self.rate = rate
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.owned: Sequence[Owned] = [Owned("factor of the gradient", self.factor, self.factor.shape)]
        self.together = False
        self._norm = 0.0

    @property
    def client(self) -> LayerClient:
        return self.window.client

    @property
    def steps(self) -> int:
        """Of the run, that the nodes hold."""
        return self.window.step

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """See `Sharding.accumulate`: the schedule pushes."""
        return nullcontext()

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, totals: Tensor | None = None) -> None:
        """See `Sharding.wait`: returns when the node has the gradients of all workers."""
        given = torch.zeros(0, dtype=torch.float64) if totals is None else totals
        sums, norms = self.window.totals(given)
        if totals is not None:
            totals.copy_(sums)
        self._norm = float(torch.linalg.vector_norm(norms))
        self.factor.grad = torch.ones_like(self.factor)

    def norm(self) -> float:
        return self._norm

    def move(self, rate: float) -> None:
        assert self.factor.grad is not None, "a step ends after its gradients were summed"
        following = None if self.rate is None else self.rate(self.window.step + 1)
        self.window.move(float(self.factor.grad), rate, following)

    def refresh(self) -> None:
        """See `Sharding.refresh`: the first layers of the next step are pulled."""
        with suppress(StepLost):  # who needs them will notice
            self.window.prefetch(self.window.usual)

    def settle(self) -> None:
        """See `Sharding.settle`: the nodes' files hold all steps. Raises StepLost."""
        self.window.settle()

    def adopt(self) -> None:
        """See `Sharding.adopt`."""

    def idle(self, times: int) -> None:
        """See `Sharding.idle`: other workers need nothing of this one."""

    def bytes_held(self) -> Mapping[str, int]:
        """See `Sharding.bytes_held`: the most that the window ever had."""
        grads = max((2 * layer.bytes for layer in self.window.layers), default=0)
        return {"params": self.window.peak, "grads": grads, "masters": 0}

    def detach(self) -> None:
        self.window.keep()


class WindowOptimizer:
    """See `Optimizer`: the nodes' own. Has no state here."""

    def __init__(self, sharding: WindowSharding) -> None:
        self.sharding = sharding

    def step(self, factor: float) -> None:
        self.sharding.move(factor)

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Nothing is here."""
