"""Spiking neurons along rays on the CPU, in numba: a layer, its gradient, and the last two layers from spikes."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from espalier.kernels.numba_compile import intrinsic, jit, njit

TAYLOR = (*(1 / math.factorial(k) for k in range(7)), 1 / 16, 20.0)
"""Of `_surrogate`."""


@jit("(real[:, ::1], int64[::1], real[::1], real[:, ::1], real[:, ::1], int64[::1])", parallel=True)
def scan(currents: Any, offsets: Any, neuron: Any, charged: Any, spikes: Any, counts: Any) -> None:
    """Membranes before their reset and spikes (0 or 1) of each sample, and how many spikes each ray has.

    Args:
        offsets: of some rays, in the rows of `currents` and `charged`; those of `spikes` begin with these rays.
        neuron: time constant, threshold.
    """
    kind = currents.dtype.type
    first = offsets[0]
    zero, unit, channels, tau, threshold = kind(0), kind(1), currents.shape[1], neuron[0], neuron[1]
    for ray in numba.prange(len(offsets) - 1):
        membrane = np.zeros(channels, currents.dtype)
        fired = np.zeros(channels, currents.dtype)
        for at in range(offsets[ray], offsets[ray + 1]):
            x = currents[at]
            m = charged[at]
            s = spikes[at - first]
            for channel in range(channels):
                now = membrane[channel] + (x[channel] - membrane[channel]) / tau
                fires = unit if now >= threshold else zero
                m[channel] = now
                s[channel] = fires
                fired[channel] += fires
                membrane[channel] = zero if now >= threshold else now
        counts[ray] = np.int64(fired.sum())


@njit
def _surrogate(x: Any, taylor: Any) -> Any:
    """q (1 - q) with q = sigmoid(x), to 1e-7, in products alone, of which a processor does many at a time: exp(-|x|) by
    Taylor's series of a 16th of it, squared four times. `taylor`: 1 / k! for k from 0 to 6, a 16th, and 20, above which
    the result is taken for that of 20 (2e-9)."""
    size = x if x > -x else -x
    z = -taylor[7] * (size if size < taylor[8] else taylor[8])
    e = taylor[5] + z * taylor[6]
    e = taylor[3] + z * (taylor[4] + z * e)
    e = taylor[0] + z * (taylor[1] + z * (taylor[2] + z * e))
    e *= e
    e *= e
    e *= e
    e *= e
    return e / ((taylor[0] + e) * (taylor[0] + e))


@jit("(real[:, ::1], int64[::1], real[::1], real[::1], real[:, ::1], real[:, ::1])", parallel=True)
def scan_backward(charged: Any, offsets: Any, neuron: Any, taylor: Any, gradient: Any, spikes: Any) -> None:
    """Turns the gradient of the spikes into that of the currents, in place, and makes the spikes again. The reset is
    not differentiated.

    Args:
        charged, offsets, spikes: see `scan`; `gradient` has the rows of `charged`.
        neuron: time constant, threshold, steepness.
        taylor: see `_surrogate`.
    """
    kind = charged.dtype.type
    first = offsets[0]
    zero, unit, channels, tau, threshold, steep = kind(0), kind(1), charged.shape[1], neuron[0], neuron[1], neuron[2]
    for ray in numba.prange(len(offsets) - 1):
        carried = np.zeros(channels, charged.dtype)
        for back in range(offsets[ray + 1] - offsets[ray]):
            at = offsets[ray + 1] - 1 - back
            m = charged[at]
            g = gradient[at]
            s = spikes[at - first]
            for channel in range(channels):
                fires = m[channel] >= threshold
                steepness = steep * _surrogate(steep * (m[channel] - threshold), taylor)
                of_charged = g[channel] * steepness + (zero if fires else carried[channel])
                share = of_charged / tau
                g[channel] = share
                carried[channel] = of_charged - share
                s[channel] = unit if fires else zero


@intrinsic
def _trailing_zeros(typing: Any, bits: Any) -> Any:
    """Of a number that is not 0."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(bits), write


@njit
def _fire(membrane: Any, x: Any, neuron: Any, marks: Any) -> None:
    """A step of a layer's neurons with the inputs `x`: a byte is 1 where one fires."""
    zero = np.float32(0)
    tau = neuron[0]
    threshold = neuron[1]
    for channel in range(len(membrane)):
        now = membrane[channel] + (x[channel] - membrane[channel]) / tau
        marks[channel] = np.uint8(now >= threshold)
        membrane[channel] = zero if now >= threshold else now


@njit
def _mask(words: Any, first: int) -> Any:
    """A bit for each of the 64 bytes of eight words, by a product that gathers the lowest bits of a word in its last
    byte."""
    mask = np.uint64(0)
    for word in range(8):
        gathered = (words[first + word] * np.uint64(0x0102040810204080)) >> np.uint64(56)
        mask |= gathered << np.uint64(8 * word)
    return mask


@njit
def _add_rows(words: Any, weights: Any, sums: Any, rows: Any) -> int:
    """Adds the rows of neurons that fire to `sums`, four at a time; returns how many they are."""
    channels = len(sums)
    lowest = np.uint64(1)
    fired = 0
    for block in range(len(words) // 8):
        mask = _mask(words, 8 * block)
        while mask:
            for index in range(4):
                rows[index] = channels
                if mask:
                    rows[index] = 64 * block + _trailing_zeros(mask)
                    mask &= mask - lowest
                    fired += 1
            a = rows[0]
            b = rows[1]
            c = rows[2]
            d = rows[3]
            for channel in range(channels):
                some = sums[channel] + weights[a, channel] + weights[b, channel]
                sums[channel] = some + weights[c, channel] + weights[d, channel]
    return fired


@njit
def _add_colours(words: Any, weights: Any, channels: int, out: Any) -> int:
    """The same of the last three columns."""
    lowest, fired, red, green, blue = np.uint64(1), 0, np.float32(0), np.float32(0), np.float32(0)
    for block in range(len(words) // 8):
        mask = _mask(words, 8 * block)
        while mask:
            row = 64 * block + _trailing_zeros(mask)
            mask &= mask - lowest
            fired += 1
            red += weights[row, channels]
            green += weights[row, channels + 1]
            blue = blue + weights[row, channels + 2]
    out[0] = red
    out[1] = green
    out[2] = blue
    return fired


@jit("(float32[:, ::1], int64[::1], float32[::1], float32[:, ::1], float32[:, ::1], int64[:, ::1])", parallel=True)
def infer(currents: Any, offsets: Any, neuron: Any, weights: Any, out: Any, counts: Any) -> None:
    """Both hidden layers and the last product, sample by sample: a neuron that fires adds its row of the next matrix.

    `weights` [inputs + 1, outputs + 3]: those of the second layer, and of the last, and a row of zeros, since rows are
    added four at a time; `counts` [rays, 2]: spikes of both layers.
    """
    channels = currents.shape[1]
    for ray in numba.prange(len(offsets) - 1):
        first_layer = np.zeros(channels, np.float32)
        two = np.zeros(channels, np.float32)
        sums = np.empty(channels, np.float32)
        marks = np.zeros((channels + 63) // 64 * 64, np.uint8)
        rows = np.empty(4, np.int64)
        words = marks.view(np.uint64)
        first = 0
        second = 0
        for at in range(offsets[ray], offsets[ray + 1]):
            _fire(first_layer, currents[at], neuron, marks)
            for channel in range(channels):
                sums[channel] = 0
            first += _add_rows(words, weights, sums, rows)
            _fire(two, sums, neuron, marks)
            second += _add_colours(words, weights, channels, out[at])
        counts[ray, 0] = first
        counts[ray, 1] = second
