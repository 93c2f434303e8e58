"""Choice of the sparse format of a product: measured on this machine, or predicted from counts.

Measured choices differ from machine to machine: a plan records them, so that a resumed run multiplies as before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from espalier.recipe.cost import Cost, Number
from espalier.recipe.errors import UserError
from espalier.sparse.cbm import CBM
from espalier.sparse.cbsr import cbsr_aggregate
from espalier.sparse.csr import CSR, matmul

Products = dict[str, Callable[[], Tensor]]
"""Of each candidate, what multiplies with it."""

REPEATS = 5
"""Interleaved products of each format."""
MARGIN = 1.05
"""What is not the plain format has to be this much faster: less is within the noise of a shared machine."""
MESSAGE_BYTES = 12e9
"""Bytes of dense rows that one core adds in a second, where no probe says better: 16 to 60 ns for rows of 512 bytes in
bench/cbm.py on a 2.5 GHz Xeon, the slower end."""


@dataclass(frozen=True)
class FormatChoice:
    """What won, what it is made of, and the seconds measured for each candidate (forward and backward together)."""

    name: Literal["csr", "cbm", "cbsr"]
    matrix: CSR | CBM
    seconds: dict[str, float]


def best_format(adjacency: CSR, width: int) -> FormatChoice:
    """CSR or CBM for products with [columns, width] matrices in training, by the time both took on this machine.

    A weighted matrix without a `scale` is CSR, since nothing else can hold it. Raises UserError: `width` below 1.
    """
    return _measured(adjacency, width, {})


def best_aggregation(adjacency: CSR, width: int, k: int) -> FormatChoice:
    """As `best_format`, for features of which each row keeps k values: CBSR aggregation is a candidate too.

    Raises UserError: `k` outside 1 to `width`.
    """
    if not 1 <= k <= width:
        raise UserError(f"k = {k}.", why=f"a row of {width} values keeps 1 to {width}", do=f"k = {max(1, width // 8)}")
    x = torch.rand(adjacency.shape[1], width, generator=torch.Generator().manual_seed(0))
    values, indices = x.topk(k, sorted=False)
    values.requires_grad_()
    return _measured(adjacency, width, {"cbsr": lambda: cbsr_aggregate(adjacency, values, indices, width)})


def _measured(adjacency: CSR, width: int, others: Products) -> FormatChoice:
    if width < 1:
        raise UserError(f"width = {width}.", why="a product needs at least one column", do="width = x.shape[1]")
    matrices: dict[str, CSR | CBM] = {"csr": adjacency}
    if adjacency.values is None or adjacency.scale is not None:
        compressed = CBM.of(adjacency)
        if compressed.deltas is not None:
            matrices["cbm"] = compressed
    if not others and len(matrices) == 1:
        return FormatChoice("csr", adjacency, {})
    x = torch.rand(adjacency.shape[1], width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    runs: Products = {name: partial(matmul, matrix, x) for name, matrix in matrices.items()}
    seconds = _interleaved({**runs, **others})
    name: Any = min(seconds, key=lambda candidate: seconds[candidate] * (1.0 if candidate == "csr" else MARGIN))
    return FormatChoice(name, matrices.get(name, adjacency), seconds)


def _interleaved(runs: Products) -> dict[str, float]:
    """Median seconds of forward and backward; the first of each, which compiles and transposes, is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(REPEATS + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            y = run()
            y.backward(torch.ones_like(y))
            if turn:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def cost(rows: Number, additions: Number, width: Number, threads: Number = 1) -> Cost:
    """Predicted cost of one product in float32, NumPy arrays allowed.

    Args:
        rows: of the matrix. width: columns of X.
        additions: rows of X added: the entries of a CSR matrix, `CBM.deltas.additions` of a compressed one, entries·k/
            width·4 for CBSR (a value scattered costs some four of a row that is added whole; MaxK's note on CPUs).
        threads: cores that share the work.
    """
    moved = 4.0 * width * (additions + rows)
    return Cost(
        seconds={"aggregate": moved / (MESSAGE_BYTES * threads)},
        memory_bytes={"adjacency": 4.0 * (additions + 4 * rows), "activations": 4.0 * width * rows},
        sources={"aggregate": "bytes of rows added at 12 GB/s for each core (bench/cbm.py)"},
    )
