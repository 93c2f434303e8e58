"""The step of each row that has the least squared error, on the CPU, in numba: see `a2q.fitted`."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels.numba_compile import jit


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
