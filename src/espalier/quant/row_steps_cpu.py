"""Fitted steps of rows (`a2q.fitted`), rounding, and its gradients (`a2q.FakeQuantize`) on the CPU, in numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels.numba_compile import jit, njit

BLOCKS = 64
"""Pieces of the rows that sums for columns are taken over, so that they are the same for any number of threads."""
LN2 = np.float32(np.log(2))


@jit(
    "(float32[:, ::1], Tuple((float32[::1], float32[::1])), Tuple((float32[::1], float32[::1])), int64, float32[::1])",
    parallel=True,
)
def fit(x: Any, pairs: Any, tables: Any, signed: Any, out: Any) -> None:
    """Fills `out` with log2 of steps. `pairs`: of each row log2 of the step that others are tried round, and the
    largest code; `tables`: the step of each step code, and octaves to try."""
    middle, largest = pairs
    steps, offsets = tables
    for row in numba.prange(len(x)):
        least, best = np.float32(np.inf), middle[row]
        for offset in offsets:
            logarithm = middle[row] + offset
            step = steps[min(max(int(np.rint(logarithm * np.float32(8))), -128), 127) + 128]
            error = np.float32(0)
            for column in range(x.shape[1]):
                value = x[row, column]
                if not signed:
                    value = max(value, np.float32(0))
                size = abs(value)
                code = min(np.floor(size / step + np.float32(0.5)), largest[row])
                apart = size - code * step
                if not signed and x[row, column] < 0:
                    apart = x[row, column]
                error += apart * apart
            if error < least:
                least, best = error, logarithm
        out[row] = best


@njit
def coded(value: Any, step: Any, largest: Any, signed: Any) -> Any:
    """The code of a value, with its sign."""
    if not signed and value < 0:
        return np.float32(0)
    code = min(np.floor(abs(value) / step + np.float32(0.5)), largest)
    return -code if value < 0 else code


@jit("(float32[:, ::1], Tuple((float32[::1], float32[::1])), int64, int64, float32[:, ::1])", parallel=True)
def round_values(x: Any, pairs: Any, by_row: Any, signed: Any, out: Any) -> None:
    """Fills `out` with step * code. `pairs`: steps and largest codes, of rows or of columns."""
    steps, largest = pairs
    for row in numba.prange(len(x)):
        for column in range(x.shape[1]):
            at = np.int64(row) if by_row else np.int64(column)
            out[row, column] = coded(x[row, column], steps[at], largest[at], signed) * steps[at]


@njit
def _gradients(value: Any, upstream: Any, pair: Any, rule: Any, local: Any) -> Any:
    """Of a value, of its step and of its bits, by equations 3 to 5; `rule`: signed, and whether gradients pass;
    `local`: the weight of its own error, below 0: the task's gradient is taken."""
    (step, largest), (signed, passes) = pair, rule
    code = coded(value, step, largest, signed)
    inside = abs(value) <= step * largest if signed else 0 <= value <= step * largest
    own = upstream if inside or passes else np.float32(0)
    unit = np.float32(1)
    if local >= 0:
        apart = code * step - value
        upstream = np.float32(0) if apart == 0 else (local / step if apart > 0 else -local / step)
        unit = largest + np.float32(1)
    if inside:
        return own, upstream * (code - value / step), np.float32(0)
    sign = np.float32(1) if value > 0 else (np.float32(-1) if signed and value < 0 else np.float32(0))
    return own, upstream * code, upstream * (sign * (largest + np.float32(1)) / unit * LN2 * step)


@jit(
    "(float32[:, ::1], float32[:, ::1], Tuple((float32[::1], float32[::1])), UniTuple(int64, 3), float32, "
    "Tuple((float32[:, ::1], float64[:, ::1], float64[:, ::1])))",
    parallel=True,
)
def row_gradients(x: Any, upstream: Any, pairs: Any, rule: Any, local: Any, out: Any) -> None:
    """Fills `out`: gradients of values, and of rows' steps and bits [1, rows]. `rule`: signed, passes, and the rows
    whose error counts."""
    (steps, largest), (signed, passes, own) = pairs, rule
    values, of_steps, of_bits = out
    for row in numba.prange(len(x)):
        share = np.float32(0) if local >= 0 and row >= own else local
        step, bits = 0.0, 0.0
        for column in range(x.shape[1]):
            found = _gradients(
                x[row, column], upstream[row, column], (steps[row], largest[row]), (signed, passes), share
            )
            values[row, column] = found[0]
            step += found[1]
            bits += found[2]
        of_steps[0, row], of_bits[0, row] = step, bits


@jit(
    "(float32[:, ::1], float32[:, ::1], Tuple((float32[::1], float32[::1])), UniTuple(int64, 3), float32, "
    "Tuple((float32[:, ::1], float64[:, ::1], float64[:, ::1])))",
    parallel=True,
)
def column_gradients(x: Any, upstream: Any, pairs: Any, rule: Any, local: Any, out: Any) -> None:
    """As `row_gradients`, of columns' steps and bits [BLOCKS, columns], to be summed."""
    (steps, largest), (signed, passes, own) = pairs, rule
    values, of_steps, of_bits = out
    blocks = len(of_steps)
    for block in numba.prange(blocks):
        first, end = len(x) * np.int64(block) // blocks, len(x) * np.int64(block + 1) // blocks
        for row in range(first, end):
            share = np.float32(0) if local >= 0 and row >= own else local
            for column in range(x.shape[1]):
                found = _gradients(
                    x[row, column], upstream[row, column], (steps[column], largest[column]), (signed, passes), share
                )
                values[row, column] = found[0]
                of_steps[block, column] += found[1]
                of_bits[block, column] += found[2]
