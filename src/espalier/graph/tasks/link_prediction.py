"""Link prediction, the task `link`. The score of a pair of nodes is the product of their embeddings.

Held-out links are taken out of the graph that messages flow through. For each true link some are drawn that start at
the same node and end anywhere (arXiv 1611.07308; the ranking after arXiv 2005.00687): numbered like the links, so that
they are the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.graph.data.graph import Array, DataSplit, Examples, Graph, SplitShares, parted, without_edges
from espalier.graph.sampling.subgraphs import SubgraphBatch, View, forward, infer
from espalier.graph.tasks import metrics
from espalier.graph.tasks.answers import Answers
from espalier.kernels.split_mix import mixed
from espalier.parallel.workload import Shard, SummedLoss
from espalier.recipe.errors import UserError

RIVALS = 100
"""Drawn links that each held-out link is ranked against."""


@dataclass(frozen=True)
class Links:
    """The links of a graph, int64 [2, links], and which of them train, validate and test."""

    pairs: Array
    parts: DataSplit
    rest: Graph
    """The graph without the links held out."""


def split(graph: Graph, shares: SplitShares, seed: int) -> Links:
    """Deals out the links of `graph`, by its own split where it has one; one that runs both ways is one link.

    Raises UserError when there are too few.
    """
    ends = np.stack([graph.indices.astype(np.int64), graph.targets()])
    keys = ends.min(0) * np.int64(graph.nodes) + ends.max(0)
    links = np.unique(keys)
    if len(links) < 3:
        raise UserError(
            f"{graph.origin} has only {len(links)} links.",
            why="training, validation and test each need one",
            do="a graph with more links",
        )
    pairs = np.stack([links // graph.nodes, links % graph.nodes])
    if graph.link_parts is None:
        return cut(graph, pairs, parted(np.arange(len(links)), shares, seed))
    return cut(graph, pairs, DataSplit(*(np.flatnonzero(np.isin(links, keys)) for keys in graph.link_parts)))


def cut(graph: Graph, pairs: Array, parts: DataSplit) -> Links:
    """The links `pairs` of `graph`, ordered by their lower and then their higher end, dealt out as `parts` says."""
    gone = np.ones(pairs.shape[1], bool)
    gone[parts.train] = False
    keys = pairs[0] * np.int64(graph.nodes) + pairs[1]
    targets = graph.targets()
    which = np.searchsorted(
        keys, np.minimum(graph.indices, targets) * np.int64(graph.nodes) + np.maximum(graph.indices, targets)
    )
    return Links(pairs, parts, without_edges(graph, gone[which]))


class LinkTask(Examples):
    """Link prediction over `links`; messages flow through `view`, which lacks those held out."""

    def __init__(self, view: View, links: Links, fanout: Sequence[int], seed: int, negatives: int) -> None:
        super().__init__(links.parts)
        self.view = view
        self.links = links
        self.fanout = tuple(fanout)
        self.seed = seed
        self.negatives = negatives
        self.graph = view.graph

    def batch(self, ids: Array, step: int) -> SubgraphBatch:
        """Those links and as many drawn ones for each as `negatives` says, with what their nodes hear from."""
        heads, tails = self.links.pairs[:, ids]
        drawn = strangers(ids, heads, self.graph.nodes, self.negatives, (self.seed, step))
        pairs = np.stack(
            [np.concatenate([heads, np.repeat(heads, self.negatives)]), np.concatenate([tails, drawn.ravel()])]
        )
        labels = torch.zeros(pairs.shape[1])
        labels[: len(ids)] = 1
        if not self.fanout:
            return SubgraphBatch(*self.view.whole(), labels, pairs=torch.from_numpy(pairs))
        nodes, places = np.unique(pairs, return_inverse=True)
        features, around = self.view.around(nodes, self.fanout, self.seed, step)
        return SubgraphBatch(features, around.blocks, labels, pairs=torch.from_numpy(places.reshape(2, -1)))

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """Sum of binary cross entropies over true and drawn links, and their number."""
        assert batch.pairs is not None
        logits = scores(forward(model, batch.features, batch.blocks), batch.pairs)
        losses = F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype), reduction="sum")
        return losses, torch.tensor(len(batch.labels))

    def evaluate(self, model: nn.Module, shard: Shard) -> metrics.Sums:
        """Loss and ranks of the shard's validation links, and of as large a share of the test links."""
        embedded = infer(model, self.view).cpu()
        figures: metrics.Sums = {}
        for prefix, _, shard_ids in self.parts.held_out(shard):
            figures |= {prefix + name: value for name, value in self._figures(embedded, shard_ids).items()}
        return figures

    def _figures(self, embedded: Tensor, ids: Array) -> metrics.Sums:
        heads, tails = (torch.from_numpy(ends) for ends in self.links.pairs[:, ids])
        rivals = torch.from_numpy(strangers(ids, heads.numpy(), self.graph.nodes, RIVALS, (self.seed, -1)))
        true = (embedded[heads] * embedded[tails]).sum(1)
        others = torch.empty(rivals.shape, dtype=true.dtype)
        for column in range(RIVALS):  # one at a time: all rows at once would be a hundred graphs
            others[:, column] = (embedded[heads] * embedded[rivals[:, column]]).sum(1)
        losses = F.softplus(-true).sum() + F.softplus(others[:, : self.negatives]).sum()
        pairs = float(len(ids) * (1 + min(self.negatives, RIVALS)))
        return {"loss": (float(losses), pairs), **metrics.ranked(true, others)}

    def name(self, item: int) -> str:
        """Of a link, for people."""
        head, tail = self.links.pairs[:, item]
        return f"{self.graph.called(int(head))} - {self.graph.called(int(tail))}"

    def likeliest(self, model: nn.Module, node: int, count: int) -> Answers:
        """The `count` likeliest links of `node` that the graph does not have, the likeliest first."""
        embedded = infer(model, self.view).cpu()
        logits = embedded @ embedded[node]
        logits[node] = -torch.inf
        ends = torch.from_numpy(self.links.pairs)
        logits[torch.cat([ends[1][ends[0] == node], ends[0][ends[1] == node]])] = -torch.inf
        best = logits.topk(min(count, int(logits.isfinite().sum())))
        pairs = [(node, other) for other in best.indices.tolist()]
        return self._named(pairs, best.values.sigmoid().tolist())

    def answers(self, model: nn.Module, pairs: Sequence[tuple[int, int]]) -> Answers:
        """The probability that each pair is joined."""
        embedded = infer(model, self.view).cpu()
        chances = scores(embedded, torch.tensor(pairs).T.reshape(2, -1)).sigmoid().tolist()
        return self._named(pairs, chances)

    def _named(self, pairs: Sequence[tuple[int, int]], chances: Sequence[float]) -> Answers:
        graph = self.graph
        return [
            {
                "name": f"{graph.called(head)} - {graph.called(tail)}",
                "source": graph.key(head),
                "target": graph.key(tail),
                "probability": chance,
            }
            for (head, tail), chance in zip(pairs, chances, strict=True)
        ]


def scores(rows: Tensor, pairs: Tensor) -> Tensor:
    """[pairs]: the products of both ends' rows."""
    return (rows[pairs[0]] * rows[pairs[1]]).sum(1)


def strangers(ids: Array, heads: Array, nodes: int, count: int, stream: tuple[int, int]) -> Array:
    """int64 [len(ids), count]: nodes drawn for each link, never its head; a hash of (stream, link, draw)."""
    seed, step = (np.uint64(number & 0xFFFF_FFFF_FFFF_FFFF) for number in stream)
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = mixed(mixed(seed * golden + np.uint64(1)) ^ (step * golden))
        word = mixed(key ^ mixed(ids.astype(np.uint64)))[:, None] + np.arange(1, count + 1, dtype=np.uint64) * golden
    others = (mixed(word) % np.uint64(max(1, nodes - 1))).astype(np.int64)
    return others + (others >= heads[:, None]) * (nodes > 1)
