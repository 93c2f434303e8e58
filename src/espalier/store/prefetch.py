"""Prefetch of rows: batches of a known schedule are read ahead, into a fixed number of buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from espalier.errors import UserError
from espalier.store.base import Rows
from espalier.store.budget import Budget


def read_ahead(
    rows: Rows, schedule: Iterable[Tensor], most: int, depth: int = 2, budget: Budget | None = None
) -> Iterator[Tensor]:
    """The rows of each batch of ids, in order, while the next `depth` batches are read.

    Args:
        rows: the table.
        schedule: int64 [n] ids of each batch, n <= `most`.
        most: rows of the largest batch.
        depth: batches that are read ahead.
        budget: what the `depth` + 1 buffers are taken from. Raises UserError when it is too small.

    Yields:
        [n, *shape], valid until the next is asked for.
    """
    with ExitStack() as stack:
        size = (depth + 1) * most * rows.row_bytes
        if budget is not None:
            stack.enter_context(budget.take(size, f"{depth + 1} buffers of {most} rows"))
        buffers = [torch.empty((most, *rows.shape), dtype=rows.dtype) for _ in range(depth + 1)]
        pool = stack.enter_context(ThreadPoolExecutor(1, "espalier-prefetch"))
        flying: deque[Future[Tensor]] = deque()
        stack.callback(lambda: [future.cancel() for future in flying])
        for number, ids in enumerate(schedule):
            flying.append(pool.submit(_load, rows, ids, buffers[number % len(buffers)]))
            if len(flying) > depth:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


def _load(rows: Rows, ids: Tensor, buffer: Tensor) -> Tensor:
    if len(ids) > len(buffer):
        raise UserError(
            f"A batch has {len(ids):,} rows, and the buffers hold {len(buffer):,}.",
            do=f"most = {len(ids)}, the rows of the largest batch",
        )
    rows.read(ids, buffer[: len(ids)])
    return buffer[: len(ids)]
