"""Cross-entropy kernels: the loss of chosen rows, and its gradient. Summed in a fixed number of pieces."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels import simd64
from espalier.kernels.numba_compile import jit
from espalier.kernels.simd64 import Lanes, add_scaled, lanewise, power_of_e

PIECES = 64


def _powers(lanes: Lanes, highest: Any) -> Any:
    power = power_of_e(lanes.builder, lanes.minus(lanes.read(1), lanes.vectors.spread(highest)))
    lanes.write(0, power)
    return lanes.total(power)


_POWERS = lanewise(2, _powers)
"""f(n, made, at, x, of, highest): made = e^(x - highest), and the sum of it."""


@jit(
    "(float64[::1], real[:, ::1], int64[::1], int64[::1])",
    parallel=True,
    uses=(simd64,),
)
def sums_of(sums, logits, labels, rows):  # type: ignore[no-untyped-def]
    """sums[piece] = sum of -log softmax(logits[rows[i]])[labels[i]]; a label below 0 counts nothing, one beyond the
    classes as infinity."""
    classes, zero, flat = np.int64(logits.shape[1]), np.int64(0), logits.reshape(-1)
    for piece in numba.prange(len(sums)):
        made = np.empty(classes, logits.dtype)
        for i in range(len(rows) * piece // len(sums), len(rows) * (piece + 1) // len(sums)):
            if labels[i] >= classes:
                sums[piece] = np.inf
            elif labels[i] >= 0:
                at = rows[i] * classes
                highest = flat[at]
                for j in range(1, classes):
                    highest = max(highest, flat[at + j])
                total = _POWERS(classes, made, zero, flat, at, highest)
                sums[piece] += np.log(total) + highest - flat[at + labels[i]]


@jit(
    "(real[:, ::1], real[:, ::1], int64[::1], int64[::1], real)",
    parallel=True,
    uses=(simd64,),
)
def gradients(made, logits, labels, rows, given):  # type: ignore[no-untyped-def]
    """made[rows[i]] = given · (softmax(logits[rows[i]]) - 1 at labels[i]); zeros in the other rows."""
    classes, zero, flat, out = np.int64(logits.shape[1]), np.int64(0), logits.reshape(-1), made.reshape(-1)
    for piece in numba.prange(PIECES):
        out[len(out) * piece // PIECES : len(out) * (piece + 1) // PIECES] = 0
    for piece in numba.prange(PIECES):
        shares = np.empty(classes, logits.dtype)
        for i in range(len(rows) * piece // PIECES, len(rows) * (piece + 1) // PIECES):
            if labels[i] >= 0:
                at = rows[i] * classes
                highest = flat[at]
                for j in range(1, classes):
                    highest = max(highest, flat[at + j])
                total = _POWERS(classes, shares, zero, flat, at, highest)
                add_scaled(classes, out, at, shares, zero, given / total)
                out[at + labels[i]] -= given
