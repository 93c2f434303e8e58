"""Fixed-point sums with a shared exponent: gradients added as integers, so that the order of arrival changes no bit.

After SwitchML (NSDI 2021): the workers first agree on the largest exponent of each block of 256 values, scale by it,
round to integers of 8, 16 or 32 bits and add those. A value of a block with exponent e is off by at most half of
2^(e - 126 - bits), whatever the number of workers does with the other bits (`shift`). Integers of partial sums can be
added on the way without knowing what they mean. A block that holds NaN or infinity anywhere comes back as NaN.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
"""Values that share an exponent."""
MOST = 256
"""Workers whose sum of 8-bit integers is sure to fit into 16 bits."""
WIDTHS = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def shift(bits: int, workers: int) -> int:
    """Bits of a value's integer beside its sign: 7 of 8, whose sums are sent on in 16; of wider ones as many as leave
    room for the sum of all workers."""
    return 7 if bits == 8 else bits - (2 if bits == 32 else 1) - math.ceil(math.log2(workers))


def blocks(elements: int) -> int:
    """Exponents of so many values."""
    return -(-elements // BLOCK)


def exponents(values: Tensor) -> Tensor:
    """[n] float32 to [ceil(n / 256)] uint8: the largest exponent of each block."""
    from espalier.kernels import fixed_point_cpu as kernels

    largest = torch.empty(blocks(values.numel()), dtype=torch.uint8)
    kernels.exponents(values, largest)
    return largest


def encode(
    values: Tensor,
    shared: Tensor,
    form: tuple[int, int],
    out: Tensor,
    rounding: Tensor | int | None = None,
) -> Tensor:
    """[n] float32 to integers. They are rounded to the nearest, or, with a key, up or down at random, so that the mean
    of many roundings is the value, and no residual is needed. Random numbers (SplitMix64) are drawn from the key alone,
    so the same step done again sends the same bytes.

    Args:
        form: bits of an integer, and `shift`.
        out: memory for the integers, bytes.
        rounding: the residual, where what is lost is left (it was added to `values` before), or an int, the key.
    """
    from espalier.kernels import fixed_point_cpu as kernels

    bits, places = form
    codes = out[: values.numel() * bits // 8].view(WIDTHS[bits])
    if isinstance(rounding, int):
        kernels.encode_stochastic(codes, values, shared, places, np.uint64(rounding))
    else:
        rest = values.new_empty(0) if rounding is None else rounding
        kernels.encode(codes, values, shared, places, rest)
    return codes


def add(total: Tensor, codes: Tensor) -> None:
    """Adds integers of any width to `total` [n] int32, in place. (torch would make a copy of them as int32.)"""
    from espalier.kernels import fixed_point_cpu as kernels

    kernels.add(codes, total)


def decode(total: Tensor, shared: Tensor, places: int, out: Tensor) -> None:
    """[n] int32 sums to float32 in `out`."""
    from espalier.kernels import fixed_point_cpu as kernels

    kernels.decode(total, out, shared, places)
