"""Tiers of rows: the rows used most in device memory, the next in host memory, all others where they are (on disk)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from espalier.store import base
from espalier.store.base import Rows
from espalier.store.budget import Budget, Lease

CHUNK = 4 << 20
"""Bytes of rows that are read from below at a time."""
_INDEX_BYTES = 16
"""Of a row that is kept: its number, and where it lies."""


def hot_rows(expected: Tensor, count: int) -> Tensor:
    """int64 [count]: the rows with the most expected accesses (`expected` [rows]), most first, ties by number."""
    return torch.argsort(expected, descending=True, stable=True)[:count]


class _Table:
    """Some rows in the memory of one device. `ids` ascend; row ids[k] is table[k]."""

    def __init__(self, rows: Rows, ids: Tensor, device: torch.device) -> None:
        self.ids = torch.sort(ids).values
        self.rows = torch.empty((len(ids), *rows.shape), dtype=rows.dtype, device=device)
        _read_chunks(rows, self.ids, torch.arange(len(ids)), self.rows)

    def copy(self, ids: Tensor, out: Tensor, places: Tensor) -> Tensor:
        """Copies those of `ids` that are here to their `places` in `out`; which were not, as bool [ids]."""
        slots = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        here = self.ids[slots] == ids
        _copy_rows(self.rows, slots[here], out, places[here])
        return ~here


class TieredRows:
    """Rows of which some are kept in memory. Has state: the tables, and how many rows came from where (`counts`).

    Args:
        rows: the whole table, usually on disk.
        tiers: which rows to keep on which device, fastest first: `[("cuda", ids), ("cpu", other ids)]`.
        budget: what the tables in host memory are taken from. Raises UserError when it is too small.
    """

    def __init__(
        self, rows: Rows, tiers: Sequence[tuple[str | torch.device, Tensor]], budget: Budget | None = None
    ) -> None:
        self.below, self.dtype, self.shape = rows, rows.dtype, rows.shape
        kept = [(torch.device(device), ids) for device, ids in tiers if len(ids)]
        self._leases: list[Lease] = []
        if budget is not None:
            size = sum(
                len(ids) * (_INDEX_BYTES + rows.row_bytes * (device.type == "cpu")) for device, ids in kept
            ) + min(CHUNK, max(rows.row_bytes, 1) * len(rows))
            self._leases.append(budget.take(size, "rows in memory"))
        self._tables = [_Table(rows, ids, device) for device, ids in kept]
        self.counts = [0] * (len(self._tables) + 1)

    def __len__(self) -> int:
        return len(self.below)

    @property
    def row_bytes(self) -> int:
        """See Rows."""
        return self.below.row_bytes

    def read(self, ids: Tensor, out: Tensor) -> None:
        """See Rows; `out` may be on any device."""
        base.check_request(self, ids, out)
        places = torch.arange(len(ids))
        for number, table in enumerate(self._tables):
            rest = table.copy(ids, out, places)
            before = len(ids)
            ids, places = ids[rest], places[rest]
            self.counts[number] += before - len(ids)
        self.counts[-1] += len(ids)
        if len(ids):
            ordered = torch.sort(ids, stable=True)
            _read_chunks(self.below, ordered.values, places[ordered.indices], out)

    def close(self) -> None:
        """Gives the memory back."""
        self._tables = []
        for lease in self._leases:
            lease.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_chunks(rows: Rows, ids: Tensor, places: Tensor, out: Tensor) -> None:
    """Reads ascending `ids` in chunks of at most `CHUNK` bytes, and copies each row to its place in `out`."""
    count = max(1, CHUNK // max(1, rows.row_bytes))
    chunk = torch.empty((min(count, len(ids)), *rows.shape), dtype=rows.dtype)
    for at in range(0, len(ids), count):
        size = len(ids[at : at + count])
        rows.read(ids[at : at + count], chunk[:size])
        _copy_rows(chunk, torch.arange(size), out, places[at : at + count])


def _copy_rows(table: Tensor, slots: Tensor, out: Tensor, places: Tensor) -> None:
    """out[places] = table[slots]; by one thread in memory, as torch's threads would spin beside transfers."""
    if not len(slots) or not table[0].nbytes:
        return
    if table.device.type == out.device.type == "cpu":
        from espalier.store.row_kernels import scatter_rows

        size = table[0].nbytes
        assert out.is_contiguous()
        scatter_rows(table.data_ptr(), (slots * size).numpy(), places.numpy(), out.data_ptr(), size)
    else:
        out.index_copy_(0, places.to(out.device), table[slots.to(table.device)].to(out.device))
