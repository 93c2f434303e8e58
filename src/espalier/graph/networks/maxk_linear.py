"""MaxK linear layer, in numba: maps rows of which only k values are kept by adding k rows of the matrix, not all.

It is what MaxK-GNN (arXiv 2312.08656) leaves to a dense product; at k = width / 8 it does an eighth of the additions.
The gradient of the matrix is summed in a fixed number of pieces, so it is the same for every number of threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from espalier.kernels.numba_compile import jit

PIECES = 16
"""Pieces of rows whose gradients of the matrix are added up; enough for 16 threads, and some MiB at usual widths."""


@jit(
    "(real[:, ::1], int64[:, ::1], real[:, ::1], real[::1], real[:, ::1])",
    parallel=True,
    fastmath=True,
)
def mapped(values, columns, matrix, bias, out):  # type: ignore[no-untyped-def]
    """out[i] = bias + sum over j of values[i, j] * matrix[columns[i, j]]; matrix is [width, outputs]."""
    for i in numba.prange(len(values)):
        for o in range(out.shape[1]):
            out[i, o] = bias[o]
        for j in range(values.shape[1]):
            value = values[i, j]
            column = columns[i, j]
            for o in range(out.shape[1]):
                out[i, o] += value * matrix[column, o]


@jit(
    "(real[:, ::1], int64[:, ::1], real[:, ::1], real[:, ::1], real[:, ::1], real[:, :, ::1])",
    parallel=True,
    fastmath=True,
)
def gradients(values, columns, matrix, given, of_values, of_matrix):  # type: ignore[no-untyped-def]
    """From `given` [rows, outputs] the gradient of the values, and of the matrix in len(of_matrix) pieces."""
    pieces = len(of_matrix)
    rows = len(values)
    for piece in numba.prange(pieces):
        of_matrix[piece] = 0
        for i in range(rows * piece // pieces, rows * (piece + 1) // pieces):
            for j in range(values.shape[1]):
                value = values[i, j]
                column = columns[i, j]
                total = value * 0
                for o in range(given.shape[1]):
                    total += given[i, o] * matrix[column, o]
                    of_matrix[piece, column, o] += value * given[i, o]
                of_values[i, j] = total


class Mapped(torch.autograd.Function):
    """(values [rows, k], columns [rows, k], weight [outputs, width], bias [outputs]) -> [rows, outputs]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, columns: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """On the CPU, float32 or float64."""
        matrix = weight.t().contiguous()
        values = values.contiguous()
        columns = columns.long().contiguous()
        out = _empty((len(values), len(weight)), values)
        mapped(values, columns, matrix, bias.contiguous(), out)
        ctx.save_for_backward(values, columns, matrix)
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        """Of the values, the weight and the bias."""
        values, columns, matrix = ctx.saved_tensors
        of_values = _empty(values.shape, values)
        of_matrix = _empty((PIECES, *matrix.shape), values)
        gradients(values, columns, matrix, given[0].contiguous(), of_values, of_matrix)
        return of_values, None, of_matrix.sum(0).t(), given[0].sum(0)


def _empty(shape: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(np.empty(tuple(shape), dtype=str(like.dtype).removeprefix("torch.")))
