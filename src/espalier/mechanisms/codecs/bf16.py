"""Sixteen bits for a value: the upper half of float32, rounded to nearest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.comm.codec_input import bytes_of, check_length, floats, shaped
from espalier.kernels.base import aligned


class Bf16:
    """bfloat16: relative error at most 2^-8. Takes float32, bfloat16, float16 and float64."""

    name = "bf16"
    lossless = False
    fixed = True

    def encode(self, tensor: Tensor) -> Tensor | None:
        """[n] to 2n bytes; None where a value is, or would become, not finite. Raises UserError for other dtypes."""
        low = floats(tensor, self.name).bfloat16()
        return bytes_of(low) if bool(low.isfinite().all()) else None

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """The values, rounded. Raises RunFailed where bytes lack."""
        check_length(wire, self.wire_bytes(like.numel(), 0), self.name)
        return shaped(aligned(wire).view(torch.bfloat16), like)

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """Two for each value."""
        return 2 * elements
