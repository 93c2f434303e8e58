"""Node classification, the task `node`: a class (or several yes-or-no answers) per node, on the whole graph or on
sampled neighbourhoods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.errors import UserError
from espalier.graph import metrics
from espalier.graph.data import Array, DataSplit, Examples, Graph
from espalier.graph.neighbor_sampler import ALL
from espalier.graph.subgraphs import SubgraphBatch, View, forward, infer
from espalier.kernels.cross_entropy import cross_entropy
from espalier.workload import Shard

WORTH = 0.7
"""Blocks around the asked nodes are taken where they have at most this share of the edges that whole layers pass over:
finding their rows costs something too."""


TOLD = 1 << 16
"""Nodes whose answers are made at once."""


class NodeTask(Examples):
    """Node classification. `train` is what training sees of the graph, `held` what evaluation sees."""

    def __init__(self, train: View, held: View, fanout: Sequence[int], seed: int) -> None:
        self.train, self.held, self.fanout, self.seed = train, held, tuple(fanout), seed
        graph = held.graph
        if graph.labels is None:
            raise UserError(
                f"{graph.origin} has no labels, and graph.task is 'node'.",
                do="give labels (y), or graph.task = 'link', which needs none",
            )
        assert graph.parts is not None
        super().__init__(graph.parts)
        if not self.items:
            raise UserError(f"{graph.origin} has no node to train on.", do="graph.split = [0.6, 0.2, 0.2]")
        self.graph: Graph = graph
        self.labels = torch.from_numpy(np.asarray(graph.labels))
        self.outputs = graph.outputs
        self._fixed: dict[tuple[int, ...], SubgraphBatch] = {}
        self.every_node = False
        """Whether each step passes over all nodes, as something is learned of those that no label hears from."""
        self.inference: Callable[[nn.Module], Callable[[Array], Tensor]] = self._infer
        """Of a model, what it says of all nodes: int64 ids -> their logits, on the CPU."""

    def _infer(self, model: nn.Module) -> Callable[[Array], Tensor]:
        logits = infer(model, self.held).cpu()
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

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> tuple[Tensor, Tensor]:
        """Sum of cross entropies over the labelled nodes asked for (binary ones: over known answers), their number."""
        logits = forward(model, batch.features, batch.blocks)
        return summed_loss(logits, batch.labels, batch.chosen)

    def evaluate(self, model: nn.Module, shard: Shard) -> metrics.Sums:
        """Figures of the shard's validation nodes, and of as large a share of the test nodes under `test_`."""
        return held_out_figures(self, shard, self.inference(model))

    def name(self, item: int) -> str:
        """Of a node, for people."""
        return self.graph.called(item)

    def answers(self, model: nn.Module, items: Sequence[int]) -> list[dict[str, Any]]:
        """What the model says of these nodes."""
        return list(self.each(model, items))

    def each(self, model: nn.Module, items: Sequence[int]) -> Iterator[dict[str, Any]]:
        """As `answers`, one by one: of more nodes than memory has room for answers of."""
        logits_of = self.inference(model)
        for at in range(0, len(items), TOLD):
            some = items[at : at + TOLD]
            yield from told(logits_of(np.asarray(some, np.int64)), self.graph, [self.name(one) for one in some])


class LabelledTask(Protocol):
    """What is asked of a task whose items have labels."""

    parts: DataSplit
    labels: Tensor
    outputs: int


def held_out_figures(task: LabelledTask, shard: Shard, logits_of: Callable[[Array], Tensor]) -> metrics.Sums:
    """Figures of the shard's validation items, and of as large a share of the test items under `test_`."""
    found: dict[str, tuple[float, float]] = {}
    several = task.labels.ndim == 2
    for prefix, ids, own in task.parts.held_out(shard):
        figures = (metrics.marked if several else metrics.classified)(logits_of(own), task.labels[own])
        found |= {prefix + name: value for name, value in figures.items()}
        if several or task.outputs == 2:  # no sum over items: the first shard sees to all of it
            first = shard.start == 0
            value = metrics.areas(logits_of(ids), task.labels[ids]) if first else 0.0
            found[f"{prefix}auc"] = (value, float(first))
    return found


def summed_loss(logits: Tensor, labels: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, weight) over the answers that are known, of the rows `chosen` (None: all)."""
    if labels.ndim == 2:
        logits = logits if chosen is None else logits[chosen]
        known = ~labels.isnan()
        answers = labels[known].to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits[known], answers, reduction="sum"), known.sum()
    return cross_entropy(logits, labels, chosen), _known(labels)


def _known(labels: Tensor) -> Tensor:
    if labels.device.type != "cpu":
        return (labels >= 0).sum()
    return torch.tensor(np.count_nonzero(labels.numpy() >= 0))  # by NumPy: torch's threads would spin afterwards


def told(logits: Tensor, graph: Graph, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of logits as answers: the class and its probability, or the probability of each task."""
    if graph.labels is not None and graph.labels.ndim == 2:
        chances = logits.sigmoid().tolist()
        return [{"name": name, "probabilities": row} for name, row in zip(names, chances, strict=True)]
    best = logits.softmax(1).max(1)
    found = []
    for name, chance, at in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
        label = graph.classes[at] if at < len(graph.classes) else str(at)
        found.append({"name": name, "label": label, "probability": chance})
    return found
