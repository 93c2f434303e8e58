"""Blocks of values to codes of 8, 4 or 1 bits on the CPU, in numba: see bits.py."""

# ruff: noqa: C901, PLR0912  (a block goes through in one piece)

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit, njit

BLOCK = 256
_TINY = np.float32(2.0**-118)
_LARGEST = 3.4028234663852886e38
_MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: a float32 of this size holds a rounded small integer in its low bits
_INFINITE = np.int32(0x7F800000)


@njit
def _noise(index: Any, key: Any) -> Any:
    h = np.uint32(np.uint32(index) * np.uint32(0x9E3779B1) + key)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.float32(np.uint32(h ^ (h >> np.uint32(16))) >> np.uint32(8)) * np.float32(2.0**-24)


@njit
def _noises(first: int, count: int, key: Any, noise: Any) -> None:
    for i in range(count):
        noise[i] = _noise(first + i, key)


@njit
def _mean(block: Any, count: int, sums: Any) -> Any:
    sums[:] = 0.0
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        for j in range(8):
            sums[j] += np.float64(abs(block[i + j]))
    for i in range(whole, count):
        sums[0] += np.float64(abs(block[i]))
    return np.float32(sums.sum() / count)


@jit("int64(float32[::1], int64, int64, float32[::1], uint8[::1])")
def pack(x: Any, bits: int, key: int, scales: Any, codes: Any) -> int:
    """Fills `scales` and `codes`; 1 and unfinished where a value is not finite."""
    n = x.size
    ints = x.view(np.int32)
    noise = np.zeros(BLOCK, np.float32)
    rounded = np.zeros(BLOCK, np.float32)
    words = rounded.view(np.int32)
    sums = np.zeros(8)
    each = BLOCK * bits // 8
    levels = np.float32(127.0) if bits == 8 else np.float32(7.0) if bits == 4 else np.float32(1.0)
    ceiling = np.float32(np.float64(np.float32(_LARGEST) / levels) * (1 - 2.0**-23))
    for block in range(scales.size):
        first = block * BLOCK
        count = min(BLOCK, n - first)
        part, raw = x[first : first + count], ints[first : first + count]
        high = np.int32(0)
        for i in range(count):
            high = max(high, np.int32(raw[i] & np.int32(0x7FFFFFFF)))
        if high >= _INFINITE:
            return 1
        words[0] = high
        top = rounded[0]
        scale, inverse = np.float32(0.0), np.float32(0.0)
        if top >= _TINY:
            scale, inverse = min(top / levels, ceiling), levels / top
        drawn = key >= 0
        if drawn:
            _noises(first, count, np.uint32(key), noise)
        stride = (count * bits + 7) // 8
        out = codes[block * each : block * each + stride]
        if bits == 1:
            out[:] = 0
            if not drawn and scale > 0:
                scale = _mean(part, count, sums)
            for k in range(8):
                begin = k * stride
                for j in range(max(0, min(stride, count - begin))):
                    if drawn:
                        up = part[begin + j] * inverse + (noise[begin + j] + noise[begin + j] - np.float32(1.0)) >= 0
                    else:
                        up = part[begin + j] >= 0
                    out[j] |= np.uint8(up) << np.uint8(k)
        else:
            if drawn:
                for i in range(count):
                    rounded[i] = (part[i] * inverse + (noise[i] - np.float32(0.5))) + _MAGIC
            else:
                for i in range(count):
                    rounded[i] = part[i] * inverse + _MAGIC
            if bits == 8:
                for i in range(count):
                    out[i] = np.uint8(words[i])
            else:
                low, high_ = words[:stride], words[stride:count]
                for j in range(stride):
                    out[j] = np.uint8((low[j] + 8) & 15)
                for j in range(count - stride):
                    out[j] |= np.uint8(((high_[j] + 8) & 15) << 4)
        scales[block] = scale
    return 0


@jit("(float32[::1], uint8[::1], int64, float32[::1])")
def unpack(scales: Any, codes: Any, bits: int, values: Any) -> None:
    """Fills `values`."""
    each = BLOCK * bits // 8
    for block in range(scales.size):
        first = block * BLOCK
        count = min(BLOCK, values.size - first)
        out = values[first : first + count]
        scale = scales[block]
        stride = (count * bits + 7) // 8
        part = codes[block * each : block * each + stride]
        if bits == 8:
            signed = part.view(np.int8)
            for i in range(count):
                out[i] = np.float32(signed[i]) * scale
        elif bits == 4:
            for j in range(stride):
                out[j] = np.float32(np.int32(part[j] & 15) - 8) * scale
            rest = out[stride:]
            for j in range(count - stride):
                rest[j] = np.float32(np.int32(part[j] >> 4) - 8) * scale
        else:
            for k in range(8):
                begin = k * stride
                for j in range(max(0, min(stride, count - begin))):
                    out[begin + j] = scale if (part[j] >> np.uint8(k)) & 1 else -scale
