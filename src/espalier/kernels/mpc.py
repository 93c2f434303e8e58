"""Words that repeat take less room: MPC's stages LNVd | BIT | LNV1 | ZE (Yang et al., IEEE Cluster 2015), without loss.

Differences at distance d, the bit matrix of every tile of W words transposed, differences of neighbours, and a bitmap
of the words that are not zero before those words. Chunks of 1,024 words are independent of one another. Deviations: the
two 32-bit words of the header stand before words of every width; 16-bit words (bfloat16) in tiles of 16 are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from espalier.kernels.base import aligned, has_triton, operation
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Shaped, UInt8

CHUNK = 1024
MAGIC = 0x63706D00
HEADER = 8  # bytes
WORDS = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_NUMPY = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def most_bytes(words: int, width: int) -> int:
    """Bytes of the worst case for so many words of `width` bytes."""
    tiles = -(-words // (8 * width))
    return HEADER + tiles * width * (1 + 8 * width)


@operation("mpc_pack")
def pack(words: Shaped[Tensor, " n"], dims: int) -> UInt8[Tensor, " m"]:
    """The compressed words.

    Args:
        words: uint16, uint32 or uint64, one dim, any length below 2^32.
        dims: d, from 1 to 32: words of a record, whose neighbours are its like.
    """
    width = words.element_size()
    bits, values = 8 * width, words.numpy()
    parts = [np.array([MAGIC + dims - 1, len(values)], np.uint32).view(np.uint8)]
    marks, stored = [], []
    for first in range(0, len(values), CHUNK):
        v = values[first : first + CHUNK]
        r = np.zeros(-(-len(v) // bits) * bits, v.dtype)
        r[: len(v)] = v
        r[dims : len(v)] -= v[:-dims]
        planes = np.unpackbits(r.view(np.uint8).reshape(-1, bits, width), axis=2, bitorder="little")
        turned = planes.transpose(0, 2, 1)
        t = np.packbits(turned, axis=2, bitorder="little").reshape(-1).view(v.dtype)
        s = np.concatenate([t[:1], t[1:] - t[:-1]])
        marks.append(s != 0)
        stored.append(s[s != 0])
    if marks:
        parts += [np.packbits(np.concatenate(marks), bitorder="little"), np.concatenate(stored).view(np.uint8)]
    return torch.from_numpy(np.concatenate(parts))


@operation("mpc_unpack")
def unpack(wire: UInt8[Tensor, " m"], width: int) -> Shaped[Tensor, " n"]:
    """The words that `pack` was given. Raises UserError where the bytes are not a stream of words of `width` bytes."""
    dims, length, bitmap, stored = _checked(wire, width)
    kind, bits = _NUMPY[width], 8 * width
    marks = np.unpackbits(bitmap.numpy(), bitorder="little").astype(bool)
    s = np.zeros(len(marks), kind)
    s[marks] = stored.numpy().view(kind)
    out = np.empty(length, kind)
    for first in range(0, length, CHUNK):
        t = np.cumsum(s[first : first + CHUNK], dtype=kind)
        planes = np.unpackbits(t.view(np.uint8).reshape(-1, bits, width), axis=2, bitorder="little")
        turned = planes.transpose(0, 2, 1)
        r = np.packbits(turned, axis=2, bitorder="little").reshape(-1).view(kind)
        for lane in range(dims):
            r[lane::dims] = np.cumsum(r[lane::dims], dtype=kind)
        out[first : first + CHUNK] = r[: length - first]
    return torch.from_numpy(out)


def _header(wire: Tensor, width: int) -> tuple[int, int, Tensor, Tensor]:
    """(dims, words, bitmap, kept words) of a stream; bitmap and kept words are bytes."""
    first, length = (int(word) for word in wire[:HEADER].cpu().view(torch.uint32)) if wire.numel() >= HEADER else (0, 0)
    dims, size = first - MAGIC + 1, -(-length // (8 * width)) * width
    marks = wire[HEADER : HEADER + size]
    if not 1 <= dims <= 32 or len(marks) != size:
        raise UserError("These bytes are no MPC stream.", do="the bytes that mpc's pack returned, unchanged")
    return dims, length, marks, wire[HEADER + size :]


def _check(marks: Tensor, words: Tensor, announced: int) -> None:
    """Raises UserError where there are other bytes of kept words than the bitmap announces."""
    if words.numel() != announced:
        before = HEADER + marks.numel()
        raise UserError(
            f"An MPC stream has {before + words.numel()} bytes where its bitmap announces {before + announced}.",
            do="the bytes that mpc's pack returned, unchanged",
        )


def _checked(wire: Tensor, width: int) -> tuple[int, int, Tensor, Tensor]:
    """`_header` of a whole stream on the host."""
    dims, length, marks, stored = _header(wire, width)
    _check(marks, stored, int(np.bitwise_count(marks.numpy()).sum()) * width)
    return dims, length, marks, stored


@pack.fast("cpu")
def pack_by_tiles(words: Tensor, dims: int) -> Tensor:
    """numba: the tiles of a chunk are transposed side by side, one in each lane of a vector."""
    from espalier.kernels import mpc_cpu

    width, length = words.element_size(), words.numel()
    wire = torch.empty(most_bytes(length, width), dtype=torch.uint8)
    wire[:HEADER] = torch.tensor([MAGIC + dims - 1, length], dtype=torch.int64).to(torch.uint32).view(torch.uint8)
    tiles = -(-length // (8 * width))
    marks, stored = wire[HEADER:][: tiles * width].view(WORDS[width]), wire[HEADER:][tiles * width :].view(WORDS[width])
    count = mpc_cpu.pack(words.contiguous(), dims, marks, stored)
    return wire[: HEADER + (tiles + count) * width]


@unpack.fast("cpu")
def unpack_by_tiles(wire: Tensor, width: int) -> Tensor:
    """numba."""
    from espalier.kernels import mpc_cpu

    dims, length, marks, stored = _checked(aligned(wire), width)
    words = torch.empty(length, dtype=WORDS[width])
    mpc_cpu.unpack(marks.view(WORDS[width]), stored.view(WORDS[width]), dims, words)
    return words


def pack_in_triton(words: Tensor, dims: int) -> Tensor:
    """Triton: a chunk is a program."""
    from espalier.kernels import mpc_gpu

    width, length = words.element_size(), words.numel()
    header = torch.tensor([MAGIC + dims - 1, length], dtype=torch.int64).to(torch.uint32).view(torch.uint8)
    marks = torch.empty(-(-length // (8 * width)), dtype=WORDS[width], device=words.device)
    stored = mpc_gpu.pack(words.contiguous(), dims, marks)
    return torch.cat([header.to(words.device), marks.view(torch.uint8), stored.view(torch.uint8)])


def unpack_in_triton(wire: Tensor, width: int) -> Tensor:
    """Triton. Looks at the header and at how many words were kept, which waits for the GPU."""
    from espalier.kernels import mpc_gpu

    dims, length, bitmap, stored = _header(aligned(wire), width)
    words = torch.empty(length, dtype=WORDS[width], device=wire.device)
    marks = bitmap.view(WORDS[width])
    ends = mpc_gpu.ends(marks, length)
    _check(bitmap, stored, int(ends[-1]) * width if length else 0)
    if length:
        mpc_gpu.unpack(marks, ends, stored.view(WORDS[width]), dims, words)
    return words


if has_triton():
    pack.fast("cuda")(pack_in_triton)
    unpack.fast("cuda")(unpack_in_triton)
