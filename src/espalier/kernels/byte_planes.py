"""Byte planes: the bytes of words apart, the highest first; a float's exponent is alone in its plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.kernels.base import operation

if TYPE_CHECKING:
    from jaxtyping import Shaped, UInt8

WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@operation("byte_planes")
def apart(words: Shaped[Tensor, " n"], rotated: bool) -> UInt8[Tensor, "width n"]:
    """The bytes of unsigned words, the highest first; `rotated`: of words turned left by one bit, so that the sign of a
    float is the last."""
    width = words.element_size()
    if not words.numel():
        return torch.empty(width, 0, dtype=torch.uint8)
    turned = words.view(_SIGNED[width])
    if rotated:
        turned = (turned << 1) | ((turned >> (8 * width - 1)) & 1)
    return turned.contiguous().view(torch.uint8).view(-1, width).T.flip(0).contiguous()


@operation("byte_planes_joined")
def joined(planes: UInt8[Tensor, "width n"], rotated: bool) -> Shaped[Tensor, " n"]:
    """The words that `apart` was given."""
    width = planes.shape[0]
    if not planes.numel():
        return torch.empty(0, dtype=WORDS[width])
    words = planes.flip(0).T.contiguous().view(-1).view(_SIGNED[width])
    if rotated:
        words = ((words >> 1) & torch.iinfo(words.dtype).max) | (words << (8 * width - 1))
    return words.view(WORDS[width])


def _has_words(first: Tensor, rotated: bool) -> bool:
    return first.dim() == 2 or first.element_size() > 1


@apart.fast("cpu", wins=_has_words)
def apart_by_blocks(words: Tensor, rotated: bool) -> Tensor:
    """numba: a block of words is read from cache once for each plane."""
    from espalier.kernels import byte_planes_cpu

    planes = torch.empty(words.element_size(), words.numel(), dtype=torch.uint8)
    byte_planes_cpu.apart(words, int(rotated), planes)
    return planes


@joined.fast("cpu", wins=lambda planes, rotated: planes.shape[0] > 1)
def joined_by_blocks(planes: Tensor, rotated: bool) -> Tensor:
    """numba."""
    from espalier.kernels import byte_planes_cpu

    words = torch.empty(planes.shape[1], dtype=WORDS[planes.shape[0]])
    byte_planes_cpu.joined(planes, int(rotated), words)
    return words
