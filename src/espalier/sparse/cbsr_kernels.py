"""CBSR kernels: sums of rows of which only k values are stored, and their gradient at the stored places."""

# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from __future__ import annotations

import numba

from espalier.kernels.numba_compile import jit

_SIGNATURES = (
    "(real[:, ::1], int64[::1], int32[::1], real[::1], real[:, ::1], uint8[:, ::1], int64[::1])",
    "(real[:, ::1], int64[::1], int32[::1], real[::1], real[:, ::1], int32[:, ::1], int64[::1])",
)


@jit(*_SIGNATURES, parallel=True)
def scatter_rows(y, indptr, indices, weights, values, columns, cuts):  # type: ignore[no-untyped-def]
    """y = A·X for an X with `values` at `columns` [nodes, k]; empty `weights` stand for ones."""
    width = values.shape[1]
    for piece in numba.prange(len(cuts) - 1):
        for i in range(cuts[piece], cuts[piece + 1]):
            for f in range(y.shape[1]):
                y[i, f] = 0
            for e in range(indptr[i], indptr[i + 1]):
                c = indices[e]
                if len(weights):
                    for j in range(width):
                        y[i, columns[c, j]] += weights[e] * values[c, j]
                else:
                    for j in range(width):
                        y[i, columns[c, j]] += values[c, j]


@jit(*_SIGNATURES, parallel=True)
def gather_rows(dvalues, indptr, indices, weights, gradient, columns, cuts):  # type: ignore[no-untyped-def]
    """dvalues[c, j] (zeros before) = Σ over the rows i with an entry c of weight · gradient[i, columns[c, j]].

    A piece is the nodes `cuts[p]` to `cuts[p + 1]`, and walks through the entries of all rows that name them: so the
    gradient is read once through for each piece, and what is read and written at random stays in second-level cache.
    """
    width = dvalues.shape[1]
    for piece in numba.prange(len(cuts) - 1):
        lowest = cuts[piece]
        highest = cuts[piece + 1]
        for i in range(len(indptr) - 1):
            e = indptr[i]
            last = indptr[i + 1]
            while e < last:  # the first entry not below the piece, by halving
                middle = (e + last) // 2
                if indices[middle] < lowest:
                    e = middle + 1
                else:
                    last = middle
            while e < indptr[i + 1] and indices[e] < highest:
                c = indices[e]
                if len(weights):
                    for j in range(width):
                        dvalues[c, j] += weights[e] * gradient[i, columns[c, j]]
                else:
                    for j in range(width):
                        dvalues[c, j] += gradient[i, columns[c, j]]
                e += 1
