"""The plain `attend`: the whole sequence is on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from espalier.parallel.attend import Where


def causal(
    query: Float[Tensor, "batch heads seq head"],
    key: Float[Tensor, "batch kv_heads keys head"],
    value: Float[Tensor, "batch kv_heads keys head"],
    where: Where,
) -> Float[Tensor, "batch heads seq head"]:
    """Each query sees its own key and those before it in the same document (PyTorch's fused attention).

    See `base.Attend`. Documents must be those of the keys: with a cache of earlier keys there is one document.
    """
    queries, keys = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    mask = None
    whole = queries == keys and where.documents is None
    if not whole and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if where.documents is not None:
        assert queries == keys, "documents are of all keys"
        same = where.documents[:, None, :, None] == where.documents[:, None, None, :]
        mask = same if mask is None else mask & same
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, enable_gqa=grouped)
