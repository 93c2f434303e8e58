"""Nonzero values and where they stand, without loss: for gradients of grids and tables, of which a step touches little.

A list of (index, value) takes four bytes of index for each value; here places are bitmaps, as touched cells lie
together: one of the blocks of 64 values that are not all zero, and one of the values in each of these. What is sent for
a reduction is each rank's own, and the sum once more, which has the places of all (the union), so that ranks need no
round in which they agree about places. Zeros are those without a bit: -0.0 and NaN come back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.comm.codec_input import bytes_of, check_length
from espalier.comm.sparse_blocks import BLOCK
from espalier.recipe.errors import UserError

_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


class Sparse:
    """`sparse`. Takes every dtype of 2, 4 or 8 bytes; every bit comes back."""

    name = "sparse"
    lossless = True
    fixed = False

    def encode(self, tensor: Tensor) -> Tensor:
        """[n] to bytes: a bit for each block, the bits of blocks that are not empty, and values that are not zero.

        Raises UserError for dtypes of another size.
        """
        if tensor.element_size() not in _WORDS or tensor.is_complex():
            raise UserError(
                f"Codec 'sparse' got {str(tensor.dtype).removeprefix('torch.')}.",
                why="it takes values of 2, 4 or 8 bytes",
                do="codec 'exact'",
            )
        words = bytes_of(tensor).numpy().view(_WORDS[tensor.element_size()])
        bits = np.zeros(_blocks(len(words)) * BLOCK, dtype=bool)
        np.not_equal(words, 0, out=bits[: len(words)])
        places = np.flatnonzero(bits)
        masks = np.packbits(bits).view(np.uint64)
        full = masks != 0
        parts = (np.packbits(_padded(full)), masks[full].view(np.uint8), words[places].view(np.uint8))
        return torch.from_numpy(np.concatenate(parts))

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """Every bit. Raises RunFailed where bytes lack or a place is behind the end."""
        data = bytes_of(wire).numpy()
        count = like.numel()
        width = like.element_size()
        begin = _top_bytes(count)
        check_length(wire[:begin], begin, self.name)
        full = np.unpackbits(data[:begin], count=_blocks(count)).astype(bool)
        end = begin + 8 * int(full.sum())
        check_length(wire[:end], end, self.name)
        masks = np.zeros(_blocks(count), dtype=np.uint64)
        masks[full] = np.frombuffer(data[begin:end].tobytes(), dtype=np.uint64)
        places = np.flatnonzero(np.unpackbits(masks.view(np.uint8)).view(bool))
        expected = end + width * len(places)
        check_length(wire, expected if not len(places) or places[-1] < count else -1, self.name)
        words = np.zeros(count, dtype=_WORDS[width])
        words[places] = np.frombuffer(data[end:].tobytes(), dtype=_WORDS[width])
        return torch.from_numpy(words.view(np.uint8)).view(like.dtype).view(like.shape).to(like.device)

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """At most: where no value is zero."""
        return sent_bytes(elements, _blocks(elements), elements, element_bytes)


def sent_bytes(elements: Any, blocks: Any, values: Any, element_bytes: int = 4) -> Any:
    """Bytes of an encoded tensor, exactly: of `elements` values of which `values` are not zero, in `blocks` blocks
    (NumPy arrays allowed)."""
    return _top_bytes(elements) + 8 * blocks + element_bytes * values


def _blocks(elements: Any) -> Any:
    return -(-elements // BLOCK)


def _top_bytes(elements: Any) -> Any:
    """Of the bitmap of blocks."""
    return -(-_blocks(elements) // 8)


def _padded(bits: Any) -> Any:
    return np.pad(bits, (0, -len(bits) % 8))
