"""Rows: a table that is read by row numbers, wherever its rows are (memory, disk, both)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from espalier.recipe.errors import UserError


class Rows(Protocol):
    """A table of rows of one dtype and shape. Several threads may read at once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one row."""

    def __len__(self) -> int:
        """How many rows there are."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""

    def read(self, ids: Tensor, out: Tensor) -> None:
        """Copies rows `ids` (int64 [n], any order, repeats allowed) to `out` [n, *shape], which is contiguous.

        Raises UserError for a number that is no row.
        """


class WeightStore(Protocol):
    """Weights that wait in host memory, and that steps only read."""

    def keep(self, values: Tensor) -> Tensor:
        """A copy of `values` that waits there."""

    def fetch(self, waiting: Tensor, out: Tensor) -> Callable[[], None]:
        """Begins to copy them into `out`, on the device; what is computed once the answer was called comes after."""

    def after_copies(self) -> AbstractContextManager[None]:
        """Surrounds what waits for the copies begun so far, and computation does not wait for."""


def row_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a row of that dtype and shape."""
    return dtype.itemsize * math.prod(shape)


def check_request(rows: Rows, ids: Tensor, out: Tensor) -> None:
    """Raises UserError for ids that are no rows; asserts that `out` fits."""
    assert ids.dtype == torch.int64, f"ids are {ids.dtype}"
    assert out.dtype == rows.dtype, f"out is {out.dtype}, rows are {rows.dtype}"
    assert out.shape == (len(ids), *rows.shape), f"out is {list(out.shape)} for {len(ids)} rows of {list(rows.shape)}"
    if len(ids) == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= len(rows):
        raise UserError(
            f"There is no row {low if low < 0 else high}: the table has {len(rows):,}.",
            do="check that the ids belong to this table",
        )
