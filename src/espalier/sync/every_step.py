"""Replicas agree at every step: plain data parallel. The reference all other agreements are measured against."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from espalier.comm.base import Traffic, traffic
from espalier.compose import Claim
from espalier.optim.base import Optimizer
from espalier.sync.base import TOTALS, Agreed, Gradients
from espalier.workload import Outcome

CLAIM = Claim(
    "every_step",
    question="sync",
    needs=frozenset({"gradients are summed"}),
    changes=frozenset({"owns the optimizer step", "replicas equal after each step"}),
    forbids=frozenset({"owns the optimizer step"}),
)


class EveryStep:
    """Waits for the summed gradients, clips them by their global norm, and takes one optimizer step. Has no state."""

    def __init__(self, sharding: Gradients, optimizer: Optimizer, totals: Totals, clip: float) -> None:
        self.sharding = sharding
        self.optimizer = optimizer
        self.totals = totals
        self.clip = clip

    def step(self, outcome: Outcome, learning_rate: float, stop: bool) -> Agreed:
        """See `Agreement.step`. Nothing moves when a loss or the gradient is not finite."""
        summed = self.totals.start(outcome, stop)
        begun = time.perf_counter()
        self.sharding.wait()
        loss, weight, stopping, faulty = summed()
        exposed = time.perf_counter() - begun
        scale = self.totals.nominal_weight / weight if weight else 0.0
        size = self.sharding.norm() * scale
        if not faulty and math.isfinite(size):
            self._scale([one.tensor.grad for one in self.sharding.owned if one.tensor.grad is not None], scale, size)
            self.optimizer.step(learning_rate)
            self.sharding.refresh()
        return Agreed(loss / weight if weight else math.nan, weight, size, learning_rate, stopping, exposed, faulty)

    level = whole = True
    leaving = outlives = False

    def following(self, step: int) -> int:
        """The next."""
        return step + 1

    def at(self, step: int) -> None:
        """See `Agreement.at`."""

    def shown(self) -> AbstractContextManager[None]:
        """See `Agreement.shown`: it is the model as it is."""
        return nullcontext()

    def finish(self, learning_rate: float) -> None:
        """See `Agreement.finish`: they are."""

    def _scale(self, gradients: list[Tensor], scale: float, size: float) -> None:
        if self.clip > 0 and size > self.clip:
            scale *= self.clip / size
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)


class Totals:
    """Adds the ranks' losses, weights, stop flags and not-a-number flags in one small all-reduce."""

    def __init__(self, group: torch.distributed.ProcessGroup | None, nominal_weight: float) -> None:
        self.group, self.nominal_weight = group, nominal_weight
        self.rank, self.world = (0, 1) if group is None else (group.rank(), group.size())

    def start(self, outcome: Outcome, stop: bool) -> Callable[[], tuple[float, float, bool, tuple[int, ...]]]:
        """Launches the sum; the returned function waits for it: (loss sum, weight sum, stop, faulty ranks)."""
        values = torch.zeros(TOTALS + self.world, dtype=torch.float64)
        loss = float(outcome.loss)
        values[0] = loss if math.isfinite(loss) else 0.0
        values[1] = float(outcome.weight)
        values[2] = float(stop)
        values[TOTALS + self.rank] = float(not math.isfinite(loss))
        work = None
        if self.group is not None:
            with traffic(Traffic.CONTROL):
                work = torch.distributed.all_reduce(values, group=self.group, async_op=True)

        def summed() -> tuple[float, float, bool, tuple[int, ...]]:
            if work is not None:
                work.wait()
            numbers = values.tolist()
            faulty = tuple(rank for rank in range(self.world) if numbers[TOTALS + rank])
            return numbers[0], numbers[1], numbers[2] > 0, faulty

        return summed
