"""Dropout whose mask is a hash, in numba: only one number is kept for backward, and the mask costs little to make.

Each word of SplitMix64 (Steele et al., OOPSLA 2014) decides for eight values, a byte each; the share dropped is thus
a multiple of 1/256, and what stays is scaled by exactly that. The same for every number of threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from espalier.kernels.compiled import jit

_PIECE = 1 << 12  # words of one iteration, 32,768 values: enough to be worth a thread


@jit(
    *(f"({kind}[::1], {kind}[::1], uint64, int64, {kind})" for kind in ("float32", "float64")),
    parallel=True,
)
def drop(values, out, seed, cut, scale):  # type: ignore[no-untyped-def]
    """`out` = `values` times `scale` where a byte of the stream `seed` is at least `cut`, else 0."""
    count = len(values)
    for piece in numba.prange((count // 8 + _PIECE) // _PIECE):
        first = piece * _PIECE
        for at in range(first, min(first + _PIECE, count // 8)):
            word = seed + np.uint64(at + 1) * np.uint64(0x9E3779B97F4A7C15)
            word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            word = word ^ (word >> np.uint64(31))
            for j in range(8):
                byte = np.int64((word >> np.uint64(8 * j)) & np.uint64(255))
                out[at * 8 + j] = values[at * 8 + j] * scale if byte >= cut else 0
    word = seed
    for j in range(count - count % 8, count):
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(j + 1)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        byte = np.int64((word >> np.uint64(56)) & np.uint64(255))
        out[j] = values[j] * scale if byte >= cut else 0


class Dropped(torch.autograd.Function):
    """Dropout of `cut` of 256 values. The seed is drawn from torch's generator."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cut: int) -> Tensor:
        """`values` of any shape, float32 or float64, on the CPU."""
        ctx.seed = np.uint64(int(torch.randint(2**62, ())))
        ctx.cut = cut
        return _dropped(values, ctx.seed, cut)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The same values stay."""
        return _dropped(gradients[0], ctx.seed, ctx.cut), None


def _dropped(values: Tensor, seed: Any, cut: int) -> Tensor:
    values = values.contiguous()
    out = torch.from_numpy(np.empty(values.shape, dtype=str(values.dtype).removeprefix("torch.")))
    drop(values.view(-1), out.view(-1), seed, cut, 256 / (256 - cut))
    return out
