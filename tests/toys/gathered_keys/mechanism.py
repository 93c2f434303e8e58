"""A toy `attend`: each rank has a slot of the sequence, and keys and values are gathered from all slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.parallel.attend import Where
from espalier.parallel.mesh import SEQUENCE
from espalier.plan.compose import Claim
from espalier.train.mechanism import Build, Mechanism
from espalier.train.seams import Filled

CLAIM = Claim(
    "gathered_keys",
    question="attend",
    needs=frozenset({"a model"}),
    changes=frozenset({"attention over cut sequences"}),
)


class Gather(torch.autograd.Function):
    """[..., seq, head] of all ranks one after the other; gradients are summed and go back to their rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, own.shape[-2]
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        start = ctx.group.rank() * ctx.length
        return total[..., start : start + ctx.length, :], None


class GatheredKeys(Filled):
    claim = CLAIM
    seam = "attend"

    def replacement(self, context: Build, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        group = context.mesh.group(*SEQUENCE)

        def attend(query: Tensor, key: Tensor, value: Tensor, where: Where) -> Tensor:
            slots = where.slots
            if group is None or slots is None:
                return plain(query, key, value, where)
            keys, values = (slots.join(Gather.apply(one, group).split(key.shape[2], 2), 2) for one in (key, value))
            mask = torch.arange(keys.shape[-2])[None, :] <= where.positions[:, None]
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
            )

        return attend


def choose(recipe: Any, plan: Any) -> Mechanism:
    return GatheredKeys()
