"""Blocks of values to codes of 8, 4 or 1 bits on a GPU, in Triton: see bits.py.

Bit for bit what bits_cpu.py writes (one bit rounded to nearest: its mean may be summed in another order): divisions are
IEEE's, nothing is fused, and values are rounded by adding 1.5 * 2^23.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
EACH = {8: 1, 4: 8, 1: 8}
"""Blocks of 256 values that a program packs, by bits. On an H100 64 Mi values took 0.21 ms in 4 bits and 0.19 in 1 by
eights, and 0.24 and 0.28 one by one; in 8 bits 0.34 and 0.24."""


@triton.jit
def _noise(index, key):  # type: ignore[no-untyped-def]
    """[0, 1) by C. Wellons' lowbias32 of key and index."""
    h = index.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return ((h ^ (h >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["length", "key"])  # type: ignore[untyped-decorator]
def pack_blocks(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x_ptr,
    scales_ptr,
    codes_ptr,
    bad_ptr,
    length,
    key,
    ceiling,
    BITS: tl.constexpr,
    DRAWN: tl.constexpr,
    EACH: tl.constexpr,
):
    """Scales and codes of `EACH` blocks; 1 in `bad` where a value is not finite."""
    block = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    first = block * 256
    count = tl.minimum(tl.maximum(length - first, 0), 256)
    place = tl.arange(0, 256)
    x = tl.load(x_ptr + first[:, None] + place[None, :], mask=place[None, :] < count[:, None], other=0.0)
    high = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    tl.store(bad_ptr + tl.zeros((EACH,), tl.int32), tl.full((EACH,), 1, tl.uint8), mask=high >= 0x7F800000)
    top = high.to(tl.float32, bitcast=True)
    some = (top >= 3.009265538105056e-36) & (high < 0x7F800000)  # 2^-118
    levels: tl.constexpr = 127.0 if BITS == 8 else 7.0 if BITS == 4 else 1.0
    divisor = tl.where(some, top, 1.0)
    scale = tl.where(some, tl.minimum(tl.div_rn(divisor, levels), ceiling), 0.0)
    inverse = tl.where(some, tl.div_rn(tl.full((EACH,), levels, tl.float32), divisor), 0.0)
    if BITS == 1 and not DRAWN:
        mean = (tl.sum(tl.abs(x).to(tl.float64), 1) / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
        scale = tl.where(some, mean, 0.0)
    tl.store(scales_ptr + block, scale, mask=count > 0)

    width: tl.constexpr = 32 * BITS
    stride = (count * BITS + 7) // 8
    byte = tl.arange(0, width)
    out = tl.zeros((EACH, width), tl.int32)
    for lane in tl.static_range(8 // BITS):
        position = byte[None, :] + lane * stride[:, None]
        valid = (byte[None, :] < stride[:, None]) & (position < count[:, None])
        value = tl.load(x_ptr + first[:, None] + position, mask=valid, other=0.0)
        scaled = tl.where(some[:, None], value, 0.0) * inverse[:, None]
        if DRAWN:
            noise = _noise(first[:, None] + position, key)
            if BITS == 1:
                code = (scaled + (noise + noise - 1.0) >= 0).to(tl.int32)
            else:
                code = (scaled + (noise - 0.5) + 12582912.0).to(tl.int32, bitcast=True)
        elif BITS == 1:
            code = (value >= 0).to(tl.int32)
        else:
            code = (scaled + 12582912.0).to(tl.int32, bitcast=True)
        if BITS == 4:
            code = (code + 8) & 15
        out |= tl.where(valid, (code & 255) << (lane * BITS), 0)
    to = codes_ptr + block[:, None] * width + byte[None, :]
    tl.store(to, out.to(tl.uint8), mask=byte[None, :] < stride[:, None])


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator]
def unpack_blocks(scales_ptr, codes_ptr, values_ptr, length, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of block `program_id`."""
    block = tl.program_id(0).to(tl.int64)
    first = block * 256
    count = tl.minimum(length - first, 256)
    scale = tl.load(scales_ptr + block)
    each: tl.constexpr = 32 * BITS
    stride = (count * BITS + 7) // 8
    byte = tl.arange(0, each)
    raw = tl.load(codes_ptr + block * each + byte, mask=byte < stride, other=0).to(tl.int32)
    for lane in tl.static_range(8 // BITS):
        place = byte + lane * stride
        code = (raw >> (lane * BITS)) & (255 if BITS == 8 else 15 if BITS == 4 else 1)
        if BITS == 8:
            code = (code ^ 128) - 128
        elif BITS == 4:
            code = code - 8
        else:
            code = 2 * code - 1
        tl.store(values_ptr + first + place, code.to(tl.float32) * scale, mask=(byte < stride) & (place < count))


def pack(x: Tensor, bits: int, key: int, scales: Tensor, codes: Tensor) -> bool:
    """Fills `scales` and `codes` from contiguous float32 x [n]; whether a value is not finite (they are then not to be
    used). Asking that waits for the GPU."""
    if not x.numel():
        return False
    bad = torch.zeros(1, dtype=torch.uint8, device=x.device)
    levels = {8: 127.0, 4: 7.0, 1: 1.0}[bits]
    ceiling = float((torch.tensor(3.4028234663852886e38) / levels).double() * (1 - 2.0**-23))
    with torch.cuda.device_of(x):
        each = EACH[bits]
        options = {**_OPTIONS, "num_warps": 1 if each == 1 else 4}
        pack_blocks[-(-scales.numel() // each),](
            x, scales, codes, bad, x.numel(), max(key, 0), ceiling, BITS=bits, DRAWN=key >= 0, EACH=each, **options
        )
    return bool(bad.item())


def unpack(scales: Tensor, codes: Tensor, bits: int, values: Tensor) -> None:
    """Fills `values` [n] float32."""
    if values.numel():
        with torch.cuda.device_of(values):
            unpack_blocks[scales.numel(),](scales, codes, values, values.numel(), BITS=bits, **_OPTIONS)
