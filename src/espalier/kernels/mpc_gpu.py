"""MPC's stages on a GPU, in Triton: see mpc.py and mpc_cpu.py, whose bytes these kernels write. A chunk is a program.

How long a chunk becomes is known only when it is done, so packing takes two passes: the first leaves the differences in
scratch memory and counts those that are not zero, a running sum of the counts says where each chunk's words go, and the
second writes them there. Unpacking counts the bitmap first, likewise.
"""

from __future__ import annotations

# ruff: noqa: PLR0913, PLR0917 - a kernel is one function
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def _words(x, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """As unsigned words of so many bits; of wider ones the lowest bits."""
    kind: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint32 if BITS == 32 else tl.uint64
    return x.to(kind)


@triton.jit  # type: ignore[untyped-decorator]
def _swapped(x, STEP: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One round of the transposition: words that lie STEP apart exchange the bits that lie STEP apart."""
    shape: tl.constexpr = (1024 // (2 * STEP), 2, STEP)
    near, far = tl.split(tl.permute(tl.reshape(x, shape), (0, 2, 1)))
    swap = _words((near >> STEP) ^ far, BITS) & MASK
    near, far = near ^ _words(swap << STEP, BITS), far ^ swap
    return tl.reshape(tl.permute(tl.join(near, far), (0, 2, 1)), (1024,))


@triton.jit  # type: ignore[untyped-decorator]
def _turned(x, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[1024] words, the bit matrix of every BITS of them transposed (Warren, Hacker's Delight, section 7-3)."""
    if BITS == 64:
        x = _swapped(x, 32, 0x00000000FFFFFFFF, BITS)
    if BITS >= 32:
        x = _swapped(x, 16, 0x0000FFFF0000FFFF & ((1 << BITS) - 1), BITS)
    x = _swapped(x, 8, 0x00FF00FF00FF00FF & ((1 << BITS) - 1), BITS)
    x = _swapped(x, 4, 0x0F0F0F0F0F0F0F0F & ((1 << BITS) - 1), BITS)
    x = _swapped(x, 2, 0x3333333333333333 & ((1 << BITS) - 1), BITS)
    return _swapped(x, 1, 0x5555555555555555 & ((1 << BITS) - 1), BITS)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(x, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Running sums along the last axis, mod 2^BITS. They are taken in 64 bits: narrow sums are widened in Triton's
    interpreter and not on a GPU, and the lowest bits are the same."""
    return _words(tl.cumsum(x.to(tl.uint64), len(x.shape) - 1), BITS)


@triton.jit(do_not_specialize=["length", "dims"])  # type: ignore[untyped-decorator]
def pack_chunks(words_ptr, s_ptr, marks_ptr, counts_ptr, length, dims, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The differences of chunk `program_id` with zeros behind its last tile, its bitmap, and how many are not zero."""
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * 1024
    place = tl.arange(0, 1024)
    count_here = tl.minimum(length - first, 1024)
    v = _words(tl.load(words_ptr + first + place, mask=place < count_here, other=0), BITS)
    before = _words(
        tl.load(words_ptr + first + place - dims, mask=(place < count_here) & (place >= dims), other=0), BITS
    )
    t = _turned(_words(v - before, BITS), BITS)
    left = tl.gather(t, tl.maximum(place - 1, 0), 0)
    s = _words(t - _words(tl.where(place > 0, left, 0), BITS), BITS)
    tiles = (count_here + BITS - 1) // BITS
    there = (s != 0) & (place < tiles * BITS)
    tl.store(s_ptr + first + place, _words(tl.where(there, s, 0), BITS))
    tile = tl.arange(0, 1024 // BITS)
    bits = tl.reshape(there.to(tl.uint64), (1024 // BITS, BITS)) << tl.arange(0, BITS).to(tl.uint64)[None, :]
    mark = _words(tl.sum(bits, 1), BITS)
    tl.store(marks_ptr + chunk * (1024 // BITS) + tile, mark, mask=tile < tiles)
    tl.store(counts_ptr + chunk, tl.sum(there.to(tl.int64), 0))


@triton.jit
def keep_chunks(s_ptr, ends_ptr, kept_ptr):  # type: ignore[no-untyped-def]
    """The words of chunk `program_id` that are not zero, up to where its words end."""
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, 1024)
    s = tl.load(s_ptr + chunk * 1024 + place)
    there = (s != 0).to(tl.int64)
    start = tl.load(ends_ptr + chunk) - tl.sum(there, 0)
    tl.store(kept_ptr + start + tl.cumsum(there, 0) - there, s, mask=there > 0)


@triton.jit  # type: ignore[untyped-decorator]
def _marked(marks_ptr, chunk, tiles, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[1024] int64: 1 where the bitmap of `chunk` says that a word was kept."""
    place = tl.arange(0, 1024)
    tile = chunk * (1024 // BITS) + place // BITS
    mark = tl.load(marks_ptr + tile, mask=tile < tiles, other=0)
    return ((mark.to(tl.int64) >> (place % BITS).to(tl.int64)) & 1).to(tl.int64)


@triton.jit(do_not_specialize=["tiles"])  # type: ignore[untyped-decorator]
def count_chunks(marks_ptr, counts_ptr, tiles, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many words of chunk `program_id` were kept."""
    chunk = tl.program_id(0).to(tl.int64)
    tl.store(counts_ptr + chunk, tl.sum(_marked(marks_ptr, chunk, tiles, BITS), 0))


@triton.jit(do_not_specialize=["length", "tiles"])  # type: ignore[untyped-decorator]
def unpack_chunks(  # type: ignore[no-untyped-def]
    marks_ptr, ends_ptr, kept_ptr, words_ptr, length, tiles, BITS: tl.constexpr, DIMS: tl.constexpr, LANES: tl.constexpr
):
    """The words of chunk `program_id`. LANES is DIMS or the next power of 2: one lane of every record's d-th words."""
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * 1024
    there = _marked(marks_ptr, chunk, tiles, BITS)
    start = tl.load(ends_ptr + chunk) - tl.sum(there, 0)
    s = tl.load(kept_ptr + start + tl.cumsum(there, 0) - there, mask=there > 0, other=0)
    r = _turned(_sums(_words(s, BITS), BITS), BITS)
    records: tl.constexpr = 1024 // LANES if LANES == DIMS else 2048 // LANES
    lane = tl.arange(0, LANES)[:, None]
    place = tl.arange(0, records)[None, :] * DIMS + lane
    inside = (place < 1024) & (lane < DIMS)
    count_here = tl.gather(r, tl.reshape(tl.minimum(place, 1023), (LANES * records,)), 0)
    v = _sums(tl.reshape(count_here, (LANES, records)), BITS)
    tl.store(words_ptr + first + place, v, mask=inside & (first + place < length))


def pack(words: Tensor, dims: int, marks: Tensor) -> Tensor:
    """Fills `marks` [tiles] from contiguous `words` [n] of its dtype; returns the words that are kept. Their number is
    asked for, which waits for the GPU."""
    signed = _SIGNED[words.element_size()]
    chunks, bits = -(-words.numel() // CHUNK), 8 * words.element_size()
    if not chunks:
        return words.new_empty(0)
    scratch = torch.empty(chunks * CHUNK, dtype=signed, device=words.device)
    counts = torch.empty(chunks, dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        pack_chunks[chunks,](
            words.view(signed), scratch, marks.view(signed), counts, words.numel(), dims, BITS=bits, **_OPTIONS
        )
        ends = counts.cumsum(0)
        gathered = torch.empty(int(ends[-1]), dtype=signed, device=words.device)
        keep_chunks[chunks,](scratch, ends, gathered, **_OPTIONS)
    return gathered.view(words.dtype)


def ends(marks: Tensor, words: int) -> Tensor:
    """[chunks] int64: how many words a stream of so many has kept up to the end of each chunk, by its bitmap."""
    bits, chunks = 8 * marks.element_size(), -(-words // CHUNK)
    counts = torch.empty(chunks, dtype=torch.int64, device=marks.device)
    with torch.cuda.device_of(marks):
        count_chunks[chunks,](marks.view(_SIGNED[marks.element_size()]), counts, marks.numel(), BITS=bits, **_OPTIONS)
    return counts.cumsum(0)


def unpack(marks: Tensor, ends: Tensor, stored: Tensor, dims: int, words: Tensor) -> None:
    """Fills `words` [n]. `ends`: of these marks; `stored` has as many words as they say."""
    signed, bits = _SIGNED[words.element_size()], 8 * words.element_size()
    operands = (marks.view(signed), ends, stored.view(signed), words.view(signed), words.numel(), marks.numel())
    with torch.cuda.device_of(words):
        unpack_chunks[len(ends),](*operands, BITS=bits, DIMS=dims, LANES=triton.next_power_of_2(dims), **_OPTIONS)
