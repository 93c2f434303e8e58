"""CBM: a binary matrix of which each row is kept as its difference from a similar row.

After Alves et al., "Accelerating Graph Neural Networks Using a Novel Computation-Friendly Matrix Compression Format"
(IPDPS 2025, arXiv 2409.02208). Ours differs: additions and subtractions are separate lists without values; a row is
summed in one pass, its parent's result first, instead of a product and then a walk down the tree; matrices may be
rectangular; the plain format stays inside where compression would not pay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.kernels.buffer_pool import BUFFERS
from espalier.recipe.errors import UserError
from espalier.sparse.cbm.build import Deltas, Search, compress
from espalier.sparse.csr import CSR, DiagonalScale, as_columns, csr_matmul, matmul, needs_gradient, shaped_as

PAYS = 1.15
"""With "auto", entries over additions from which on the compressed form is kept: the note of the paper's own authors
finds it slower at 1.0."""
ROW_ADDITIONS = ((16, 13.0), (32, 11.0), (64, 9.0))
WIDE_ROW_ADDITIONS = 5.0
"""What the second list and the parent of a row cost, in additions of a row of X, up to so many columns, and above: from
11 matrices of 3 to 135 entries a row and 1 to 512 columns, fitted within a tenth (bench/cbm.py, the rows of `auto`)."""
_MANY = 512
"""Columns at which a matrix has to gain from compression if it is to be kept compressed."""


def pays(entries: int, additions: int, rows: int, width: int) -> bool:
    """Whether differences multiply `width` columns faster than entries do: the same for the same matrix everywhere."""
    each = next((cost for most, cost in ROW_ADDITIONS if width <= most), WIDE_ROW_ADDITIONS)
    return entries >= PAYS * additions and entries > additions + each * rows


class Stats(NamedTuple):
    """What compression did. Sizes in bytes of the arrays that say what is added, weights and scales left out."""

    form: Literal["cbm", "csr"]
    entries: int
    differences: int
    tree_edges: int
    ratio: float
    """Entries over (differences + tree edges): additions of the plain product over ours."""
    bytes: int
    csr_bytes: int
    depth: int
    branches: int


@dataclass(frozen=True, eq=False)
class CBM:
    """diag(left)·A·diag(right) for a binary A [rows, columns], kept as differences or, where those do not pay, as CSR.

    `CBM.from_csr` makes one. Immutable; keeps its transpose once a backward pass asked for it.

    Attributes:
        shape: rows, columns.
        deltas: the compressed A, or None where `plain` holds it.
        plain: the CSR matrix, scale included, or None.
        scale: left and right, each float [rows or columns] or None.
    """

    shape: tuple[int, int]
    deltas: Deltas | None
    plain: CSR | None
    scale: DiagonalScale
    symmetric: bool
    """Whether A is its own transpose: then the transpose is this very tree with its scales exchanged."""
    automatic: bool = False
    """Whether X with few columns is multiplied by the entries, which are restored then, where that is faster."""
    entries: int = 0
    """Of A."""

    @classmethod
    def from_csr(
        cls,
        indptr: Any,
        indices: Any,
        shape: tuple[int, int],
        *,
        alpha: int | Literal["auto"] = "auto",
        scale: Literal["row", "symmetric"] | tuple[Tensor | None, Tensor | None] | None = None,
    ) -> CBM:
        """Compresses the binary matrix of two arrays (NumPy or torch).

        Args:
            indptr, indices: offsets of rows [rows + 1] and columns of entries [entries], each place once.
            shape: rows, columns.
            alpha: a row is kept as a difference only where that saves more than `alpha` entries, 0 and up. "auto":
                0, and the whole matrix stays CSR where its product would not be faster; where it would be for many
                columns alone, few columns are multiplied by the entries.
            scale: "row" D^-1·A, "symmetric" D^-½·A·D^-½, or (left, right). Add self-loops before.

        Raises UserError: an array that is not a binary matrix of that shape; `alpha` below 0.
        """
        return cls.of(_scaled(CSR.of(indptr, indices, shape), scale), alpha)

    @classmethod
    def of(cls, matrix: CSR, alpha: int | Literal["auto"] = "auto", search: Search | None = None) -> CBM:
        """Compresses a CSR matrix, binary or scaled (`normalised`, `scaled`); `search` as `build.compress` has it.

        Raises UserError: other weights, entries given twice.
        """
        if alpha != "auto" and (not isinstance(alpha, int) or isinstance(alpha, bool) or alpha < 0):
            raise UserError(
                f"alpha = {alpha!r}.", why="it is 'auto' or a number of entries from 0 up", do="alpha='auto'"
            )
        scale = matrix.scale or _ones(matrix)
        if matrix.coalesced() is not matrix:
            raise UserError(
                "An entry of the matrix is there twice.", do="CSR.coalesced(), or CSR.from_edges, join them"
            )
        pattern = matrix.binary()
        deltas = compress(pattern, 0 if alpha == "auto" else alpha, search)
        if alpha == "auto" and not pays(pattern.entries, deltas.additions, matrix.shape[0], _MANY):
            return cls(matrix.shape, None, matrix, scale, matrix.symmetric, entries=pattern.entries)
        return cls(matrix.shape, deltas, None, scale, matrix.symmetric, alpha == "auto", pattern.entries)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.plain is None else self.plain.device

    def matmul(self, x: Tensor) -> Tensor:
        """M·X for X [columns] or [columns, ...]; differentiable, by the transposed matrix. See `sparse.matmul`."""
        return matmul(self if self.plain is None else self.plain, x)

    def product(self, x: Tensor) -> Tensor:
        """`matmul` of what it has checked."""
        if self.plain is not None:
            return self.plain.matmul(x)
        if x.device.type != "cpu":
            raise UserError(f"CBM's kernels are for processors; x is on {x.device}.", do="cbm.to_csr(), or x.cpu()")
        dense = as_columns(x)
        assert self.deltas is not None
        if self.automatic and not pays(self.entries, self.deltas.additions, self.shape[0], dense.shape[1]):
            return self._restored.matmul(x)
        return shaped_as(x, cbm_matmul(self, dense))

    @cached_property
    def _restored(self) -> CSR:
        return self.to_csr()

    __matmul__ = matmul

    @cached_property
    def transposed(self) -> CBM:
        """The transposed matrix: of a symmetric A the same tree, else the columns compressed by the same rule."""
        shape = (self.shape[1], self.shape[0])
        scale = DiagonalScale(self.scale.right, self.scale.left)
        if self.plain is not None:
            return replace(self, shape=shape, plain=self.plain.transposed, scale=scale)
        if self.symmetric:
            return replace(self, shape=shape, scale=scale)
        pattern = self.pattern().transposed
        return CBM.of(pattern if scale == (None, None) else pattern.scaled(scale))

    def pattern(self) -> CSR:
        """The binary A."""
        if self.plain is not None:
            return self.plain.binary()
        assert self.deltas is not None
        return restored(self.deltas, self.shape)

    def to_csr(self) -> CSR:
        """The matrix as CSR, with values where it is scaled."""
        pattern = self.pattern()
        return pattern if self.scale == (None, None) else pattern.scaled(self.scale)

    def stats(self) -> Stats:
        """Sizes, additions and shape of the tree."""
        if self.deltas is None:
            assert self.plain is not None
            size = self.plain.binary().bytes()
            return Stats("csr", self.entries, self.entries, 0, 1.0, size, size, 0, 0)
        deltas = self.deltas
        return Stats(
            form="cbm",
            entries=self.entries,
            differences=deltas.differences,
            tree_edges=deltas.edges,
            ratio=self.entries / max(1, deltas.additions),
            bytes=deltas.bytes(),
            csr_bytes=self.pattern().bytes(),
            depth=deltas.depth(),
            branches=len(deltas.branches()),
        )


def _scaled(matrix: CSR, scale: Any) -> CSR:
    if scale is None:
        return matrix
    if isinstance(scale, str):
        return matrix.normalised(scale)
    return matrix.scaled(
        DiagonalScale(*(None if factor is None else torch.as_tensor(factor).contiguous() for factor in scale))
    )


def _ones(matrix: CSR) -> DiagonalScale:
    """No scale, if all values are one. Raises UserError else."""
    if matrix.values is not None and bool((matrix.values != 1).any()):
        raise UserError(
            "CBM holds binary matrices; this one has weights.",
            why="a row can be the difference of two others only where equal columns have equal weights",
            do="normalise a binary matrix, give its weights as scale=(left, right), or stay with CSR",
        )
    return DiagonalScale(None, None)


def restored(deltas: Deltas, shape: tuple[int, int]) -> CSR:
    """The binary matrix of which `deltas` are the differences."""
    from espalier.sparse.cbm import deltas as kernels

    indptr = torch.zeros(shape[0] + 1, dtype=torch.int64)
    kernels.restored_degrees(deltas.order, deltas.parent, deltas.plus_ptr, deltas.minus_ptr, indptr[1:])
    indptr = indptr.cumsum(0)
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32)
    lists = (deltas.order, deltas.parent, deltas.plus_ptr, deltas.plus, deltas.minus_ptr, deltas.minus)
    kernels.restore(*lists, indptr, indices)
    return CSR(indptr, indices, shape)


@operation("cbm_matmul")
def cbm_matmul(matrix: CBM, x: Tensor) -> Tensor:
    """The plain form, in the paper's two stages: differences times X, then down the tree."""
    deltas = matrix.deltas
    assert deltas is not None
    x = x if matrix.scale.right is None else x * matrix.scale.right.to(x.dtype)[:, None]
    sums = []
    for ids, ptr in ((deltas.plus, deltas.plus_ptr), (deltas.minus, deltas.minus_ptr)):
        lists = CSR(ptr.long(), ids, (matrix.shape[0], matrix.shape[1]))
        sums.append(csr_matmul.reference.run(lists, x, None))
    rows = {-1: x.new_zeros(x.shape[1])}
    for place, (row, above) in enumerate(zip(deltas.order.tolist(), deltas.parent.tolist(), strict=True)):
        rows[row] = rows[above] + sums[0][place] - sums[1][place]
    y = torch.stack([rows[row] for row in range(matrix.shape[0])]) if matrix.shape[0] else x[:0]
    return y if matrix.scale.left is None else y * matrix.scale.left.to(x.dtype)[:, None]


@cbm_matmul.fast("cpu", wins=lambda matrix, x: x.numel() > 0 and matrix.shape[0] > 0)
def branch_by_branch(matrix: CBM, x: Tensor) -> Tensor:
    """By the kernels of `rows`: branches in parallel, each row in one pass; backward by the transposed matrix."""
    if not needs_gradient(x):
        return _product(matrix, x.contiguous())
    return _CbmProduct.apply(matrix, x)


class _CbmProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: CBM, x: Tensor) -> Tensor:
        ctx.matrix = matrix
        return _product(matrix, x.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.matrix.transposed.matmul(gradients[0])


def _product(matrix: CBM, x: Tensor) -> Tensor:
    from espalier.sparse import spmm_kernels

    deltas = matrix.deltas
    assert deltas is not None
    y = BUFFERS.empty((matrix.shape[0], x.shape[1]), x.dtype)
    tiles = spmm_kernels.tiles(x.shape[1], x.element_size())
    left, right = (x.new_empty(0) if factor is None else factor.to(x.dtype) for factor in matrix.scale)
    *lists, cuts = deltas.arrays
    spmm_kernels.add_differences(y, *lists, left, right, x, cuts, tiles)
    return y
