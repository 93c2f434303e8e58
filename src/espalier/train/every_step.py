"""Replicas agree at every step: plain data parallel. The reference all other agreements are measured against."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from espalier.optim.base import Optimizer
from espalier.optim.loss_scale import LossScale
from espalier.parallel.agreement import AgreedStep, LauncherNews
from espalier.parallel.workload import Outcome
from espalier.plan.base import task_totals
from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.parallel.sharding import Sharding

CLAIM = Claim(
    "every_step",
    question="sync",
    needs={"gradients are summed"},
    changes={"owns the optimizer step", "replicas equal after each step"},
    forbids={"owns the optimizer step"},
    after={"optimizer", "stages"},
    option="sync.kind=every_step",
)


@dataclass(eq=False)
class StepAgreement:
    """Waits for the summed gradients, clips them by their global norm, and takes one optimizer step. Has no state.

    `loss_scale`: see `train.mechanism.Build`; what is summed is divided by it."""

    sharding: Sharding
    optimizer: Optimizer
    totals: Totals
    clip: float
    loss_scale: LossScale | None = None

    def step(self, outcome: Outcome, learning_rate: float, stop: bool) -> AgreedStep:
        """See `Agreement.step`. Nothing moves when a loss or the gradient is not finite."""
        values = self.totals.of(outcome, stop)
        begun = time.perf_counter()
        self.sharding.wait(values)
        loss, weight, stopping, faulty, tasks = self.totals.read(values)
        exposed = time.perf_counter() - begun
        scale = self.totals.nominal_weight / weight if weight else 0.0
        if self.loss_scale is not None:
            scale /= self.loss_scale.factor
        size = self.sharding.norm() * scale
        finite = math.isfinite(size)
        skipped = self.loss_scale is not None and not faulty and self.loss_scale.after(finite)
        if not faulty and finite:
            self._scale([part.tensor.grad for part in self.sharding.owned if part.tensor.grad is not None], scale, size)
            self.optimizer.step(learning_rate)
        if skipped or (finite and not faulty):
            self.sharding.refresh()
        mean = loss / weight if weight else math.nan
        return AgreedStep(mean, weight, size, learning_rate, stopping, exposed, faulty, tasks, skipped)

    level = whole = common = True
    leaving = outlives = False
    rule = ""

    def following(self, step: int) -> int:
        return step + 1

    def at(self, step: int) -> None:
        """See `Agreement.at`."""

    def shown(self) -> AbstractContextManager[None]:
        """See `Agreement.shown`: it is the model as it is."""
        return nullcontext()

    def finish(self, learning_rate: float) -> None:
        """See `Agreement.finish`: they are."""

    def follow(self, launcher: LauncherNews) -> None:
        """See `Agreement.follow`: a lost rank ends the step."""

    def close(self) -> None:
        """See `Agreement.close`: there are none."""

    def _scale(self, gradients: list[Tensor], scale: float, size: float) -> None:
        if self.clip > 0 and size > self.clip:
            scale *= self.clip / size
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)


@dataclass(frozen=True)
class Totals:
    """A step's loss, weight, stop flag and not-a-number flags as one vector, which the gradients' exchange sums.

    Attributes:
        rank, world: this rank among those that hold one model together, and how many they are.
        nominal_weight, tasks: see `Workload`.
        counts: whether this rank's loss counts: of ranks that compute the same one, only one does.
    """

    nominal_weight: float
    rank: int = 0
    world: int = 1
    tasks: int = 1
    counts: bool = True

    def of(self, outcome: Outcome, stop: bool) -> Tensor:
        """float64 [3 + world], or with several tasks [3 + world + 2 tasks]: this rank's part of the sum."""
        loss = float(outcome.loss)
        tasks = [0.0] * task_totals(self.tasks)
        finite = math.isfinite(loss)
        flags = [0.0] * self.world
        flags[self.rank] = float(not finite)
        first = [loss if finite else 0.0, float(outcome.weight)] if self.counts else [0.0, 0.0]
        if self.counts and outcome.tasks is not None:
            tasks = outcome.tasks.flatten().tolist()
        return torch.tensor([*first, float(stop), *flags, *tasks], dtype=torch.float64)

    def read(self, values: Tensor) -> tuple[float, float, bool, tuple[int, ...], tuple[float, ...]]:
        """(loss sum, weight sum, whether some rank stops, ranks whose loss is not finite, each task's loss) of the
        summed vector."""
        loss, weight, stop, *others = values.tolist()
        flags = others[: self.world]
        sums = others[self.world :]
        tasks = tuple(total / of if of else math.nan for total, of in zip(sums[::2], sums[1::2], strict=True))
        return loss, weight, stop > 0, tuple(rank for rank, flag in enumerate(flags) if flag), tasks


_Agreement = TypeVar("_Agreement", bound=StepAgreement)

# --- as a mechanism ------------------------------------------------------------------------------------------------


def agreement(context: Build, kind: type[_Agreement] = StepAgreement) -> _Agreement:  # type: ignore[assignment]
    """Of the ranks that exchange gradients at every step."""
    assert context.sharding is not None
    assert context.optimizer is not None
    group = context.mesh.replica
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    counts = context.mesh.mesh.counts(context.mesh.rank)
    totals = Totals(context.workload.nominal_weight, rank, world, len(context.workload.tasks()), counts)
    return kind(context.sharding, context.optimizer, totals, context.recipe.train.clip, context.loss_scale)


class DataParallel(Mechanism):
    """Replicas agree at every step."""

    claim = CLAIM

    def wrap(self, context: Build) -> None:
        context.agreement = agreement(context)
