"""Byte planes on the CPU, in numba: see byte_planes.py."""

from __future__ import annotations

from typing import Any

from espalier.kernels.numba_compile import jit

_BLOCK = 4096


@jit(
    "(uint16[::1], int64, uint8[:, ::1])",
    "(uint32[::1], int64, uint8[:, ::1])",
    "(uint64[::1], int64, uint8[:, ::1])",
)
def apart(words: Any, turn: int, planes: Any) -> None:
    """Fills `planes` [width, n] from `words` turned left by `turn` bits (0 or 1)."""
    kind = words.dtype.type
    width = planes.shape[0]
    step, back = kind(turn), kind((8 * width - turn) % (8 * width))
    for first in range(0, words.size, _BLOCK):
        part = words[first : first + _BLOCK]
        for plane in range(width):
            out = planes[plane, first : first + _BLOCK]
            shift = kind(8 * (width - 1 - plane))
            for i in range(part.size):
                turned = kind(kind(part[i] << step) | kind(part[i] >> back))
                out[i] = (turned >> shift) & kind(255)


@jit(
    "(uint8[:, ::1], int64, uint16[::1])",
    "(uint8[:, ::1], int64, uint32[::1])",
    "(uint8[:, ::1], int64, uint64[::1])",
)
def joined(planes: Any, turn: int, words: Any) -> None:
    """Fills `words` from `planes` [width, n]."""
    kind = words.dtype.type
    width = planes.shape[0]
    step, back = kind(turn), kind((8 * width - turn) % (8 * width))
    for first in range(0, words.size, _BLOCK):
        part = words[first : first + _BLOCK]
        part[:] = 0
        for plane in range(width):
            into = planes[plane, first : first + _BLOCK]
            shift = kind(8 * (width - 1 - plane))
            for i in range(part.size):
                part[i] |= kind(into[i]) << shift
        for i in range(part.size):
            part[i] = kind(kind(part[i] >> step) | kind(part[i] << back))
