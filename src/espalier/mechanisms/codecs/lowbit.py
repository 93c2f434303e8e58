"""8, 4 or 1 bits for a value, and one scale for each block of 256: the sensible default for gradients.

After the block-wise quantization of 8-bit optimizers (arXiv 2110.02861); one bit is sign and mean magnitude, signSGD
with majority left out (arXiv 1802.04434). On gradients int8 is about eight times as exact as ZFP at the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor

from espalier.comm.codec_input import check_length, floats, shaped
from espalier.kernels import bits as kernels
from espalier.kernels.base import aligned
from espalier.recipe.errors import UserError


class Lowbit:
    """`int8`, `int4` or `int1`. Takes float32, bfloat16, float16 and float64.

    Args:
        bits: 8, 4 or 1. 8.125, 4.125 and 1.125 bits per value cross the wire.
        stochastic: rounds up or down at random, so that the mean of many roundings is the value: no error feedback is
            needed (and of one bit none is possible, as a value becomes the largest of its block, up or down). Random
            numbers are a hash of seed, contents and index, so a run repeats itself, resumed or not.
        seed: of those.

    Raises:
        UserError: another number of bits.
    """

    lossless = False
    fixed = True
    runs_on = staticmethod(kernels.pack.runs_on)

    def __init__(self, bits: int, *, stochastic: bool = False, seed: int = 0) -> None:
        if bits not in kernels.BITS:
            near = min(kernels.BITS, key=lambda width: abs(width - bits))
            raise UserError(f"A lowbit codec has {bits} bits.", why="8, 4 and 1 are packed", do=f"'int{near}'")
        self.bits = bits
        self.stochastic = stochastic
        self.seed = seed
        self.name = f"int{bits}" + (":stochastic" if stochastic else "")
        self.for_feedback = "int1" if self.name == "int1:stochastic" else self.name

    def encode(self, tensor: Tensor) -> Tensor | None:
        """[n] to bytes: float32 scales, then codes. None where a value is not finite.

        The error of a value is at most half the scale of its block, largest / 127 or largest / 7 (stochastic: one
        scale); a block whose largest magnitude is below 2^-118 becomes zeros. Raises UserError for other dtypes.
        """
        values = floats(tensor, self.name, stays=self.runs_on(tensor.device.type))
        key = self._key(values) if self.stochastic else kernels.NEAREST
        packed = kernels.pack(values, self.bits, key)
        if packed is None:
            return None
        scales, codes = packed
        return torch.cat([scales.view(torch.uint8), codes])

    def _key(self, values: Tensor) -> int:
        """Of the random numbers, by the contents (on a GPU: by the sum of all words there)."""
        if values.device.type == "cpu":
            return xxhash.xxh3_64_intdigest(values.numpy().data, seed=self.seed) & 0xFFFFFFFF
        total = int(values.view(torch.int32).sum(dtype=torch.int64))
        return xxhash.xxh3_64_intdigest(total.to_bytes(8, "little", signed=True), seed=self.seed) & 0xFFFFFFFF

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """The values, rounded. Raises RunFailed where bytes lack."""
        check_length(wire, self.wire_bytes(like.numel(), 0), self.name)
        wire = aligned(wire.to(like.device) if self.runs_on(like.device.type) else wire)
        scales = wire[: -(-like.numel() // kernels.BLOCK) * 4]
        return shaped(kernels.unpack(scales.view(torch.float32), wire[len(scales) :], self.bits, like.numel()), like)

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """Four for each block of 256, and the codes."""
        return kernels.packed_bytes(elements, self.bits)
