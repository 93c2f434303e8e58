"""Finite check: the codec `int8!` raises where a value is not finite. Without the mark such a piece is sent
uncompressed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from espalier.comm.base import Codec, FeedbackBound, stays

MARK = "!"


class FiniteCheck:
    """`codec`, whose messages must be finite: `wire_format.seal` raises where one is not. Takes what `codec` takes."""

    def __init__(self, codec: Codec) -> None:
        self.inner = codec
        self.name = codec.name + MARK
        self.lossless = codec.lossless
        self.fixed = codec.fixed
        self.for_feedback = (codec.for_feedback if isinstance(codec, FeedbackBound) else codec.name) + MARK

    def encode(self, tensor: Tensor) -> Tensor | None:
        """As the codec; None where a value is not finite, of lossless codecs too."""
        if self.lossless and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return None
        return self.inner.encode(tensor)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """As the codec."""
        return self.inner.decode(wire, like)

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """As the codec."""
        return self.inner.wire_bytes(elements, element_bytes)

    def runs_on(self, device: str) -> bool:
        """As the codec."""
        return stays(self.inner, device)
