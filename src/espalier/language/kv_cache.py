"""KV cache: the keys and values of the tokens so far, for generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


class Past:
    """Keys and values of one layer. Has state; room for `context` tokens is taken when the first come."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(
        self, key: Float[Tensor, "batch kv_heads seq head"], value: Float[Tensor, "batch kv_heads seq head"]
    ) -> tuple[Tensor, Tensor]:
        """Appends the new tokens' rows; returns those of all tokens so far, `[batch, kv_heads, keys, head]`."""
        if self.keys is None or self.values is None:
            batch, heads, _, size = key.shape
            self.keys = key.new_empty(batch, heads, self.context, size)
            self.values = torch.empty_like(self.keys)
        stop = self.length + key.shape[2]
        self.keys[:, :, self.length : stop] = key
        self.values[:, :, self.length : stop] = value
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class Cache:
    """The pasts of all layers of one model. Has state. For generation only: gradients do not pass through it."""

    def __init__(self, layers: int, context: int) -> None:
        self.layers = [Past(context) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens remembered, by the layers that this rank has."""
        return max(layer.length for layer in self.layers)
