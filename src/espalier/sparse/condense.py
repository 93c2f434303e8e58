"""Condense-Edge: sources of the edges between parts of a graph, gathered part by part while they are produced, so that
they are read in sequence. After MEGA (HPCA 2024, arXiv 2311.09775, section V).

A part's region holds each outside source once, ascending; a source that several parts need is in each of their regions.
The plan orders the rows of halo messages (`graph.halo`) and of layers on disk (`graph.condensed_file`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.recipe.errors import UserError

Array = NDArray[Any]


@dataclass(frozen=True)
class Condensed:
    """Of a graph whose nodes are in parts.

    Attributes:
        labels: int32 [nodes], the part of each. parts: how many.
        regions: int64, outside sources of all parts one after the other; bounds: int64 [parts + 1], where each begins.
    """

    labels: Array
    parts: int
    regions: Array
    bounds: Array

    def region(self, part: int) -> Array:
        """Outside sources of a part, ascending, each once."""
        return self.regions[self.bounds[part] : self.bounds[part + 1]]


def condense(indptr: Array, indices: Array, labels: Array) -> Condensed:
    """The plan for edges by target (`indptr`, `indices`) and the part of each node.

    Raises UserError: not a part for each node.
    """
    nodes = len(indptr) - 1
    if len(labels) != nodes or (nodes and labels.min() < 0):
        raise UserError(
            f"{nodes} nodes have {len(labels)} parts.", do="sparse.partition.clusters(indptr, indices, parts)"
        )
    parts = int(labels.max(initial=-1)) + 1
    targets = np.repeat(np.arange(nodes), np.diff(indptr))
    crossing = labels[targets] != labels[indices]
    keys = np.unique(labels[targets[crossing]].astype(np.int64) * nodes + indices[crossing])
    of, sources = np.divmod(keys, max(1, nodes))
    bounds = np.searchsorted(of, np.arange(parts + 1))
    return Condensed(labels, parts, sources, bounds)
