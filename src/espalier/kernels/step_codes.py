"""Steps of rounded rows as bytes: a step code stands for a power of 2^(1/8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float32, Shaped, UInt8

OCTAVE = 8
"""Steps between one and its double."""


def _steps() -> Tensor:
    octaves, parts = np.divmod(np.arange(-128, 128), OCTAVE)
    short = np.round(np.exp2(np.arange(OCTAVE) / OCTAVE) * 128) / 128
    return torch.from_numpy(np.ldexp(short.astype(np.float32)[parts], octaves))


STEPS: Float32[Tensor, " 256"] = _steps()
"""The step of each step code, which is a byte: 2^((code - 128) / 8) to 8 binary digits, 1.5e-5 to 6e4. A code of 8 bits
times a step is then a float32 without rounding, and so is every sum of codes of one step that is below 2^16: sums of
quantized values are those of the integers, to the bit."""


def step_codes(logarithm: Shaped[Tensor, " entries"]) -> UInt8[Tensor, " entries"]:
    """The step code of log2(step)."""
    return ((logarithm * OCTAVE).round().clamp(-128, 127) + 128).to(torch.uint8)
