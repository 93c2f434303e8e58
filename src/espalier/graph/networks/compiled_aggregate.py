"""Compiled aggregation: fills the `aggregate` seam with the kernels of `espalier.sparse`, in the format chosen for each
block."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from espalier.graph.networks import base, gpu_products
from espalier.graph.networks.base import Kept, MessageBlock, Rows
from espalier.graph.networks.gnn import Gnn
from espalier.kernels.dropout import activated
from espalier.kernels.tall_matmul import tall_product
from espalier.sparse import CSR, DiagonalScale, attention_aggregate, cbsr_aggregate, matmul

SPARSE = 4
"""A dense product does an addition some four times as fast as the kernel that adds chosen rows (bench/graph.py)."""


def form_on(block: MessageBlock, kind: str) -> Literal["cbm", "csr", "gathered", "measured"]:
    """How rows are summed over `block` on a device of this `kind` ("cpu", "cuda"): what plans say and runs do.

    Kernels of CBM and CSR are for processors. On a GPU messages are gathered (`base.aggregate`), or, over a graph that
    `stands`, summed by the fastest of `gpu_products`.
    """
    if kind == "cpu":
        return "cbm" if "compressed" in block.forms.known else "csr"
    return "measured" if "stands" in block.forms.known else "gathered"


def equip(model: nn.Module) -> nn.Module:
    """`model` with the kernels in the fields of its seam; foreign modules are left alone."""
    if isinstance(model, Gnn):
        for layer in model.layers:
            layer.aggregate = aggregate
            layer.attend = attend
            layer.project = project
    return model


def matrix(block: MessageBlock) -> CSR:
    """The block as a matrix by rows, its scales multiplied out; kept with the block."""

    def make() -> CSR:
        pattern = CSR(block.indptr, block.indices.int(), (block.targets, block.sources), block.weights)
        if block.left is None and block.right is None:
            return pattern
        if block.weights is None:
            return pattern.scaled(DiagonalScale(block.left, block.right))
        values = block.weights if block.right is None else block.weights * block.right[block.indices]
        values = values if block.left is None else values * block.left[block.rows()]
        return CSR(pattern.indptr, pattern.indices, pattern.shape, values)

    scale = next((factors for factors in (block.weights, block.left, block.right) if factors is not None), None)
    return block.forms.get(f"matrix {None if scale is None else scale.dtype} on {block.indptr.device}", make)


def pattern(block: MessageBlock) -> CSR:
    """The block's edges without weights."""
    return block.forms.get("pattern", matrix(block).binary)


def aggregate(block: MessageBlock, rows: Rows, start: Tensor | None = None) -> Tensor:
    """See `base.aggregate`; of rows that are the same at every step, once."""
    form = form_on(block, block.indptr.device.type)
    if isinstance(rows, Kept) and form in ("cbm", "csr"):
        sums = cbsr_aggregate(matrix(block), rows.values, rows.columns, rows.width)
        return sums if start is None else sums + start
    if isinstance(rows, Kept) or form == "gathered":
        return base.aggregate(block, rows, start)

    def product() -> Tensor:
        if form == "measured":
            return gpu_products.product(block, rows, start, matrix(block))
        return matmul(block.forms.known["compressed"] if form == "cbm" else matrix(block), rows, start=start)

    if start is not None or rows.requires_grad or rows.is_inference():
        return product()
    return _once(block, rows, product)


def _once(block: MessageBlock, rows: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """What `make` makes of `rows`, kept with the block from the second time on that the very same rows are aggregated:
    features that no dropout changes are."""
    seen = block.forms.known.get("aggregated")
    if seen is None or seen.rows() is not rows or seen.version != rows._version:
        block.forms.known["aggregated"] = _Seen(weakref.ref(rows), rows._version, None)
        return make()
    if seen.sums is None or seen.sums._version:
        seen = block.forms.known["aggregated"] = seen._replace(sums=make())
    return seen.sums


class _Seen(NamedTuple):
    """Rows that were aggregated, and their sums once they came again."""

    rows: weakref.ref[Tensor]
    version: int
    sums: Tensor | None


def project(rows: Rows, weight: Tensor, start: Tensor | None = None) -> Tensor:
    """See `base.project`; of kept rows by a kernel, where they are few enough of the width."""
    if not isinstance(rows, Kept):
        return tall_product(rows, weight, start)
    if rows.values.device.type != "cpu" or rows.width < SPARSE * rows.values.shape[1]:
        return base.project(rows, weight, start)
    from espalier.graph.networks.maxk_linear import Mapped

    shared = start if start is not None and start.dim() == 1 else weight.new_zeros(len(weight))
    product: Tensor = Mapped.apply(rows.values, rows.columns, weight, shared)
    return product if start is None or start.dim() == 1 else product + start


def attend(block: MessageBlock, rows: Tensor, scores: tuple[Tensor, Tensor], dropout: float) -> Tensor:
    """See `base.attend`."""
    if block.indptr.device.type != "cpu":
        return base.attend(block, rows, scores, dropout)
    keep = None
    if dropout > 0:
        keep = activated(torch.ones(block.edges, rows.shape[1], dtype=rows.dtype), "none", dropout)
    return attention_aggregate(pattern(block), rows, scores, slope=base.NEGATIVE_SLOPE, keep=keep)
