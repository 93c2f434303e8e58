"""The seam filled: aggregation by the kernels of `espalier.sparse`, in the format that was chosen for each block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from espalier.graph import base
from espalier.graph.base import Block, Kept, Rows, dense
from espalier.graph.gnn import Layer, Network
from espalier.kernels import rtopk
from espalier.sparse import CSR, Scale, attention_aggregate, cbsr_aggregate, matmul
from espalier.sparse.buffers import BUFFERS
from espalier.sparse.product import KERNEL_TYPES, needs_gradient

SPARSE = 4
"""A dense product does an addition some four times as fast as the kernel that adds chosen rows (bench/graph.py)."""


def equip(model: nn.Module) -> nn.Module:
    """`model` with the kernels in the fields of its seam; foreign modules are left alone."""
    if isinstance(model, Network):
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.aggregate, layer.attend, layer.project = aggregate, attend, project
        model.drop, model.largest = drop, rtopk
    return model


def matrix(block: Block) -> CSR:
    """The block as a matrix by rows, its scales multiplied out; kept with the block."""

    def make() -> CSR:
        pattern = CSR(block.indptr, block.indices.int(), (block.targets, block.sources), block.weights)
        if block.left is None and block.right is None:
            return pattern
        if block.weights is None:
            return pattern.scaled(Scale(block.left, block.right))
        values = block.weights if block.right is None else block.weights * block.right[block.indices]
        values = values if block.left is None else values * block.left[block.rows()]
        return CSR(pattern.indptr, pattern.indices, pattern.shape, values)

    scale = next((one for one in (block.weights, block.left, block.right) if one is not None), None)
    made: CSR = block.forms.get(f"matrix {None if scale is None else scale.dtype}", make)
    return made


def pattern(block: Block) -> CSR:
    """The block's edges without weights."""
    made: CSR = block.forms.get("pattern", matrix(block).binary)
    return made


def aggregate(block: Block, rows: Rows) -> Tensor:
    """See `base.aggregate`."""
    if block.indptr.device.type != "cpu":
        return base.aggregate(block, rows)
    if isinstance(rows, Kept):
        return cbsr_aggregate(matrix(block), rows.values, rows.columns, rows.width)
    compressed = block.forms.known.get("compressed")
    return matmul(matrix(block) if compressed is None else compressed, dense(rows))


def project(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """See `base.project`; of kept rows by a kernel, where they are few enough of the width. Where nobody asks for
    gradients the result lies in memory that is kept: fresh pages took as long as the product."""
    if isinstance(rows, Kept):
        if rows.values.device.type != "cpu" or rows.width < SPARSE * rows.values.shape[1]:
            return base.project(rows, weight, bias)
        from espalier.graph.kept import Mapped

        found: Tensor = Mapped.apply(rows.values, rows.columns, weight, bias)
        return found
    own = rows.device.type == "cpu" and rows.dtype == weight.dtype and rows.dtype in KERNEL_TYPES
    if not own or needs_gradient(rows, weight, bias) or torch.is_autocast_enabled("cpu"):
        return base.project(rows, weight, bias)
    return torch.mm(rows, weight.T, out=BUFFERS.empty((len(rows), len(weight)), rows.dtype)).add_(bias)


def attend(block: Block, rows: Tensor, scores: tuple[Tensor, Tensor], dropout: float) -> Tensor:
    """See `base.attend`."""
    if block.indptr.device.type != "cpu":
        return base.attend(block, rows, scores, dropout)
    keep = None
    if dropout > 0:
        keep = drop(rows.new_ones(block.edges, rows.shape[1]), dropout)
    return attention_aggregate(pattern(block), rows, scores, slope=base.NEGATIVE_SLOPE, keep=keep)


def drop(rows: Tensor, share: float) -> Tensor:
    """Dropout; on the CPU by a kernel that drops in steps of 1/256."""
    cut = round(share * 256)
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64) or not 0 < cut < 256:
        return torch.nn.functional.dropout(rows, share)
    from espalier.graph.dropping import Dropped

    dropped: Tensor = Dropped.apply(rows, cut)
    return dropped
