"""Condense-Edge: sources of the edges between parts of a graph, gathered part by part while they are produced, so that
they are read in sequence. After MEGA (HPCA 2024, arXiv 2311.09775, section V).

A part's region holds each outside source once, ascending; a source that several parts need is in each of their regions.
The plan also orders the rows of a disk layout or of a halo message: a region is one extent, or one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.errors import UserError

Array = NDArray[Any]
FIFOS = 16
"""Parts that are gathered for at once; more take several passes over the produced rows."""


@dataclass(frozen=True)
class Condensed:
    """Of a graph whose nodes are in parts.

    Attributes:
        labels: int32 [nodes], the part of each. parts: how many.
        regions: int64, outside sources of all parts one after the other; bounds: int64 [parts + 1], where each begins.
        internal, external: edges within parts, and between them.
    """

    labels: Array
    parts: int
    regions: Array
    bounds: Array
    internal: int
    external: int

    def region(self, part: int) -> Array:
        """Outside sources of a part, ascending, each once."""
        return self.regions[self.bounds[part] : self.bounds[part + 1]]

    @property
    def passes(self) -> int:
        """Passes over the produced rows."""
        return -(-self.parts // FIFOS)

    @property
    def pays(self) -> bool:
        """Whether fewer rows are written and read than edges read one by one."""
        return 2 * len(self.regions) < self.external

    def gathered(self, rows: Array) -> Array:
        """The regions' rows, in the order in which they are read: [len(regions), columns]."""
        return rows[self.regions]

    def aggregated(self, indptr: Array, indices: Array, rows: Array) -> Array:
        """The sums over each node's edges, from its part's rows and its region alone: A @ rows, exactly where additions
        are."""
        out = np.zeros((len(indptr) - 1, rows.shape[1]), rows.dtype)
        region = self.gathered(rows)
        targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        for part in range(self.parts):
            edges = np.flatnonzero(self.labels[targets] == part)
            sources = indices[edges]
            own = self.labels[sources] == part
            np.add.at(out, targets[edges[own]], rows[sources[own]])
            outside = edges[~own]
            place = self.bounds[part] + np.searchsorted(self.region(part), indices[outside])
            np.add.at(out, targets[outside], region[place])
        return out


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
    external = int(crossing.sum())
    return Condensed(labels, parts, sources, bounds, len(indices) - external, external)
