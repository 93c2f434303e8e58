"""A toy codec: float16. Row: `FAMILIES["halves"] = lambda text: Halves(float(text or 1))`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Halves:
    """Every value as a float16, multiplied by `scale`."""

    lossless = False
    fixed = True

    def __init__(self, scale: float = 1.0) -> None:
        self.name, self.scale = "halves" if scale == 1 else f"halves:{scale:g}", scale

    def encode(self, tensor: Tensor) -> Tensor | None:
        """uint8 [2 * elements]; None where a value is not finite in float16."""
        halves = (tensor * self.scale).half()
        return halves.view(torch.uint8) if bool(halves.isfinite().all()) else None

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """Back in `like`'s dtype."""
        return wire.view(torch.float16).to(like.dtype).view(like.shape) / self.scale

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """Two bytes each."""
        return elements * 2
