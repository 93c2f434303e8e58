"""Condensed edges on disk: for each part of a graph one extent with its own rows and those of its outside sources.

MEGA's Condense-Edge (HPCA 2024, arXiv 2311.09775) as a disk layout: sums over the edges of a part read one extent in
sequence, where rows by number would be read one by one. A source that several parts need is stored in each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from espalier.errors import UserError
from espalier.quant.mega.condense import Condensed
from espalier.store.extents import ExtentFile, ExtentWriter

if TYPE_CHECKING:
    from espalier.graph.data import Array


def write_condensed(plan: Condensed, rows: Tensor, path: Path) -> None:
    """Writes `rows` [nodes, columns] to `path` by parts. Raises UserError: not a row for each node, or DiskFull.

    A part's extent holds the rows of its nodes, ascending, then those of its region.
    """
    if len(rows) != len(plan.labels):
        raise UserError(f"{len(plan.labels):,} nodes have {len(rows):,} rows.", do="one row for each node")
    with ExtentWriter(path) as writer:
        for part in range(plan.parts):
            writer.append(str(part), rows[torch.from_numpy(_sources(plan, part))].contiguous())


def sums_from(path: Path, plan: Condensed, indptr: Array, indices: Array, out: Tensor) -> Tensor:
    """Fills `out` [nodes, columns] with the sums of rows over each node's edges (A @ rows), a part in memory at a time.

    Args:
        path, plan: as `write_condensed` got them; indptr, indices: the graph's edges by target.
    Raises UserError: another graph; DamagedExtent.
    """
    with ExtentFile(path, remedy="write the rows again") as file:
        if len(file) != plan.parts or len(out) != len(plan.labels):
            raise UserError(
                f"{path} holds {len(file)} parts, and the plan has {plan.parts} of {len(plan.labels):,} nodes.",
                do="the plan and the graph that it was written for",
            )
        place = np.zeros(len(plan.labels), np.int64)
        for part in range(plan.parts):
            sources = _sources(plan, part)
            place[sources] = np.arange(len(sources))
            own = np.flatnonzero(plan.labels == part)
            counts = indptr[own + 1] - indptr[own]
            starts = np.repeat(indptr[own] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
            edges = torch.from_numpy(place[indices[starts + np.arange(int(counts.sum()))]])
            to = torch.repeat_interleave(torch.from_numpy(own), torch.from_numpy(counts))
            out[own] = 0
            out.index_add_(0, to, file.read(str(part))[edges].to(out.dtype))
    return out


def _sources(plan: Condensed, part: int) -> Array:
    """The part's nodes, then its region."""
    return np.concatenate([np.flatnonzero(plan.labels == part), plan.region(part)])
