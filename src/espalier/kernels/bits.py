"""Few bits for a value: blocks of 256 float32 become one scale and codes of 8, 4 or 1 bits, and come back.

The arithmetic is absmax quantization by blocks, as in 8-bit optimizers (arXiv 2110.02861); one bit is a sign and the
block's mean magnitude (arXiv 1802.04434). A block's codes are dealt out to its bytes in strides, so that packing is a
few operations on whole vectors: byte j of a block of m values holds the values j, j + s, j + 2s … with s = ceil(m *
bits / 8). The fast forms stand in bits_cpu.py and bits_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.kernels.base import has_triton, operation

if TYPE_CHECKING:
    from jaxtyping import Float32, UInt8

BLOCK = 256
"""Values that share a scale."""
BITS = (8, 4, 1)
LEVELS = {8: 127.0, 4: 7.0, 1: 1.0}
"""The largest code of either sign."""
TINY = 2.0**-118
"""A block whose largest magnitude is below is sent as zeros: the inverse of its scale would overflow."""
LARGEST = 3.4028234663852886e38
NEAREST = -1
"""In place of a key: rounds to the nearest code, ties to the even one."""


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of the codes and scales of so many values (NumPy arrays allowed)."""
    return -(-elements // BLOCK) * 4 + -(-elements * bits // 8)


def _uniform(count: int, key: int) -> Tensor:
    """[count] float32 in [0, 1), a hash of key and index (C. Wellons' lowbias32, public domain)."""
    mask = 0xFFFFFFFF
    h = (torch.arange(count, dtype=torch.int64) * 0x9E3779B1 + key) & mask
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    return ((h ^ (h >> 16)) >> 8).float() * 2.0**-24


@operation("lowbit_pack")
def pack(
    x: Float32[Tensor, " n"], bits: int, key: int
) -> tuple[Float32[Tensor, " blocks"], UInt8[Tensor, " m"]] | None:
    """Scales and codes of `x`; None where a value is not finite.

    Args:
        x: one dim, any length.
        bits: 8, 4 or 1.
        key: of the random numbers of stochastic rounding, 0 to 2^32 - 1, or `NEAREST`.
    """
    if not bool(x.isfinite().all()):
        return None
    length = x.numel()
    rows = torch.nn.functional.pad(x, (0, -length % BLOCK)).view(-1, BLOCK)
    top = rows.abs().amax(1) if length else x.new_empty(0)
    top = torch.where(top < TINY, 0.0, top)
    levels = LEVELS[bits]
    scales = (top / levels).clamp(max=LARGEST / levels * (1 - 2.0**-23))
    noise = None if key == NEAREST else _uniform(rows.numel(), key).view_as(rows)
    inverse = torch.where(top > 0, levels / top, 0.0)[:, None]
    if bits > 1:
        values = rows * inverse
        values = (values if noise is None else values + (noise - 0.5)).round() + (0 if bits == 8 else 8)
        codes = values.clamp(-127, 127).to(torch.int64)
    elif noise is None:
        counts = torch.full((len(rows),), float(BLOCK), dtype=torch.float64)
        counts[-1:] = (length - 1) % BLOCK + 1
        scales = torch.where(top > 0, (rows.double().abs().sum(1) / counts).float(), 0.0)
        codes = (rows >= 0).to(torch.int64)
    else:
        codes = (rows * inverse + (noise * 2 - 1) >= 0).to(torch.int64)
    return scales, torch.cat([x.new_empty(0, dtype=torch.uint8), *_strided(codes, length, bits)])


def _strided(codes: Tensor, length: int, bits: int) -> list[Tensor]:
    parts = []
    for index, block in enumerate(codes):
        levels = block[: length - index * BLOCK] & ((1 << bits) - 1)
        stride = -(-len(levels) * bits // 8)
        lanes = torch.nn.functional.pad(levels, (0, stride * (8 // bits) - len(levels))).view(8 // bits, stride)
        shifts = torch.arange(0, 8, bits)[:, None]
        parts.append((lanes << shifts).sum(0).to(torch.uint8))
    return parts


@operation("lowbit_unpack")
def unpack(
    scales: Float32[Tensor, " blocks"], codes: UInt8[Tensor, " m"], bits: int, length: int
) -> Float32[Tensor, " n"]:
    """The `length` values that `pack` was given, each off by at most half a scale (stochastic: one scale)."""
    parts = [torch.empty(0)]
    for index, scale in enumerate(scales):
        count_here = min(BLOCK, length - index * BLOCK)
        stride = -(-count_here * bits // 8)
        lanes = codes[index * BLOCK * bits // 8 :][:stride].to(torch.int64)
        shifts = torch.arange(0, 8, bits)[:, None]
        raw = ((lanes >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count_here]
        raw = {8: (raw ^ 128) - 128, 4: raw - 8, 1: 2 * raw - 1}[bits]
        parts.append(raw.float() * scale)
    return torch.cat(parts)


def _packed(kernel: Callable[..., Any], x: Tensor, bits: int, key: int) -> tuple[Tensor, Tensor] | None:
    scales = x.new_empty(-(-x.numel() // BLOCK))
    codes = x.new_empty(-(-x.numel() * bits // 8), dtype=torch.uint8)
    return None if kernel(x.contiguous(), bits, key, scales, codes) else (scales, codes)


def _unpacked(kernel: Callable[..., Any], scales: Tensor, codes: Tensor, bits: int, length: int) -> Tensor:
    values = scales.new_empty(length)
    kernel(scales, codes, bits, values)
    return values


@pack.fast("cpu")
def pack_by_blocks(x: Tensor, bits: int, key: int) -> tuple[Tensor, Tensor] | None:
    """numba: a block stays in cache from its magnitude to its codes."""
    from espalier.kernels import bits_cpu

    return _packed(bits_cpu.pack, x, bits, key)


@unpack.fast("cpu")
def unpack_by_blocks(scales: Tensor, codes: Tensor, bits: int, length: int) -> Tensor:
    """numba."""
    from espalier.kernels import bits_cpu

    return _unpacked(bits_cpu.unpack, scales, codes, bits, length)


def pack_in_triton(x: Tensor, bits: int, key: int) -> tuple[Tensor, Tensor] | None:
    """Triton: a block is a program."""
    from espalier.kernels import bits_gpu

    return _packed(bits_gpu.pack, x, bits, key)


def unpack_in_triton(scales: Tensor, codes: Tensor, bits: int, length: int) -> Tensor:
    """Triton."""
    from espalier.kernels import bits_gpu

    return _unpacked(bits_gpu.unpack, scales, codes, bits, length)


if has_triton():
    pack.fast("cuda")(pack_in_triton)
    unpack.fast("cuda")(unpack_in_triton)
