"""Aggregation of features of which each node kept its k largest: MaxK-GNN's format CBSR, forward and backward.

After Peng et al., "MaxK-GNN" (arXiv 2312.08656): a node's kept values and their columns have the same length k in every
row, so an edge moves k values instead of the whole width; backward is wanted at the kept places only. Where k is too
large a share of the width for that to pay on a CPU, the dense product does the same.
"""

from __future__ import annotations

from torch import Tensor

from espalier.errors import UserError
from espalier.kernels.base import operation
from espalier.sparse.csr import CSR
from espalier.sparse.product import matmul


def cbsr_aggregate(adjacency: CSR, values: Tensor, indices: Tensor, width: int) -> Tensor:
    """A·X for an X of which row c is zero but for `values[c]` at the columns `indices[c]`. Differentiable in `values`.

    Args:
        adjacency: [rows, columns], binary or weighted.
        values: float32 or float64 [columns, k].
        indices: integers [columns, k] below `width`, different in each row (as `kernels.rtopk` returns them).
        width: of X.

    Returns:
        [rows, width], dense.

    Raises UserError: shapes that do not fit, columns outside the width.
    """
    columns = adjacency.shape[1]
    if values.shape != indices.shape or values.dim() != 2 or values.shape[0] != columns:
        raise UserError(
            f"values has shape {tuple(values.shape)} and indices {tuple(indices.shape)}.",
            why=f"both are [{columns}, k] for a matrix with {columns} columns",
        )
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= width):
        raise UserError(f"indices goes up to {int(indices.max())}.", why=f"the width is {width}")
    return sparse_rows(adjacency, values, indices, width)


@operation("cbsr_aggregate")
def sparse_rows(adjacency: CSR, values: Tensor, indices: Tensor, width: int) -> Tensor:
    """The plain form: the rows are written out, and the dense product does the rest."""
    dense = values.new_zeros(values.shape[0], width).scatter(1, indices.long(), values)
    return matmul(adjacency, dense)
