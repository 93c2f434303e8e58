"""ZFP in one dim at a fixed rate: the lossy codec of hybrid compression (arXiv 2409.02423), byte for byte.

Made for smooth fields. Neighbouring gradients are nearly independent, so that its transform gains nothing there:
`int8` is more exact at the same bits.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from espalier.comm.codec_input import check_length, floats, shaped
from espalier.kernels import zfp as kernels
from espalier.recipe.errors import UserError

CONTRACTION = 6.0
"""Lowest rate at which no block loses more than it holds. Below it some blocks leave their range and come back with
another sign. Worst squared errors that a search found, over the block's squared norm: 4.6 at 5.75, 0.74 at 6."""


class Zfp:
    """`zfp:rate`. Takes float32, bfloat16, float16 and float64.

    Args:
        rate: bits per value, from 2.25 (a block's exponent and nothing else) to 32; rounded to a quarter. Below 6 not
            with error feedback.

    Raises:
        UserError: another rate.
    """

    lossless = False
    fixed = True
    runs_on = staticmethod(kernels.pack.runs_on)

    def __init__(self, rate: float) -> None:
        if not 2.25 <= rate <= 32:
            near = 8.0 if math.isnan(rate) else min(32.0, max(2.25, rate))
            raise UserError(
                f"zfp's rate is {rate:g}.", why="a block of four needs 9 bits, and has 128", do=f"zfp:{near:g}"
            )
        self.rate = float(rate)
        self.name = f"zfp:{rate:g}"
        self.for_feedback = self.name if rate >= CONTRACTION else f"zfp:{CONTRACTION:g}"

    def encode(self, tensor: Tensor) -> Tensor | None:
        """[n] to the bytes of zfp's stream without header; None where a value is not finite.

        The error of a value is below 2^(e - p + 4), with 2^e above the block's largest and p bit planes kept. Raises
        UserError for other dtypes.
        """
        return kernels.pack(floats(tensor, self.name, stays=self.runs_on(tensor.device.type)), self.rate)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """What zfp decodes. Raises RunFailed where bytes lack."""
        check_length(wire, self.wire_bytes(like.numel(), 0), self.name)
        wire = wire.to(like.device) if self.runs_on(like.device.type) else wire
        return shaped(kernels.unpack(wire, self.rate, like.numel()), like)

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """The rate, in blocks of four and words of 64 bits."""
        return kernels.stream_bytes(elements, self.rate)
