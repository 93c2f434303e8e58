"""The plain schedule: every rank runs the whole model, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from espalier.optim.loss_scale import LossScale
from espalier.parallel.schedule import Accumulate, Loss
from espalier.parallel.workload import Outcome, Tagged
from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism

CLAIM = Claim("whole", question="stages", needs={"gradients are summed"})


@dataclass(eq=False)
class WholeSchedule:
    """Forward and backward of each micro-batch in turn; gradients add up in `.grad`. `shares`: how much the losses of
    each task count; `loss_scale`: see `train.mechanism.Build`."""

    nominal_weight: float
    accumulate: Accumulate
    context: Callable[[], AbstractContextManager[Any]]
    shares: Sequence[float] = (1.0,)
    loss_scale: LossScale | None = None

    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        """See `Schedule.run`. `context` (autocast, say) holds round the forward pass only."""
        losses: list[Tensor] = []
        weights: list[Tensor] = []
        tasks = [batch.task if isinstance(batch, Tagged) else 0 for batch in batches]
        for index, (batch, task) in enumerate(zip(batches, tasks, strict=True)):
            with self.accumulate(index == len(batches) - 1):
                with self.context():
                    value, weight = loss(model, batch)
                torch.autograd.backward(value / divisor(self.nominal_weight, self.shares[task], self.loss_scale))
            losses.append(value.detach().double())
            weights.append(weight.detach().double())
        return outcome(losses, weights, tasks, self.shares)

    def apart(self, accumulate: Accumulate) -> WholeSchedule:
        return type(self)(self.nominal_weight, accumulate, self.context, self.shares, self.loss_scale)

    def validation(self) -> AbstractContextManager[None]:
        return nullcontext()


def divisor(nominal_weight: float, share: float, loss_scale: LossScale | None) -> float:
    """What the loss of a micro-batch is divided by before its backward pass. `share`: how much its task counts."""
    whole = nominal_weight / share
    return whole if loss_scale is None else whole / loss_scale.factor


def outcome(losses: list[Tensor], weights: list[Tensor], tasks: Sequence[int], shares: Sequence[float]) -> Outcome:
    """The sums of micro-batches' losses and weights; of none, 0. `tasks`: of each; `shares`: how much those count."""
    if len(shares) == len(losses) == 1:
        return Outcome(losses[0], weights[0])
    zero = torch.zeros((), dtype=torch.float64)
    if len(shares) == 1:
        return Outcome(torch.stack(losses).sum(), torch.stack(weights).sum()) if losses else Outcome(zero, zero)
    sums = torch.zeros(len(losses), 2, dtype=torch.float64)
    if losses:
        sums = torch.stack([torch.stack(losses).cpu(), torch.stack(weights).cpu()], dim=1)
    by_task = sums.new_zeros(len(shares), 2).index_add_(0, torch.tensor(tasks[: len(losses)], dtype=torch.int64), sums)
    total = (by_task[:, 0] * torch.tensor(shares, dtype=torch.float64)).sum()
    return Outcome(total, by_task[:, 1].sum(), by_task)


class WholeModel(Mechanism):
    """Every rank runs all layers. `schedule`: how; one of another order is a subclass."""

    claim = CLAIM
    schedule: ClassVar[type[WholeSchedule]] = WholeSchedule

    def wrap(self, context: Build) -> None:
        assert context.sharding is not None
        shares = tuple(context.workload.tasks().values())
        nominal_weight = context.workload.nominal_weight
        accumulate = context.sharding.accumulate
        context.schedule = self.schedule(nominal_weight, accumulate, context.forward, shares, context.loss_scale)
