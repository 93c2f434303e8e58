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
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(
        self, key: Float[Tensor, "batch kv_heads seq head"], value: Float[Tensor, "batch kv_heads seq head"]
    ) -> tuple[Tensor, Tensor]:
        """Appends the new tokens' rows; returns those of all tokens so far, `[batch, kv_heads, keys, head]`."""
        stop = self.length + key.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values = _room(key, stop), _room(value, stop)
        elif stop > self.keys.shape[2]:
            for name in ("keys", "values"):
                full = getattr(self, name)
                setattr(self, name, _room(full, stop))
                getattr(self, name)[:, :, : self.length] = full[:, :, : self.length]
        self.keys[:, :, self.length : stop] = key
        self.values[:, :, self.length : stop] = value
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def keep(self, rows: Int[Tensor, " rows"], first: int) -> None:
        """Forgets all rows but `rows`, and the tokens before `first`."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = (part[rows, :, first : self.length] for part in (self.keys, self.values))
        self.length -= first


def _room(like: Tensor, tokens: int) -> Tensor:
    batch, heads, _, size = like.shape
    return like.new_empty(batch, heads, -(-tokens // PIECE) * PIECE, size)


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
            if layer.keys is not None:  # else another rank has the layer
                layer.keep(rows, first)
