"""Transpose of a sparse matrix by counting, compiled for the CPU."""

from __future__ import annotations

from typing import Any

from espalier.kernels.numba_compile import jit


@jit("(int64[::1], int32[::1], int64[::1], int32[::1], int64[::1])")
def turn(indptr: Any, indices: Any, free: Any, rows: Any, order: Any) -> Any:
    """The row of each entry, and where it stood, column by column; in a column in the order they stood in.

    `free` [columns]: the offset of each column, which ends as that of the next; `rows`, `order` [entries] are filled.
    """
    for row in range(len(indptr) - 1):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            at = free[column]
            free[column] = at + 1
            rows[at] = row
            order[at] = entry
