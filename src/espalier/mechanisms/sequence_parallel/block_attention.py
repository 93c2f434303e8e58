"""Attention on one block of keys and values, with its log-sum-exp; backward by the final output and log-sum-exp.

FlashAttention (arXiv 2205.14135) as PyTorch compiles it for each device; the plain form beside it is the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espalier.kernels.base import operation

_aten = torch.ops.aten


class Saved(NamedTuple):
    """A block's inputs, and what the whole attention gave for its queries.

    Attributes:
        query: [batch, heads, queries, head]; key, value: [batch, kv_heads, keys, head], where kv_heads divides heads.
        out: like query, over all keys of all blocks; lse: [batch, heads, queries], likewise.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The precision in which partial results are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@operation("block_attention")
def block_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out like query, lse [batch, heads, queries]) of the keys at hand. `causal`: as many keys as queries, and query i
    sees keys 0 to i."""
    scores, (_, value) = _scores(query, key, causal), _repeated(query, key, value)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ value).to(query.dtype), lse


@operation("block_attention_backward")
def block_attention_backward(gradient: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What this block adds to the gradients of query, key and value, given the `gradient` of the whole output."""
    query, key, value, out, lse = saved
    wide = accumulation(query.dtype)
    group = query.shape[1] // key.shape[1]
    keys, values = _repeated(query, key, value)
    gradient = gradient.to(wide)
    queries = query.to(wide)
    weights = (_scores(query, key, causal) - lse.unsqueeze(-1)).exp()
    delta = (gradient * out.to(wide)).sum(-1, keepdim=True)
    scores = weights * (gradient @ values.transpose(-1, -2) - delta) / query.shape[-1] ** 0.5
    parts = (scores @ keys, scores.transpose(-1, -2) @ queries, weights.transpose(-1, -2) @ gradient)
    shared = (part.unflatten(1, (-1, group)).sum(2) for part in parts[1:])
    first, second, third = (part.to(query.dtype) for part in (parts[0], *shared))
    return first, second, third


def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    key, _ = _repeated(query, key, key)
    scores = query.to(key.dtype) @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores.masked_fill_(ahead, -torch.inf)
    return scores


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for each query head, in the precision that is added up."""
    group = query.shape[1] // key.shape[1]
    wide = accumulation(query.dtype)
    return key.to(wide).repeat_interleave(group, 1), value.to(wide).repeat_interleave(group, 1)


@block_attention.fast("cpu")
def flash_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's kernel for processors."""
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    return out, lse


@block_attention_backward.fast("cpu")
def flash_cpu_backward(gradient: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's kernel for processors."""
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, *saved, 0.0, causal)
    query, key, value = gradients
    return query, key, value


def _half(first: Tensor, *others: object) -> bool:
    return first.dtype in (torch.float16, torch.bfloat16) and first.shape[-1] % 8 == 0


@block_attention.fast("cuda", wins=_half)
def flash_cuda(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's FlashAttention for GPUs; the plain form takes other precisions."""
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


@block_attention_backward.fast("cuda", wins=_half)
def flash_cuda_backward(gradient: Tensor, saved: Saved, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's FlashAttention for GPUs."""
    query, key, value, out, lse = saved
    sizes = (query.shape[2], key.shape[2])
    # Without dropout the random state is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients = _aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse.contiguous(), None, None, *sizes, 0.0, causal, state, state[:0]
    )
    first, second, third = gradients
    return first, second, third
