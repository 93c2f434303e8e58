"""CSR matrices of dense tensors."""

from __future__ import annotations

from torch import Tensor

from espalier.sparse import CSR


def csr_of(dense: Tensor, binary: bool = False) -> CSR:
    """The entries of `dense` [rows, columns] that are not zero; `binary` drops their values."""
    entries = dense.to_sparse_coo().coalesce()
    shape = (dense.shape[0], dense.shape[1])
    return CSR.from_edges(entries.indices().flip(0), shape, None if binary else entries.values())
