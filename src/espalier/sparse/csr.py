"""CSR, the plain format of a sparse matrix, and its product with a dense one (SpMM), plain and compiled.

Row i holds what node i gathers: `indices[indptr[i]:indptr[i + 1]]` are its neighbours. For a graph given as edges
(source, target) that is row = target, column = source, so that `A @ X` sums the messages that arrive.
The compiled product sums in the order of the entries, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS
from espalier.recipe.errors import UserError

KERNEL_TYPES = (torch.float32, torch.float64)
_LARGEST = 2**31 - 1
"""Column ids are int32."""
_SORTED = 2**16
"""Entries below which sorting is quick enough, and no kernel need be loaded."""
PIECES = 64
"""Pieces of work of a product: enough for 16 threads to finish together, whatever the rows' lengths."""


class DiagonalScale(NamedTuple):
    """Diagonals of M = diag(left)·A·diag(right); None stands for ones."""

    left: Tensor | None
    right: Tensor | None


class Transpose(NamedTuple):
    """The transposed pattern, and where each of its entries stands in the original."""

    pattern: CSR
    order: Tensor


@dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix by rows. Immutable; keeps its transpose once somebody asked for it. `CSR.of` checks its input.

    Attributes:
        indptr: int64 [rows + 1]. indices: int32 [entries], ascending in each row.
        shape: rows, columns.
        values: float32 or float64 [entries], or None where all are one.
        scale: set where `values` is left[row]·right[column], rounded to float32: what remains is a binary matrix, which
            CBM can hold. Products in float64 take the factors as they are.
    """

    indptr: Tensor
    indices: Tensor
    shape: tuple[int, int]
    values: Tensor | None = None
    scale: DiagonalScale | None = None

    @classmethod
    def of(cls, indptr: Any, indices: Any, shape: tuple[int, int], values: Any = None) -> CSR:
        """The matrix of three arrays (NumPy or torch, any integer type); rows are sorted, nothing else is changed.

        Duplicate entries stay: their values add up, as everywhere in linear algebra (`coalesced` joins them).
        Raises UserError: ids outside the matrix, offsets that do not ascend, lengths that do not fit.
        """
        indptr = _integers(indptr, "indptr")
        indices = _integers(indices, "indices")
        _check(indptr, indices, shape)
        values = None if values is None else _values(values, len(indices))
        matrix = cls(indptr, indices.int(), (int(shape[0]), int(shape[1])), values)
        return matrix if matrix._sorted() else matrix._by_row_and_column()

    @classmethod
    def from_edges(cls, edges: Any, shape: tuple[int, int], values: Any = None) -> CSR:
        """The matrix of `edges` [2, entries], sources above targets (as in PyG): entry [target, source].

        An edge given twice is there once (binary), or has the sum of its weights.
        Raises UserError: ids outside the matrix, `edges` of another form.
        """
        edges = _integers(edges, "edges", dims=2)
        if edges.shape[0] != 2:
            raise UserError(
                f"edges has shape {tuple(edges.shape)}.",
                why="it is [2, edges]: sources above targets",
                do="edges.T, if each row is an edge",
            )
        _check_shape(shape)
        column, row = edges
        _check_ids(column, shape[1], "a source of edges")
        _check_ids(row, shape[0], "a target of edges")
        values = None if values is None else _values(values, edges.shape[1])
        order = torch.argsort(row * shape[1] + column, stable=True)
        ordered_values = None if values is None else values[order]
        matrix = cls(_offsets(row, shape[0]), column[order].int(), (int(shape[0]), int(shape[1])), ordered_values)
        return matrix.coalesced()

    def to_dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, columns]; duplicate entries are added."""
        weights = self.weights(dtype)
        values = torch.ones(self.entries, dtype=dtype) if weights is None else weights
        dense = torch.zeros(self.shape, dtype=dtype)
        return dense.index_put_((self.rows, self.indices.long()), values, accumulate=True)

    @property
    def entries(self) -> int:
        """Stored entries (edges)."""
        return len(self.indices)

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @cached_property
    def degrees(self) -> Tensor:
        """int64 [rows]: entries of each row."""
        return self.indptr.diff()

    @cached_property
    def arrays(self) -> tuple[Any, Any]:
        """`indptr` and `indices` as NumPy arrays, for kernels: made once, since a small product would notice."""
        return self.indptr.numpy(), self.indices.numpy()

    @cached_property
    def rows(self) -> Tensor:
        """int64 [entries]: the row of each entry."""
        return torch.repeat_interleave(self.degrees, output_size=self.entries)

    @cached_property
    def transpose(self) -> Transpose:
        """The transposed pattern (this very matrix if the pattern is symmetric) and the order of its entries."""
        shape = (self.shape[1], self.shape[0])
        indptr = _offsets(self.indices, shape[0])
        columns, order = self._by_column(indptr)
        turned = CSR(indptr, columns, shape)
        same = shape == self.shape and torch.equal(turned.indptr, self.indptr) and torch.equal(columns, self.indices)
        return Transpose(self.binary() if same else turned, order)

    def weights(self, dtype: torch.dtype) -> Tensor | None:
        """`values` in `dtype`, of a scale from its factors. None: all are one."""
        if dtype == torch.float64 and self.scale is not None:
            return self._double
        return None if self.values is None else self.values.to(dtype)

    @cached_property
    def _double(self) -> Tensor:
        return self._scaled_ones(torch.float64)

    def _scaled_ones(self, dtype: torch.dtype) -> Tensor:
        """The values of a scaled matrix, [entries]."""
        values = torch.ones(self.entries, dtype=dtype, device=self.device)
        for diagonal, ids in zip(self.scale or (), (self.rows, self.indices), strict=True):
            values = values if diagonal is None else values * diagonal[ids].to(dtype)
        return values

    def _by_column(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each entry and its place, column by column; `starts` [columns + 1] of the columns."""
        if self.entries < _SORTED or self.indices.device.type != "cpu":
            order = torch.argsort(self.indices, stable=True)
            return self.rows[order].int(), order
        from espalier.sparse.spmm_kernels import turn

        rows = torch.empty(self.entries, dtype=torch.int32)
        order = torch.empty(self.entries, dtype=torch.int64)
        turn(self.indptr, self.indices, starts[:-1].clone(), rows, order)
        return rows, order

    @property
    def symmetric(self) -> bool:
        """Whether the pattern is its own transpose."""
        return self.transpose.pattern.indices is self.indices

    @cached_property
    def transposed(self) -> CSR:
        """The transposed matrix, values included."""
        pattern, order = self.transpose
        scale = None if self.scale is None else DiagonalScale(self.scale.right, self.scale.left)
        if self.values is None or (scale is not None and self.symmetric and scale.left is scale.right):
            return self if self.symmetric else pattern
        return CSR(pattern.indptr, pattern.indices, pattern.shape, self.values[order], scale)

    def binary(self) -> CSR:
        """The same pattern with all entries one; shares its arrays."""
        return self if self.values is None else CSR(self.indptr, self.indices, self.shape)

    def coalesced(self) -> CSR:
        """Entries at the same place joined: one entry (binary), or one with the sum of their values."""
        new = torch.ones(self.entries, dtype=torch.bool)
        new[1:] = (self.indices.diff() != 0) | (self.rows.diff() != 0)
        if bool(new.all()):
            return self
        values = None
        if self.values is not None:
            values = torch.zeros(int(new.sum()), dtype=self.values.dtype).index_add_(0, new.cumsum(0) - 1, self.values)
        return CSR(_offsets(self.rows[new], self.shape[0]), self.indices[new], self.shape, values)

    def with_self_loops(self) -> CSR:
        """A + I of a binary square matrix; a loop that is there stays one."""
        self._need_square("with_self_loops")
        if self.values is not None:
            raise UserError("with_self_loops is for a binary matrix.", do="add the loops first, weights afterwards")
        nodes = torch.arange(self.shape[0])
        edges = torch.stack([torch.cat([self.indices.long(), nodes]), torch.cat([self.rows, nodes])])
        return CSR.from_edges(edges, self.shape)

    def normalised(self, kind: str) -> CSR:
        """diag(left)·A·diag(right) of a binary matrix; 0 where a node has no entry.

        Args:
            kind: "row": D^-1·A, the mean of the neighbours. "symmetric": D^-½·A·D^-½ (Kipf and Welling, arXiv
                1609.02907, where A holds self-loops), D the row sums; of a square matrix.
        """
        if self.values is not None:
            raise UserError("The matrix has weights already.", do="normalise a binary matrix: matrix.binary()")
        if kind not in ("row", "symmetric"):
            raise UserError(f"normalised(kind={kind!r}) is not known.", do="kind = 'row' or 'symmetric'")
        degrees = self.degrees.double()
        if kind == "row":
            return self.scaled(DiagonalScale(torch.where(degrees > 0, 1 / degrees, 0.0), None))
        self._need_square("normalised('symmetric')")
        both = torch.where(degrees > 0, degrees.rsqrt(), 0.0)
        return self.scaled(DiagonalScale(both, both))

    def scaled(self, scale: DiagonalScale) -> CSR:
        """diag(left)·A·diag(right) of a binary matrix. `left` [rows], `right` [columns]."""
        assert self.values is None
        for diagonal, size in zip(scale, self.shape, strict=True):
            if diagonal is not None and diagonal.shape != (size,):
                raise UserError(
                    f"A diagonal of the scale has shape {tuple(diagonal.shape)}.",
                    why=f"the matrix has {size} there",
                    do="scale = (left [rows], right [columns])",
                )
        scaled = replace(self, scale=scale)
        return replace(scaled, values=scaled._scaled_ones(torch.float32))

    @cached_property
    def cuts(self) -> Any:
        """int64 [at most PIECES + 1]: rows that cut the matrix into pieces of work with about as many entries."""
        return balanced_cuts(self.indptr.numpy())

    def bytes(self) -> int:
        """Of offsets, indices and values; offsets counted as the 4 bytes they need below 2^31 entries."""
        return 4 * (self.shape[0] + 1 + self.entries) + (0 if self.values is None else 4 * self.entries)

    def matmul(self, x: Tensor) -> Tensor:
        """A·X, differentiable: see `espalier.sparse.matmul`."""
        return matmul(self, x)

    __matmul__ = matmul

    def _need_square(self, purpose: str) -> None:
        if self.shape[0] != self.shape[1]:
            raise UserError(
                f"{purpose} needs a square matrix.",
                why=f"this one is {self.shape[0]} x {self.shape[1]}",
                do="give the nodes of both sides as one set; 'row' works for any matrix",
            )

    def _sorted(self) -> bool:
        falling = self.indices.diff() < 0
        falling[self.indptr[1:-1][(self.indptr[1:-1] > 0) & (self.indptr[1:-1] < self.entries)] - 1] = False
        return not bool(falling.any())

    def _by_row_and_column(self) -> CSR:
        order = torch.argsort(self.rows * self.shape[1] + self.indices, stable=True)
        values = None if self.values is None else self.values[order]
        return CSR(self.indptr, self.indices[order], self.shape, values)


def _integers(array: Any, name: str, dims: int = 1) -> Tensor:
    tensor = torch.as_tensor(
        array.astype(np.int64) if isinstance(array, np.ndarray) and array.dtype.kind == "u" else array
    )
    if tensor.numel() == 0 and not isinstance(array, Tensor | np.ndarray):
        tensor = tensor.long()
    if tensor.dim() != dims or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise UserError(
            f"{name} is of type {str(tensor.dtype).removeprefix('torch.')} and shape {tuple(tensor.shape)}.",
            why=f"it holds integers and has {dims} dim{'s' * (dims > 1)}",
            do=f"{name}.long(), of {dims} dim{'s' * (dims > 1)}",
        )
    return tensor.detach().long()


def _values(values: Any, entries: int) -> Tensor:
    tensor = torch.as_tensor(values).detach()
    _check_length(tensor, entries)
    if tensor.is_complex():
        raise UserError("values are complex.", why="weights are real", do="values.real, or values.abs()")
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _check_length(values: Tensor, entries: int) -> None:
    if values.shape != (entries,):
        raise UserError(
            f"values has shape {tuple(values.shape)}.",
            why=f"the matrix has {entries} entries",
            do="give one for each, in the order of its entries",
        )


def _check_shape(shape: tuple[int, int]) -> None:
    if isinstance(shape, int) or len(shape) != 2:
        raise UserError(f"shape is {shape}.", why="it is (rows, columns)", do="shape = (nodes, nodes) for a graph")
    if min(shape) < 0 or max(shape) > _LARGEST:
        raise UserError(
            f"shape is {tuple(shape)}.", why=f"rows and columns are 0 to {_LARGEST}", do="cut the graph into blocks"
        )


def _check(indptr: Tensor, indices: Tensor, shape: tuple[int, int]) -> None:
    _check_shape(shape)
    rows, columns = shape
    if len(indptr) != rows + 1:
        raise UserError(
            f"indptr has {len(indptr)} offsets.",
            why=f"{rows} rows need {rows + 1}",
            do=f"shape = ({len(indptr) - 1}, {columns}), or the offset at the end too",
        )
    if int(indptr[0]) != 0 or int(indptr[-1]) != len(indices) or bool((indptr.diff() < 0).any()):
        raise UserError(
            f"indptr goes from {int(indptr[0])} to {int(indptr[-1])}.",
            why=f"offsets ascend from 0 to the {len(indices)} entries",
            do="CSR.from_edges makes them from two lists of ids",
        )
    _check_ids(indices, columns, "indices")


def _check_ids(ids: Tensor, size: int, name: str) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise UserError(f"{name} holds the id {wrong}.", why=f"ids are 0 to {size - 1}", do="check the number of nodes")


def balanced_cuts(indptr: Any) -> Any:
    """int64 [at most PIECES + 1]: rows that cut work into pieces with about as many entries, which begin at `indptr`
    [rows + 1]."""
    before = indptr + np.arange(len(indptr))
    wanted = np.linspace(0, before[-1], PIECES + 1)[1:-1]
    cuts = np.searchsorted(before, wanted)
    return np.unique(np.concatenate([[0], cuts, [len(indptr) - 1]])).astype(np.int64)


def _offsets(ids: Tensor, size: int) -> Tensor:
    offsets = torch.zeros(size + 1, dtype=torch.int64, device=ids.device)
    offsets[1:] = torch.bincount(ids, minlength=size).cumsum(0)
    return offsets


class CompressedMatrix(Protocol):
    """A binary matrix in a format of its own, such as `CBM`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def product(self, x: Tensor) -> Tensor:
        """A·X."""


def matmul(
    adjacency: CSR | CompressedMatrix, x: Tensor, values: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """A·X + start: row i of A·X is the (weighted) sum of the rows of X that row i of A names. Twice differentiable.

    Args:
        adjacency: [rows, columns]; CSR or CBM.
        x: float [columns] or [columns, ...]; half precision is summed in float32. Gradient by the transpose.
        values: [entries], instead of the matrix's own values (CSR only), in the order of its entries. Has a gradient.
        start: [width] or [rows, width] of a two-dimensional result, added to it. Has a gradient.

    Returns:
        [rows] or [rows, ...], of the type of `x`.

    Raises UserError: sizes that do not fit, numbers that are not real floats, `values` for a CBM.
    """
    rows, columns = adjacency.shape
    for name, operand in (("x", x), ("values", values)):
        if operand is not None and not isinstance(operand, Tensor):
            raise UserError(
                f"{name} is {type(operand).__name__}.", why="a product takes tensors", do="torch.as_tensor(…)"
            )
        if operand is not None and not operand.is_floating_point():
            raise UserError(f"{name} is of type {str(operand.dtype).removeprefix('torch.')}.", do=f"{name}.float()")
    if x.dim() == 0 or x.shape[0] != columns:
        raise UserError(
            f"x has shape {tuple(x.shape)}.",
            why=f"a matrix {rows} x {columns} needs [{columns}, ...]",
            do="one row of x for each column of the matrix",
        )
    if not isinstance(adjacency, CSR):
        if values is not None:
            raise UserError("A CBM has no values of its own to replace.", do="use the CSR matrix: cbm.to_csr()")
        product = adjacency.product(x)
        return product if start is None else product + start
    if values is not None:
        _check_length(values, adjacency.entries)
    dense = as_columns(x)
    weights = adjacency.weights(dense.dtype) if values is None else values.to(dense.dtype)
    if start is not None and (start.dtype != dense.dtype or start.shape[-1] != dense.shape[1]):
        return shaped_as(x, csr_matmul(adjacency, dense, weights)) + start
    return shaped_as(x, csr_matmul(adjacency, dense, weights, start))


def as_columns(x: Tensor) -> Tensor:
    """`x` as the kernels take it: two dims, float32 or float64."""
    dense = x if x.dim() == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return dense if x.dtype in KERNEL_TYPES else dense.float()


def shaped_as(x: Tensor, y: Tensor) -> Tensor:
    """The product `y` [rows, width] with the type and the further dims of `x`."""
    shaped = y if x.dim() == 2 else y.reshape(len(y), *x.shape[1:])
    return shaped if y.dtype == x.dtype else shaped.to(x.dtype)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd has to see what is done with them: its bookkeeping takes as long as a small product's tenth."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@operation("csr_matmul")
def csr_matmul(adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None = None) -> Tensor:
    """The plain form: every message is written out, then added to its row."""
    messages = x[adjacency.indices.long()]
    if values is not None:
        messages = messages * values[:, None]
    product = x.new_zeros(adjacency.shape[0], x.shape[1]).index_add(0, adjacency.rows, messages)
    return product if start is None else product + start


@csr_matmul.fast("cpu", wins=lambda adjacency, x, *_: adjacency.entries > 0 and x.shape[1] > 0)
def summed_in_registers(adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None = None) -> Tensor:
    """By the kernels of `rows`; the gradients by them too, with the transposed matrix."""
    if not needs_gradient(x, values, start):
        return product(adjacency, x, values, start)
    return _SparseProduct.apply(adjacency, x, values, start)


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None) -> Tensor:
        ctx.adjacency = adjacency
        ctx.shared = start is not None and start.dim() == 1
        ctx.save_for_backward(x if values is not None and values.requires_grad else None, values)
        return product(adjacency, x, values, start)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        x, values = ctx.saved_tensors
        dx = dvalues = None
        if ctx.needs_input_grad[1]:
            dx = summed_in_registers(*turned(ctx.adjacency, gradient, values))
        if ctx.needs_input_grad[2]:
            dvalues = _Dots.apply(ctx.adjacency, gradient, x)
        dstart = gradient if ctx.needs_input_grad[3] else None
        if dstart is not None and ctx.shared:
            dstart = _column_sums(dstart)
        return None, dx, dvalues, dstart


def _column_sums(x: Tensor) -> Tensor:
    if x.requires_grad:
        return x.sum(0)
    from espalier.kernels import tall_matmul_cpu

    return torch.from_numpy(tall_matmul_cpu.column_sums(x.contiguous().numpy()))


class _Dots(torch.autograd.Function):
    """values[e] = <left[row of e], right[column of e]>."""

    @staticmethod
    def forward(ctx: Any, adjacency: CSR, left: Tensor, right: Tensor) -> Tensor:
        from espalier.sparse import sddmm_kernels

        ctx.adjacency = adjacency
        ctx.save_for_backward(left, right)
        values = left.new_empty(adjacency.entries)
        cuts = adjacency.cuts
        sddmm_kernels.dot_rows(values, adjacency.indptr, adjacency.indices, left.contiguous(), right.contiguous(), cuts)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (gradient,) = gradients
        left, right = ctx.saved_tensors
        dleft = summed_in_registers(ctx.adjacency, right, gradient)
        return None, dleft, summed_in_registers(*turned(ctx.adjacency, left, gradient))


def turned(adjacency: CSR, x: Tensor, values: Tensor | None) -> tuple[CSR, Tensor, Tensor | None]:
    """The arguments of the product with the transposed matrix; `values` in the order of `adjacency`'s entries."""
    pattern, order = adjacency.transpose
    if values is not None and values is adjacency.weights(values.dtype):
        return pattern, x, adjacency.transposed.weights(values.dtype)
    return pattern, x, None if values is None else values[order]


def product(adjacency: CSR, x: Tensor, values: Tensor | None, start: Tensor | None = None) -> Tensor:
    """A·X + start by the kernels, without autograd. `x` float32 or float64 [columns, width]."""
    from espalier.sparse import spmm_kernels

    x = x.contiguous()
    y = BUFFERS.empty((adjacency.shape[0], x.shape[1]), x.dtype)
    tiles = spmm_kernels.tiles(x.shape[1], x.element_size())
    indptr, indices = adjacency.arrays
    begin = x if start is None else start.reshape(-1, x.shape[1]).contiguous()
    weights = x.new_empty(0) if values is None else values.contiguous()
    step = -1 if start is None else start.dim() - 1
    spmm_kernels.add_rows(y, indptr, indices, weights, x, begin, step, adjacency.cuts, tiles)
    return y
