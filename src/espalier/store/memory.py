"""Rows in memory: a tensor. The plain form of every other table."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.store import base


class MemoryRows:
    """The rows of `table` [rows, ...], on any device."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.dtype = table.dtype
        self.shape = tuple(table.shape[1:])

    def __len__(self) -> int:
        return len(self.table)

    @property
    def row_bytes(self) -> int:
        return base.row_bytes(self.dtype, self.shape)

    def read(self, ids: Tensor, out: Tensor) -> None:
        base.check_request(self, ids, out)
        torch.index_select(self.table, 0, ids.to(self.table.device), out=out)
