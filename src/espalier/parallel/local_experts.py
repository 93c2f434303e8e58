"""All experts on this rank: tokens are sorted by expert, each expert works on its run of rows, and rows go back.

After MegaBlocks (arXiv 2211.15841): no capacity and no padding, so no token is dropped. We loop over the experts
instead of one grouped product: their matrices stay separate parameters, so that they can be placed, exchanged and
orthogonalised one by one, and on the CPU a grouped product is the same loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def local(
    x: Float[Tensor, "tokens width"],
    chosen: Int[Tensor, "tokens active"],
    weights: Float[Tensor, "tokens active"],
    experts: Sequence[nn.Module],
) -> Float[Tensor, "tokens width"]:
    """See `parallel.expert_map.Route`. The result does not depend on which other tokens are in the batch, up to
    rounding."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    rows = x.index_select(0, order // chosen.shape[1]).split(counts)
    # An expert without tokens still runs, on no rows: its gradients are then zeros, which an all-reduce can wait for.
    answers = torch.cat([expert(part) for expert, part in zip(experts, rows, strict=True)])
    return combined(answers, order, weights)


def combined(
    answers: Float[Tensor, "rows width"], order: Int[Tensor, " rows"], weights: Float[Tensor, "tokens active"]
) -> Float[Tensor, "tokens width"]:
    """The weighted sum of each token's answers, of which row i is of choice `order[i]` of all tokens' choices."""
    by_token = answers.index_select(0, inverse(order)).unflatten(0, weights.shape)
    return torch.bmm(weights.to(by_token.dtype).unsqueeze(1), by_token).squeeze(1)


def inverse(order: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
