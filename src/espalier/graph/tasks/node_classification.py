"""Node classification and regression, the task `node`: a class, several yes-or-no answers or values per node, on the
whole graph or on sampled neighbourhoods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from espalier.graph.data.graph import Array
from espalier.graph.sampling.neighbor_sampler import ALL
from espalier.graph.sampling.subgraphs import SubgraphBatch, View, forward, infer
from espalier.graph.tasks.answers import LabelledTask, loss_of
from espalier.parallel.workload import SummedLoss
from espalier.recipe.errors import UserError

WORTH = 0.7
"""Blocks around the asked nodes are taken where they have at most this share of the edges that whole layers pass over:
finding their rows costs something too."""


class NodeTask(LabelledTask):
    """Node classification or regression. `train` is what training sees of the graph, `view` what evaluation sees."""

    def __init__(self, train: View, view: View, fanout: Sequence[int], seed: int) -> None:
        self.train = train
        self.view = view
        self.fanout = tuple(fanout)
        self.seed = seed
        graph = view.graph
        if graph.labels is None:
            raise UserError(
                f"{graph.origin} has no labels, and graph.task is 'node'.",
                do="give labels (y), or graph.task = 'link', which needs none",
            )
        super().__init__(graph, "node")
        self._fixed: dict[tuple[int, ...], SubgraphBatch] = {}
        self.every_node = False
        """Whether each step passes over all nodes, as something is learned of those that no label hears from."""
        self.inference = self._infer

    def _infer(self, model: nn.Module) -> Callable[[Array], Tensor]:
        logits = infer(model, self.view).cpu()
        return lambda ids: logits[ids]

    def batch(self, ids: Array, step: int) -> SubgraphBatch:
        """Those nodes with what they hear from."""
        if self.fanout:
            features, drawn = self.train.around(ids, self.fanout, self.seed, step)
            return SubgraphBatch(features, drawn.blocks, self.labels[ids])
        key = (len(ids), int(ids[0]), int(ids[-1])) if len(ids) else (0, 0, 0)
        if key not in self._fixed:
            self._fixed[key] = self._whole(ids)
        return self._fixed[key]

    def _whole(self, ids: Array) -> SubgraphBatch:
        train = self.train
        if not self.every_node and train.depth and sum(train.reach(ids)) <= WORTH * train.depth * train.graph.edges:
            features, drawn = train.around(ids, (ALL,) * train.depth)
            return SubgraphBatch(features, drawn.blocks, self.labels[ids])
        chosen = None if len(ids) == train.graph.nodes else torch.from_numpy(ids)
        return SubgraphBatch(*train.whole(), self.labels[ids], chosen=chosen)

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """Sum of cross entropies over the labelled nodes asked for (binary ones, and squared errors: over known
        answers), and their number."""
        logits = forward(model, batch.features, batch.blocks)
        return loss_of(self.graph, logits, batch.labels, batch.chosen)
