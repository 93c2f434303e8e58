"""Hyperbatches: many mini-batches drawn together, every block of topology and features read once for all of them.

After AGNES (arXiv 2601.01473): online sampling of a graph on disk, with no pool that grows stale. The features of a
hyperbatch are read once for the union of its batches' nodes; each batch takes its rows from there. A hyperbatch holds
as many batches as fit into the memory allowed, which depends on how much they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data.graph import Array
from espalier.graph.sampling.neighbor_sampler import Drawn
from espalier.mechanisms.disk_batches.disk_sampler import DiskSampler
from espalier.mechanisms.disk_batches.features import rows_of
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size
from espalier.store.base import Rows


@dataclass(frozen=True, eq=False)
class HyperbatchReader:
    """Batches of a graph on disk with their features, in order.

    Attributes:
        sampler: of the topology. features: rows of all nodes.
        fanouts: neighbours per node, the layer next to the seeds first. seed: of the draws.
        memory: bytes for the rows of a hyperbatch's nodes. together: batches that are drawn at once, at most.
    """

    sampler: DiskSampler
    features: Rows
    fanouts: tuple[int, ...]
    memory: int
    seed: int = 0
    together: int = 16

    def batches(self, seeds: Sequence[Array], steps: Sequence[int]) -> Iterator[tuple[Drawn, Tensor]]:
        """Each of `seeds` with its step: the neighbourhood, as `Sampler.draw` gives it, and its features."""
        for at in range(0, len(seeds), self.together):
            stop = at + self.together
            drawn = self.sampler.draw_together(seeds[at:stop], self.fanouts, self.seed, steps[at:stop])
            while drawn:
                count, union = self._fitting(drawn)
                yield from self._read(drawn[:count], union)
                drawn = drawn[count:]

    def _fitting(self, drawn: Sequence[Drawn]) -> tuple[int, Array]:
        """How many of the first batches fit together, and int64 all their nodes, ascending."""
        union = np.unique(drawn[0].nodes)
        if len(union) * self.features.row_bytes > self.memory:
            needed = show_size(len(union) * self.features.row_bytes)
            raise UserError(
                f"store.memory = {show_size(self.memory)} is too small for one batch.",
                why=f"the features of its {len(union):,} nodes take {needed}",
                do=f'store.memory = "{needed}" or more, or a smaller train.batch_tokens',
            )
        for count, batch in enumerate(drawn[1:], 1):
            larger = np.union1d(union, batch.nodes)
            if len(larger) * self.features.row_bytes > self.memory:
                return count, union
            union = larger
        return len(drawn), union

    def _read(self, drawn: Sequence[Drawn], union: Array) -> Iterator[tuple[Drawn, Tensor]]:
        rows = rows_of(self.features, union)
        for batch in drawn:
            yield batch, rows[torch.from_numpy(np.searchsorted(union, batch.nodes))]
