"""Spiking neurons along rays on the CPU, in numba: a layer, its gradient, and the last two layers from spikes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels.numba_compile import jit


def _each(kinds: str) -> tuple[str, ...]:
    return tuple(kinds.replace("real", dtype) for dtype in ("float32", "float64"))


@jit(*_each("(real[:, ::1], int64[::1], real[::1], real[:, ::1])"), parallel=True)
def scan(currents: Any, offsets: Any, neuron: Any, spikes: Any) -> None:
    """Spikes (0 or 1) of each sample. `neuron`: time constant and threshold."""
    channels, tau, threshold = currents.shape[1], neuron[0], neuron[1]
    for ray in numba.prange(len(offsets) - 1):
        membrane = np.zeros(channels, currents.dtype)
        for at in range(offsets[ray], offsets[ray + 1]):
            for channel in range(channels):
                charged = membrane[channel] + (currents[at, channel] - membrane[channel]) / tau
                fires = charged >= threshold
                spikes[at, channel] = 1 if fires else 0
                membrane[channel] = 0 if fires else charged


@jit(*_each("(real[:, ::1], int64[::1], real[::1], uint8[:, ::1], real[:, ::1])"), parallel=True)
def scan_backward(currents: Any, offsets: Any, neuron: Any, packed: Any, gradient: Any) -> None:
    """Turns the gradient of the spikes into that of the currents, in place. Membranes are made again from the currents
    and the packed spikes; the reset is not differentiated. `neuron`: time constant, threshold, steepness."""
    channels, tau, threshold, steep = currents.shape[1], neuron[0], neuron[1], neuron[2]
    for ray in numba.prange(len(offsets) - 1):
        first, count = offsets[ray], offsets[ray + 1] - offsets[ray]
        charged = np.empty((count, channels), currents.dtype)
        kept = np.empty((count, channels), currents.dtype)
        membrane = np.zeros(channels, currents.dtype)
        for step in range(count):
            for channel in range(channels):
                bit = (packed[first + step, channel >> 3] >> (channel & 7)) & 1
                kept[step, channel] = 1 - bit
                charged[step, channel] = membrane[channel] + (currents[first + step, channel] - membrane[channel]) / tau
                membrane[channel] = charged[step, channel] * kept[step, channel]
        membrane[:] = 0  # from here on its gradient
        for back in range(count):
            step = count - 1 - back
            for channel in range(channels):
                smooth = 1 / (1 + np.exp(-steep * (charged[step, channel] - threshold)))
                surrogate = steep * smooth * (1 - smooth)
                of_charged = gradient[first + step, channel] * surrogate + membrane[channel] * kept[step, channel]
                gradient[first + step, channel] = of_charged / tau
                membrane[channel] = of_charged - of_charged / tau


@jit("(float32[:, ::1], int64[::1], float32[::1], float32[:, ::1], float32[:, ::1], int64[:, ::1])", parallel=True)
def infer(currents: Any, offsets: Any, neuron: Any, weights: Any, out: Any, counts: Any) -> None:
    """Both hidden layers and the last product, sample by sample: a neuron that fires adds its row of the next matrix.

    `weights` [inputs, outputs + 3]: those of the second layer, and of the last; `counts` [rays, 2]: spikes of both
    layers.
    """
    channels, tau, threshold = currents.shape[1], neuron[0], neuron[1]
    for ray in numba.prange(len(offsets) - 1):
        one, two = np.zeros(channels, np.float32), np.zeros(channels, np.float32)
        sums, fired = np.empty(channels, np.float32), np.empty(channels, np.int64)
        for at in range(offsets[ray], offsets[ray + 1]):
            firing = 0
            for channel in range(channels):
                charged = one[channel] + (currents[at, channel] - one[channel]) / tau
                fires = charged >= threshold
                one[channel] = 0 if fires else charged
                fired[firing] = channel
                firing += fires
            counts[ray, 0] += firing
            sums[:] = 0
            for index in range(firing):
                row = fired[index]
                for channel in range(channels):
                    sums[channel] += weights[row, channel]
            firing = 0
            for channel in range(channels):
                charged = two[channel] + (sums[channel] - two[channel]) / tau
                fires = charged >= threshold
                two[channel] = 0 if fires else charged
                fired[firing] = channel
                firing += fires
            counts[ray, 1] += firing
            red, green, blue = np.float32(0), np.float32(0), np.float32(0)
            for index in range(firing):
                row = fired[index]
                red, green = red + weights[row, channels], green + weights[row, channels + 1]
                blue = blue + weights[row, channels + 2]
            out[at, 0], out[at, 1], out[at, 2] = red, green, blue
