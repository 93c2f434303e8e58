"""Subgraphs: a graph as a network sees it, whole, around some nodes, or piece by piece without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from espalier.graph.data.graph import Array, Graph
from espalier.graph.networks.base import MessageBlock, MessageBlocks, Rows, dense, each, joined, placement
from espalier.graph.networks.gnn import Gnn
from espalier.graph.networks.network import GraphNetwork, quantizers_of
from espalier.graph.sampling import neighbor_sampler
from espalier.graph.sampling.neighbor_sampler import ALL, Drawn, NeighborSampling, Sampler, Style
from espalier.parallel.workload import to_device
from espalier.recipe.errors import UserError

MOST = 1 << 31
"""Bytes of messages that inference makes at once; larger graphs go through a layer in pieces."""


MESSAGES = "messages_over_ranks"
"""Attribute of a foreign network that runs over parts: its `foreign_network.Messages`."""


class SubgraphBatch(NamedTuple):
    """What `batches` yields.

    Attributes:
        features: [nodes, width] of the nodes that the first block reads.
        blocks: one per layer, the farthest from the answers first; a foreign network reads the first alone.
        chosen: int64, which rows of the result are asked for (None: all, in order).
        labels: of what is asked: classes, rows of tasks or of standardised values, or 1 for true links and 0 for drawn
            ones.
        pairs: int64 [2, links], rows of the result that are joined, when links are asked for.
        members: int64 [nodes], the small graph each row belongs to, when graphs are asked for.
        step: of training, that it is made for.
    """

    features: Tensor
    blocks: MessageBlocks
    labels: Tensor
    chosen: Tensor | None = None
    pairs: Tensor | None = None
    members: Tensor | None = None
    step: int = 0


@dataclass(eq=False)
class View:
    """One graph in the style of a network of `depth` layers (0: nobody knows). Has state: what was made of it once."""

    graph: Graph
    style: Style
    depth: int

    @cached_property
    def block(self) -> MessageBlock:
        """All edges."""
        return neighbor_sampler.whole(self.graph, self.style)

    @cached_property
    def features(self) -> Tensor:
        """Of all nodes."""
        return torch.from_numpy(np.asarray(self.graph.features))

    @cached_property
    def sampler(self) -> NeighborSampling:
        """For parts of it."""
        return Sampler(self.graph, self.style)

    def whole(self) -> tuple[Tensor, MessageBlocks]:
        """All features, and the same block for every layer."""
        return self.features, (self.block,) * max(1, self.depth)

    def around(self, seeds: Array, fanouts: Sequence[int], seed: int = 0, step: int = 0) -> tuple[Tensor, Drawn]:
        """The features of a drawn neighbourhood, and the neighbourhood."""
        drawn = self.sampler.draw(seeds, fanouts, seed, step)
        return torch.from_numpy(np.asarray(self.graph.features[drawn.nodes])), drawn

    def reach(self, seeds: Array) -> tuple[int, ...]:
        """Edges that full-neighbour blocks around `seeds` have, by layer, the nearest first; draws nothing."""
        indptr = self.graph.indptr
        indices = self.graph.indices
        known = np.zeros(self.graph.nodes, bool)
        known[seeds] = True
        edges = []
        targets = self.graph.targets()
        for _ in range(self.depth):
            edges.append(int((indptr[1:] - indptr[:-1])[known].sum()))
            known[indices[known[targets]]] = True
        return tuple(edges)


def forward(model: nn.Module, features: Tensor, blocks: MessageBlocks) -> Tensor:
    """What `model` says of the last block's targets. Foreign networks get the first block's edges."""
    quantizers = quantizers_of(model)
    if quantizers is not None:
        features = quantizers.enters(blocks[0], features)
    if isinstance(model, GraphNetwork):
        return model.answers(features, blocks)
    first = blocks[0]
    messages: Any = getattr(model, MESSAGES, None)
    with nullcontext() if messages is None else messages.over(first.halo):
        outputs = model(features, edge_index(first), *_edge_values(model, first))
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(features):
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise UserError(
            f"model.build: its network returned {shape} for {len(features)} nodes.",
            why="it must return a row for each node, [nodes, classes], or a column for each task or value",
            do="no pooling and no softmax inside; see docs/graph.md",
        )
    halo: Any = first.halo
    return outputs[: blocks[-1].targets if halo is None else len(halo.owned)]


def edge_index(block: MessageBlock) -> Tensor:
    """int64 [2, edges] as PyG wants it: sources, then targets."""

    def make() -> Tensor:
        return torch.stack([block.indices.long(), block.rows()])

    return block.forms.get(f"edge_index on {block.indices.device}", make)


def _edge_values(model: nn.Module, block: MessageBlock) -> tuple[Tensor, ...]:
    """The edges' weights or features, for a network whose forward takes a third argument."""
    import inspect

    taken = list(inspect.signature(model.forward).parameters)
    if len(taken) < 3:
        return ()
    if block.features is not None and taken[2] in ("edge_attr", "edge_features"):
        return (block.features,)
    return (block.weights,) if block.weights is not None and taken[2] in ("edge_weight", "weights") else ()


@torch.no_grad()
def infer(model: nn.Module, view: View, layers: int | None = None) -> Tensor:
    """[nodes, outputs] for all nodes with all their neighbours, layer by layer, in pieces where memory is scarce; with
    `layers`, what the first ones give. Of a graph that is cut into parts, one part after the other."""
    placed = placement(model)
    if view.graph.partition is not None:
        from espalier.graph.parts import part_inference

        if quantizers_of(model) is not None:  # packages are of all nodes
            return infer(model, View(part_inference.whole_graph(view.graph), view.style, view.depth), layers)
        where = view.graph.partition.folder, view.graph.partition.ranks
        if isinstance(model, Gnn):
            return part_inference.infer_parts(model, *where, layers)
        features, block = part_inference.gathered(*where)
        return forward(model, *to_device((features, (block,)), **placed))
    if not isinstance(model, Gnn):
        return forward(model, *to_device((view.features, (view.block,)), **placed))
    rows: Rows = view.features
    for at, layer in enumerate(model.layers[:layers]):
        if view.graph.edges * max(layer.inputs, layer.outputs) * 4 <= MOST:
            rows = model.step(at, *to_device((view.block, rows), **placed))
        else:
            rows = _in_pieces(model, at, view, rows)
    return dense(rows)


def _in_pieces(model: Gnn, at: int, view: View, rows: Rows) -> Rows:
    layer = model.layers[at]
    placed = placement(model)
    if (quantizers := quantizers_of(model)) is not None:
        quantizers.pack(layer, rows, placed)
    room = max(1, MOST // (4 * max(layer.inputs, layer.outputs)))
    made = []
    start = 0
    indptr = view.graph.indptr
    while start < view.graph.nodes:
        stop = max(start + 1, int(np.searchsorted(indptr, indptr[start] + room, side="right")) - 1)
        drawn = view.sampler.draw(np.arange(start, min(stop, view.graph.nodes)), (ALL,))
        taken = each(rows, itemgetter(torch.from_numpy(drawn.nodes)))
        made.append(model.step(at, *to_device((drawn.blocks[0], taken), **placed)))
        start = stop
    return joined(made)
