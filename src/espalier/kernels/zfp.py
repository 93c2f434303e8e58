"""Smooth values take less room: ZFP in one dim at a fixed rate (Lindstrom, TVCG 2014), in the format of zfp 1.0.

A block of four float32 becomes integers on its largest exponent, a lifted transform, and bit planes from the highest,
cut at the rate. Every block takes the same number of bits. Where we deviate from the reference: a block whose
largest magnitude is below 2^-98 is scaled in float64 and comes back right; the reference's scale overflows there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.base import aligned, has_triton, operation

if TYPE_CHECKING:
    from jaxtyping import Float32, UInt8

_NEGABINARY = 0xAAAAAAAA
_MASK = 0xFFFFFFFF


def block_bits(rate: float) -> int:
    """Bits of a block of four values at `rate` bits per value: at least its exponent's 9."""
    return max(int(4 * rate + 0.5), 9)


def stream_bytes(elements: int, rate: float) -> int:
    """Bytes of so many values (NumPy arrays allowed): whole words of 64 bits."""
    return -(-(-(-elements // 4) * block_bits(rate)) // 64) * 8


@operation("zfp_pack")
def pack(x: Float32[Tensor, " n"], rate: float) -> UInt8[Tensor, " m"] | None:
    """The stream of `x` [n]; None where a value is not finite.

    Args:
        x: one dim, any length; what lacks in the last block is repeated from it.
        rate: bits per value, from 2.25 to 32.
    """
    if not bool(x.isfinite().all()):
        return None
    stream = 0
    bits = block_bits(rate)
    for block, four in enumerate(_fours(x)):
        stream |= _coded(four, bits) << (block * bits)
    return torch.tensor(list(stream.to_bytes(stream_bytes(x.numel(), rate), "little")), dtype=torch.uint8)


@operation("zfp_unpack")
def unpack(wire: UInt8[Tensor, " m"], rate: float, length: int) -> Float32[Tensor, " n"]:
    """The `length` values of a stream, as the reference decodes them."""
    stream, bits = int.from_bytes(bytes(wire.tolist()), "little"), block_bits(rate)
    values = [
        value
        for block in range(-(-length // 4))
        for value in _decoded(stream >> (block * bits) & ((1 << bits) - 1), bits)
    ]
    return torch.tensor(values[:length], dtype=torch.float64).float()


def _fours(x: Tensor) -> list[list[float]]:
    values = x.tolist()
    fours = [values[i : i + 4] for i in range(0, len(values), 4)]
    for four in fours[-1:]:
        a, *rest = four
        four[len(four) :] = {0: [a, a, a], 1: [*rest, a], 2: [a], 3: []}[len(rest)]
    return fours


def _coded(four: list[float], bits: int) -> int:
    """The bits of one block, the first lowest."""
    top = max(abs(value) for value in four)
    if top == 0:
        return 0
    exponent = max(int(torch.frexp(torch.tensor(top, dtype=torch.float64))[1]), -126)
    x, y, z, w = (int(value * 2.0 ** (30 - exponent)) for value in four)
    x, w = (x + w) >> 1, w - ((x + w) >> 1)
    z, y = (z + y) >> 1, y - ((z + y) >> 1)
    x, z = (x + z) >> 1, z - ((x + z) >> 1)
    w, y = (w + y) >> 1, y - ((w + y) >> 1)
    w, y = w + (y >> 1), y - ((w + (y >> 1)) >> 1)
    u = [((c + _NEGABINARY) & _MASK) ^ _NEGABINARY for c in (x, y, z, w)]
    coded_bits, n = [1, *((exponent + 127) >> i & 1 for i in range(8))], 0
    for k in reversed(range(32)):
        plane = [c >> k & 1 for c in u]
        coded_bits += plane[:n]
        while n < 4:
            coded_bits.append(int(any(plane[n:])))
            if not coded_bits[-1]:
                break
            while n < 3 and not plane[n]:
                coded_bits.append(0)
                n += 1
            if n < 3:
                coded_bits.append(1)
            n += 1
    return sum(bit << i for i, bit in enumerate(coded_bits[:bits]))


def _decoded(block: int, bits: int) -> list[float]:
    """The four values of a block."""
    if not block & 1:
        return [0.0] * 4
    at, n, u = 9, 0, [0, 0, 0, 0]
    for k in reversed(range(32)):
        if at >= bits:
            break
        first = min(n, bits - at)
        plane = block >> at & ((1 << first) - 1)
        at += first
        while n < 4 and at < bits:
            at += 1
            if not block >> (at - 1) & 1:
                break
            while n < 3 and at < bits:
                at += 1
                if block >> (at - 1) & 1:
                    break
                n += 1
            plane |= 1 << n
            n += 1
        u = [c | (plane >> i & 1) << k for i, c in enumerate(u)]
    x, y, z, w = (
        (coefficient if coefficient < 2**31 else coefficient - 2**32)
        for coefficient in (((c ^ _NEGABINARY) - _NEGABINARY) & _MASK for c in u)
    )
    return [value * 2.0 ** ((block >> 1 & 255) - 127 - 30) for value in _lifted_back(x, y, z, w)]


def _lifted_back(x: int, y: int, z: int, w: int) -> tuple[int, int, int, int]:
    y, w = y + (w >> 1), w - ((y + (w >> 1)) >> 1)
    y, w = y + w, w * 2 - (y + w)
    z, x = z + x, x * 2 - (z + x)
    y, z = y + z, z * 2 - (y + z)
    w, x = w + x, x * 2 - (w + x)
    return _signed(x), _signed(y), _signed(z), _signed(w)


def _signed(value: int) -> int:
    """As 32 bits hold it."""
    return (value + 2**31) % 2**32 - 2**31


@pack.fast("cpu")
def pack_by_planes(x: Tensor, rate: float) -> Tensor | None:
    """numba: the transform in vectors over blocks; two planes of a block are one look-up."""
    from espalier.kernels import zfp_cpu

    words = torch.zeros(stream_bytes(x.numel(), rate) // 8, dtype=torch.int64).view(torch.uint64)
    bad = zfp_cpu.pack(x.contiguous(), block_bits(rate), zfp_cpu.PACKING, words)
    return None if bad else words.view(torch.uint8)


@unpack.fast("cpu")
def unpack_by_planes(wire: Tensor, rate: float, length: int) -> Tensor:
    """numba: eight bits of a block are one look-up; the transform in vectors over blocks."""
    from espalier.kernels import zfp_cpu

    values = torch.empty(length)
    zfp_cpu.unpack(aligned(wire).view(torch.uint64), block_bits(rate), zfp_cpu.UNPACKING, values)
    return values


def pack_in_triton(x: Tensor, rate: float) -> Tensor | None:
    """Triton: a block is a lane."""
    from espalier.kernels import zfp_gpu

    words = torch.zeros(stream_bytes(x.numel(), rate) // 4, dtype=torch.int32, device=x.device)
    bad = zfp_gpu.pack(x.contiguous(), block_bits(rate), words)
    return None if bad else words.view(torch.uint8)


def unpack_in_triton(wire: Tensor, rate: float, length: int) -> Tensor:
    """Triton."""
    from espalier.kernels import zfp_gpu

    values = torch.empty(length, device=wire.device)
    zfp_gpu.unpack(aligned(wire).view(torch.int64), block_bits(rate), values)
    return values


if has_triton():
    pack.fast("cuda")(pack_in_triton)
    unpack.fast("cuda")(unpack_in_triton)
