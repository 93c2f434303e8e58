"""The codec that changes nothing: every bit arrives as it was, and nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Exact:
    """Sends tensors as they are. The default of every traffic class and the reference of every other codec."""

    name = "exact"
    lossless = True
    fixed = True

    def encode(self, tensor: Tensor) -> Tensor:
        """`tensor` itself."""
        return tensor

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """`wire` itself (or bytes of it), seen in `like`'s dtype and shape."""
        return wire.view(like.dtype).view(like.shape)

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """Every value costs its own bytes (NumPy arrays allowed)."""
        return elements * element_bytes

    def carrier(self, inner: Any) -> Any:
        """`inner` itself: the exact codec is not on the path of any tensor."""
        return inner


EXACT = Exact()
