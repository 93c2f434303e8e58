"""A toy shard rule: everything on every rank, one all-reduce per parameter after backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.optim.base import owned_by
from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism

CLAIM = Claim(
    "sums",
    question="shard",
    needs=frozenset({"a model"}),
    changes=frozenset({"gradients are summed", "whole matrices"}),
)


class Sums:
    """See `espalier.parallel.sharding.Sharding`."""

    together = False

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.model, self.group, self.owned = model, group, owned_by(model)

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        yield

    def alone(self) -> Any:
        return nullcontext()

    def wait(self, totals: Tensor | None = None) -> None:
        for value in [one.tensor.grad for one in self.owned] + [totals]:
            if value is not None and self.group is not None:
                dist.all_reduce(value, group=self.group)

    def norm(self) -> float:
        return float(
            torch.nn.utils.get_total_norm([one.tensor.grad for one in self.owned if one.tensor.grad is not None])
        )

    def refresh(self) -> None:
        pass

    settle = adopt = detach = refresh

    def idle(self, times: int) -> None:
        pass

    def bytes_held(self) -> Mapping[str, int]:
        return {"params": sum(parameter.nbytes for parameter in self.model.parameters())}

    def parts(self, optimizer: Any) -> Mapping[str, Any]:
        return {"model": self.model, "optimizer": optimizer}


class SumsMechanism(Mechanism):
    claim = CLAIM

    def wrap(self, context: Build) -> None:
        assert context.model is not None
        context.sharding = Sums(context.model, context.mesh.same_parameters)


def choose(recipe: Any, plan: Any) -> Mechanism:
    return SumsMechanism()
