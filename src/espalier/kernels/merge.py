"""Partial softmaxes made one by log-sum-exp: attention over several blocks of keys, each computed by itself.

Exact (Milakov and Gimelshein, arXiv 1805.02867). With weights of a sigmoid, exp is never taken of a positive number, so
nothing overflows however large the scores are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Adds the attention over further keys to `out` and `lse`, in place.

    Args:
        out: [*rows, head], softmax-weighted values over the keys so far; float32 or wider.
        lse: [*rows], the logarithm of the sum of exp(score) over them; -inf where there were none.
        block_out, block_lse: the same over other keys; `block_out` may be of lower precision.
    """
    share = torch.sigmoid(block_lse - lse).nan_to_num_(0.0)  # NaN: neither has keys
    out.lerp_(block_out.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse) if lse.is_contiguous() else lse.copy_(torch.logaddexp(lse, block_lse))
