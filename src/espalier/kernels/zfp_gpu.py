"""ZFP's blocks on a GPU, in Triton: see zfp.py and zfp_cpu.py, whose tables these kernels read. A block is a lane.

The bytes are those of the CPU form. Blocks that share a word of the stream join it by an atomic or, so the stream
begins as zeros.
"""

from __future__ import annotations

# ruff: noqa: PLR0913, PLR0915, PLR0917 - a kernel is one function
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.zfp_cpu import PACKING, UNPACKING

LANES = 128
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _turned(c):  # type: ignore[no-untyped-def]
    """uint32 negabinary of int32."""
    mask = 0xAAAAAAAA
    return ((c.to(tl.uint32, bitcast=True) + mask) ^ mask).to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _plane(a, b, c, d, k: tl.constexpr):  # type: ignore[no-untyped-def]
    return ((a >> k) & 1) | (((b >> k) & 1) << 1) | (((c >> k) & 1) << 2) | (((d >> k) & 1) << 3)


@triton.jit  # type: ignore[untyped-decorator]
def pack_blocks(x_ptr, table_ptr, words_ptr, bad_ptr, length, blocks, BITS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Joins the codes of `LANES` blocks to the stream; 1 in `bad` for each that is not finite."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    valid = block < blocks
    first = 4 * block
    rest = length - first
    v0 = tl.load(x_ptr + first, mask=valid, other=0.0)
    v1 = tl.load(x_ptr + first + tl.where(rest >= 2, 1, 0), mask=valid, other=0.0)
    v2 = tl.load(x_ptr + first + tl.where(rest >= 3, 2, tl.where(rest == 2, 1, 0)), mask=valid, other=0.0)
    v3 = tl.load(x_ptr + first + tl.where(rest >= 4, 3, 0), mask=valid, other=0.0)
    low31 = 0x7FFFFFFF
    m01 = tl.maximum(v0.to(tl.int32, bitcast=True) & low31, v1.to(tl.int32, bitcast=True) & low31)
    m23 = tl.maximum(v2.to(tl.int32, bitcast=True) & low31, v3.to(tl.int32, bitcast=True) & low31)
    m = tl.maximum(m01, m23)
    bad = m >= 0x7F800000
    tl.store(bad_ptr + block, bad.to(tl.uint8), mask=valid)
    exponent = (m >> 23).to(tl.int64)
    scale = ((1023 + 30 + 127 - 1 - exponent) << 52).to(tl.float64, bitcast=True)
    scale = tl.where(bad, 0.0, scale)
    x = (tl.where(bad, 0.0, v0).to(tl.float64) * scale).to(tl.int32)
    y = (tl.where(bad, 0.0, v1).to(tl.float64) * scale).to(tl.int32)
    z = (tl.where(bad, 0.0, v2).to(tl.float64) * scale).to(tl.int32)
    w = (tl.where(bad, 0.0, v3).to(tl.float64) * scale).to(tl.int32)
    x = (x + w) >> 1
    w = w - x
    z = (z + y) >> 1
    y = y - z
    x = (x + z) >> 1
    z = z - x
    w = (w + y) >> 1
    y = y - w
    w = w + (y >> 1)
    y = y - (w >> 1)
    a, b, c, d = _turned(x), _turned(y), _turned(z), _turned(w)

    near = (1 + 2 * (exponent + 1)).to(tl.uint64)
    far = tl.zeros((LANES,), tl.uint64)
    size = tl.full((LANES,), 9, tl.int32)
    n = tl.zeros((LANES,), tl.int32)
    for pair in tl.static_range(16):
        byte = (_plane(a, b, c, d, 31 - 2 * pair) << 4) | _plane(a, b, c, d, 30 - 2 * pair)
        entry = tl.load(table_ptr + n * 256 + byte.to(tl.int32))
        code = (entry & 0xFFFF).to(tl.uint64)
        at = (size & 63).to(tl.uint64)
        over = (code >> 1) >> (63 - at)
        near |= tl.where(size < 64, code << at, 0)
        far |= tl.where(size < 64, over, tl.where(size < 128, code << at, 0))
        size += (entry >> 16) & 255
        n = entry >> 24
    if BITS < 64:
        near &= (1 << BITS) - 1
    if BITS <= 64:
        far &= 0
    elif BITS < 128:
        far &= (1 << (BITS - 64)) - 1
    stored = valid & (m > 0)
    bit = block * BITS
    shift = (bit & 31).to(tl.uint32)
    before = tl.zeros((LANES,), tl.uint32)
    for index in tl.static_range((BITS + 62) // 32):
        limb = (near >> (32 * index) if index < 2 else far >> (32 * (index & 1)) if index < 4 else far & 0).to(
            tl.uint32
        )
        piece = (limb << shift) | ((before >> 1) >> (31 - shift))
        tl.atomic_or(words_ptr + (bit >> 5) + index, piece.to(tl.int32, bitcast=True), mask=stored & (piece != 0))
        before = limb


@triton.jit  # type: ignore[untyped-decorator]
def _swapped(x, shift: tl.constexpr, mask):  # type: ignore[no-untyped-def]
    """Two index bits of 64 places change their meaning."""
    moved = ((x >> shift) ^ x) & mask
    return x ^ moved ^ (moved << shift)


@triton.jit
def _from_nibbles(x):  # type: ignore[no-untyped-def]
    """16 nibbles to four times 16 bits."""
    x = _swapped(x, 30, 0x00000000CCCCCCCC)
    x = _swapped(x, 6, 0x00CC00CC00CC00CC)
    x = _swapped(x, 15, 0x0000AAAA0000AAAA)
    return _swapped(x, 3, 0x0A0A0A0A0A0A0A0A)


@triton.jit  # type: ignore[untyped-decorator]
def _signed(top, end, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    mask = 0xAAAAAAAA
    u = ((((top >> shift) & 0xFFFF) << 16) | ((end >> shift) & 0xFFFF)).to(tl.uint32)
    return ((u ^ mask) - mask).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _window(words_ptr, at, last, valid):  # type: ignore[no-untyped-def]
    """64 bits from bit `at` on."""
    word = at >> 6
    shift = (at & 63).to(tl.uint64)
    low = tl.load(words_ptr + tl.minimum(word, last), mask=valid, other=0).to(tl.uint64, bitcast=True)
    two = tl.load(words_ptr + tl.minimum(word + 1, last), mask=valid, other=0).to(tl.uint64, bitcast=True)
    return (low >> shift) | ((two << 1) << (63 - shift))


@triton.jit  # type: ignore[untyped-decorator]
def unpack_blocks(words_ptr, tables_ptr, out_ptr, length, last, BITS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of `LANES` blocks, eight bits of each in one look-up (the first look-up takes what is left over).
    `tables` are zfp_cpu's three, one behind the other."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    valid = 4 * block < length
    at = block * BITS
    window = _window(words_ptr, at, last, valid)
    alive = (window & 1) != 0
    exponent = ((window >> 1) & 255).to(tl.int64)
    payload: tl.constexpr = BITS - 9
    head: tl.constexpr = (payload + 7) % 8 + 1 if payload > 0 else 0
    bits = ((window >> 9) & ((1 << head) - 1)).to(tl.int64)
    entry = tl.load(tables_ptr + (17 + head) * 256 + bits).to(tl.uint64, bitcast=True)
    nibbles = 0xFFFFFFFFF0000000
    near = entry & nibbles
    far = tl.zeros((LANES,), tl.uint64)
    plane = ((entry >> 16) & 127).to(tl.int32)
    at += 9 + head
    for _ in tl.static_range((payload - head) // 8):
        bits = (_window(words_ptr, at, last, valid) & 255).to(tl.int64)
        entry = tl.load(tables_ptr + (entry & 0xFF00).to(tl.int64) + bits).to(tl.uint64, bitcast=True)
        nibble = entry & nibbles
        step = (plane & 63).to(tl.uint64)
        near |= tl.where(plane < 64, nibble >> step, 0)
        far |= tl.where(plane < 64, (nibble << 1) << (63 - step), tl.where(plane < 128, nibble >> step, 0))
        plane += ((entry >> 16) & 127).to(tl.int32)
        at += 8
    nibble = tl.load(tables_ptr + 26 * 256 + ((entry >> 8) & 255).to(tl.int64)).to(tl.uint64, bitcast=True) << 60
    step = (plane & 63).to(tl.uint64)
    near |= tl.where(plane < 64, nibble >> step, 0)
    far |= tl.where((plane >= 64) & (plane < 128), nibble >> step, 0)
    top, end = _from_nibbles(tl.where(alive, near, 0)), _from_nibbles(tl.where(alive, far, 0))

    x, y = _signed(top, end, 0), _signed(top, end, 16)
    z, w = _signed(top, end, 32), _signed(top, end, 48)
    y = y + (w >> 1)
    w = w - (y >> 1)
    y = y + w
    w = (w << 1) - y
    z = z + x
    x = (x << 1) - z
    y = y + z
    z = (z << 1) - y
    w = w + x
    x = (x << 1) - w
    scale = ((exponent + (1023 - 127 - 30)) << 52).to(tl.float64, bitcast=True)
    to = out_ptr + 4 * block
    tl.store(to, (x.to(tl.float64) * scale).to(tl.float32), mask=4 * block < length)
    tl.store(to + 1, (y.to(tl.float64) * scale).to(tl.float32), mask=4 * block + 1 < length)
    tl.store(to + 2, (z.to(tl.float64) * scale).to(tl.float32), mask=4 * block + 2 < length)
    tl.store(to + 3, (w.to(tl.float64) * scale).to(tl.float32), mask=4 * block + 3 < length)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For packing and for unpacking."""
    unpacking = torch.cat([torch.from_numpy(table).view(torch.int64) for table in UNPACKING])
    return torch.from_numpy(PACKING).view(torch.int32).to(device), unpacking.to(device)


def pack(x: Tensor, bits: int, words: Tensor) -> bool:
    """Joins the stream of contiguous float32 x [n], in blocks of so many bits, to `words` (int32 zeros); whether a
    value is not finite. Asking that waits for the GPU."""
    blocks = -(-x.numel() // 4)
    if not blocks:
        return False
    bad = torch.empty(blocks, dtype=torch.uint8, device=x.device)
    with torch.cuda.device_of(x):
        pack_blocks[-(-blocks // LANES),](
            x, _tables(x.device)[0], words, bad, x.numel(), blocks, BITS=bits, LANES=LANES, **_OPTIONS
        )
    return bool(bad.any())


def unpack(words: Tensor, bits: int, values: Tensor) -> None:
    """Fills `values` [n] float32 from a stream as int64 words."""
    blocks = -(-values.numel() // 4)
    if not blocks:
        return
    tables = _tables(values.device)[1]
    with torch.cuda.device_of(values):
        unpack_blocks[-(-blocks // LANES),](
            words, tables, values, values.numel(), words.numel() - 1, BITS=bits, LANES=LANES, **_OPTIONS
        )
