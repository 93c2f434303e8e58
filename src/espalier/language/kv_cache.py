"""KV cache: the keys and values of the tokens so far, for generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PIECE = 64
"""Tokens that a full cache grows by."""


class Past:
    """Keys and values of one layer. Has state; its room is that of the tokens it holds, rounded up to a `PIECE`."""

    def __init__(self) -> None:
        self.length = 0
        self.rows: Float[Tensor, "2 batch kv_heads room head"] | None = None

    def extend(
        self, key: Float[Tensor, "batch kv_heads seq head"], value: Float[Tensor, "batch kv_heads seq head"]
    ) -> tuple[Tensor, Tensor]:
        """Appends the new tokens' rows; returns those of all tokens so far, `[batch, kv_heads, keys, head]`."""
        start = self.length
        self.length = self.length + key.shape[2]
        if self.rows is None or self.length > self.rows.shape[3]:
            batch, heads, _, size = key.shape
            room = key.new_empty(2, batch, heads, -(-self.length // PIECE) * PIECE, size)
            if self.rows is not None:
                room[:, :, :, :start] = self.rows[:, :, :, :start]
            self.rows = room
        self.rows[0, :, :, start : self.length] = key
        self.rows[1, :, :, start : self.length] = value
        keys, values = self.rows[:, :, :, : self.length]
        return keys, values

    def keep(self, rows: Int[Tensor, " rows"], first: int) -> None:
        """Forgets all rows but `rows`, and the tokens before `first`."""
        if self.rows is not None:  # else another rank has the layer
            self.rows = self.rows[:, rows, :, first : self.length]
            self.length -= first


class Cache:
    """The pasts of all layers of one model. Has state. For generation only: gradients do not pass through it.

    `padding`: how many of the first tokens of each row are none of it, int64 [batch]; None: none of any row.
    """

    def __init__(self, layers: int, padding: Int[Tensor, " batch"] | None = None) -> None:
        self.layers = [Past() for _ in range(layers)]
        self.padding = padding

    @property
    def length(self) -> int:
        """Tokens remembered, by the layers that this rank has."""
        return max(layer.length for layer in self.layers)

    def keep(self, rows: Int[Tensor, " rows"]) -> None:
        """Forgets all rows but `rows`, and what is padding in all of these."""
        first = 0
        if self.padding is not None:
            padding = self.padding[rows]
            first = int(padding.min())
            self.padding = padding - first if (padding > first).any() else None
        for layer in self.layers:
            layer.keep(rows, first)
