"""Graph classification and regression, the task `graph`: a class, several answers or values for each of many small
graphs, several of them in a batch.

Rows of nodes are read out by their sum for GIN, as its authors do (arXiv 1810.00826, section 5), else by their mean.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from espalier.graph.data.graph import Array, Graph, selected
from espalier.graph.sampling import neighbor_sampler
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.graph.sampling.subgraphs import SubgraphBatch, forward
from espalier.graph.tasks.answers import LabelledTask, loss_of
from espalier.parallel.workload import SummedLoss, to_device
from espalier.recipe.errors import UserError
from espalier.recipe.offsets import offsets_of

AT_ONCE = 256
"""Small graphs side by side while nothing is trained."""


class GraphTask(LabelledTask):
    """Graph classification or regression. `summed`: rows are added up, not averaged."""

    fanout: tuple[int, ...] = ()

    def __init__(self, graph: Graph, style: Style, depth: int, summed: bool) -> None:
        if graph.starts is None or graph.labels is None:
            lacks = "is one graph" if graph.starts is None else "has no labels"
            raise UserError(
                f"{graph.origin} {lacks}, and graph.task is 'graph'.",
                do="a list of PyG Data with y, an OGB folder of many graphs, or graph.task = 'node'",
            )
        super().__init__(graph, "graph")
        self.style = style
        self.depth = depth
        self.summed = summed
        self.inference = lambda model: lambda ids: self.infer(model, ids)

    def batch(self, ids: Array, step: int) -> SubgraphBatch:
        """Those graphs side by side."""
        some, sizes = joined(self.graph, ids)
        block = neighbor_sampler.whole(some, self.style)
        block.forms.known["sizes"] = torch.from_numpy(sizes)
        members = torch.repeat_interleave(torch.arange(len(ids)), torch.from_numpy(sizes))
        features = torch.from_numpy(some.features)
        return SubgraphBatch(features, (block,) * max(1, self.depth), self.labels[ids], members=members)

    def logits(self, model: nn.Module, batch: SubgraphBatch) -> Tensor:
        """[graphs, outputs]."""
        assert batch.members is not None
        rows = forward(model, batch.features, batch.blocks)
        sums = rows.new_zeros(len(batch.labels), rows.shape[1]).index_add(0, batch.members, rows)
        if self.summed:
            return sums
        sizes = torch.bincount(batch.members, minlength=len(batch.labels)).clamp(min=1)
        return sums / sizes[:, None]

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """Sum over the graphs' known answers, and how many."""
        return loss_of(self.graph, self.logits(model, batch), batch.labels)

    @torch.no_grad()
    def infer(self, model: nn.Module, ids: Array) -> Tensor:
        """[len(ids), outputs]."""
        parameter = next(model.parameters())
        logits = [torch.zeros(0, self.outputs)]
        for at in range(0, len(ids), AT_ONCE):
            batch = to_device(self.batch(ids[at : at + AT_ONCE], 0), parameter.device, parameter.dtype)
            logits.append(self.logits(model, batch).cpu().float())
        return torch.cat(logits)


def joined(graph: Graph, ids: Array) -> tuple[Graph, Array]:
    """The small graphs `ids` side by side, in that order, and how many nodes each has."""
    assert graph.starts is not None
    sizes = graph.starts[ids + 1] - graph.starts[ids]
    nodes = _ranges(graph.starts[ids], sizes)
    counts = graph.indptr[nodes + 1] - graph.indptr[nodes]
    edges = _ranges(graph.indptr[nodes], counts)
    shift = offsets_of(sizes)[:-1] - graph.starts[ids]
    per_node = np.repeat(shift, sizes)
    made = replace(
        graph,
        indptr=offsets_of(counts),
        indices=(graph.indices[edges] + np.repeat(per_node, counts)).astype(graph.indices.dtype),
        features=np.ascontiguousarray(graph.features[nodes]),
        weights=selected(graph.weights, edges),
        edge_features=selected(graph.edge_features, edges),
        labels=None,
        parts=None,
        starts=None,
    )
    return made, sizes


def _ranges(starts: Array, sizes: Array) -> Array:
    """The numbers from each start on, `sizes` of them, one range after the other."""
    before = offsets_of(sizes)[:-1]
    return np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
