"""The plain `attend`: the whole sequence is on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
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
    queries = query.shape[2]
    keys = key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    plain = where.documents is None and where.padding is None
    whole = queries == keys and plain
    mask = None if plain and (whole or queries == 1) else visible(queries, keys, where)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, enable_gqa=grouped)


def visible(queries: int, keys: int, where: Where, window: int | None = None) -> Bool[Tensor, "*batch queries keys"]:
    """Which of the `keys` each of the last `queries` of them sees: those before it in the same document, the last
    `window` (None: all). What is padding sees itself, so that no query sees nothing."""
    places = torch.arange(keys, device=where.positions.device)
    ages = places[keys - queries :, None] - places
    seen = ages >= 0 if window is None else (ages >= 0) & (ages < window)
    if where.documents is not None:
        assert queries == keys, "documents are of all keys"
        seen = seen & (where.documents[:, None, :, None] == where.documents[:, None, None, :])
    if where.padding is not None:
        seen = seen & (places >= where.padding[:, None, None, None]) | (ages == 0)
    return seen
