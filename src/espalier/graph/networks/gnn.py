"""GCN, GraphSAGE, GAT and GIN, each with MaxK as an alternative nonlinearity. They know nothing of kernels or ranks.

After Kipf and Welling (arXiv 1609.02907), Hamilton et al. (arXiv 1706.02216), Velickovic et al. (arXiv 1710.10903), Xu
et al. (arXiv 1810.00826) and MaxK-GNN (arXiv 2312.08656). A layer's linear map and its aggregation commute; the
narrower side is aggregated, and rows of which only k values are kept are aggregated as they are, before the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier import recipe as config
from espalier.graph.networks.base import (
    Aggregate,
    Begin,
    GraphAttend,
    Kept,
    MessageBlock,
    Project,
    Rows,
    aggregate,
    alone,
    attend,
    dense,
    each,
    project,
)
from espalier.graph.networks.network import GraphNetwork
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.kernels import rtopk
from espalier.kernels.dropout import activated


class Layer(nn.Module):
    """One layer of message passing, `inputs` to `outputs` columns. `aggregate`, `attend`, `project` and `begin` are the
    seam."""

    loops = False
    """Each node hears from itself through an edge of its own."""
    scale = "none"
    """How edges are scaled: `symmetric` (D^-1/2 A D^-1/2), `mean` (D^-1 A) or `none`."""
    seams: ClassVar = {"aggregate": ("aggregate", "attend")}

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self.aggregate: Aggregate = aggregate
        self.attend: GraphAttend = attend
        self.project: Project = project
        self.begin: Begin = alone

    def aggregated_first(self, rows: Rows) -> bool:
        """Whether the neighbours are summed before the linear map: the cheaper order of the two."""
        return isinstance(rows, Kept) or self.inputs <= self.outputs

    def begun(self, block: MessageBlock, rows: Rows) -> MessageBlock:
        """The block, after rows that it aggregates as they are have begun to travel where they do."""
        return self.begin(block, rows) if self.aggregated_first(rows) else block

    def mapped(self, block: MessageBlock, rows: Rows, weight: Tensor, start: Tensor | None = None) -> Tensor:
        """The aggregate of `rows` through `weight`, in the cheaper order, added to `start`."""
        if self.aggregated_first(rows):
            return self.project(self.aggregate(block, rows), weight, start)
        return self.aggregate(block, self.project(rows, weight), start)

    def forward(self, block: MessageBlock, rows: Rows) -> Tensor:
        """[sources, inputs] -> [targets, outputs]; each kind of layer has its own."""
        return self.aggregate(block, rows)


class Convolution(Layer):
    """GCN: D^-1/2 (A + I) D^-1/2 X W + b."""

    loops = True
    scale = "symmetric"

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = _matrix(inputs, outputs)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, block: MessageBlock, rows: Rows) -> Tensor:
        """The normalised sum of the neighbours and the node itself."""
        return self.mapped(block, rows, self.weight.weight, self.bias)


class Mean(Layer):
    """GraphSAGE: X W_own + mean of the neighbours W + b."""

    scale = "mean"

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = _matrix(inputs, outputs)
        self.own = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(self.own.weight)
        nn.init.zeros_(self.own.bias)

    def forward(self, block: MessageBlock, rows: Rows) -> Tensor:
        """The node itself and the mean of its neighbours (zero where it has none)."""
        block = self.begun(block, rows)
        target_rows = self.project(each(rows, lambda part: part[: block.targets]), self.own.weight, self.own.bias)
        return self.mapped(block, rows, self.weight.weight, target_rows)


class Isomorphism(Layer):
    """GIN: MLP((1 + epsilon) x + sum of the neighbours), with `norm` over the hidden columns of the perceptron.

    `linear`: without the norm and the ReLU. The last layer's perceptron is as wide as its answer. Of one value a norm
    would leave nothing, and a ReLU that is negative for all nodes ends training.
    """

    def __init__(self, inputs: int, outputs: int, norm: bool, linear: bool = False) -> None:
        super().__init__(inputs, outputs)
        self.linear = linear
        self.epsilon = nn.Parameter(torch.zeros(1))
        self.first = nn.Linear(inputs, outputs)
        self.second = nn.Linear(outputs, outputs)
        self.norm = nn.LayerNorm(outputs) if norm and not linear else nn.Identity()

    def forward(self, block: MessageBlock, rows: Rows) -> Tensor:
        """The perceptron of the sum; its first matrix before the sum where that is narrower."""
        block = self.begun(block, rows)
        target_rows = self.project(each(rows, lambda part: part[: block.targets]), self.first.weight)
        sums = self.mapped(block, rows, self.first.weight)
        hidden = self.norm(sums + (1 + self.epsilon) * target_rows + self.first.bias)
        return self.second(hidden if self.linear else F.relu(hidden))


class GraphAttention(Layer):
    """GAT: a softmax over the neighbours and the node itself. `joined`: heads side by side, else their mean."""

    loops = True

    def __init__(self, inputs: int, outputs: int, heads: int, joined: bool, dropout: float) -> None:
        super().__init__(inputs, outputs)
        self.heads = heads
        self.columns = outputs // heads if joined else outputs
        self.joined = joined
        self.dropout = dropout
        self.weight = _matrix(inputs, heads * self.columns)
        self.target, self.source = (nn.Parameter(torch.empty(heads, self.columns)) for _ in range(2))
        for vector in (self.target, self.source):
            nn.init.xavier_uniform_(vector)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def aggregated_first(self, rows: Rows) -> bool:
        """Never: scores are made of mapped rows."""
        return False

    def forward(self, block: MessageBlock, rows: Rows) -> Tensor:
        """The attended neighbours, heads joined or averaged."""
        x = self.project(rows, self.weight.weight).view(-1, self.heads, self.columns)
        scores = self.project(x.flatten(1), torch.cat([_by_head(self.target), _by_head(self.source)]))
        both = scores[: block.targets, : self.heads], scores[:, self.heads :]
        attended = self.attend(block, x, both, self.dropout if self.training else 0.0)
        return (attended.flatten(1) if self.joined or self.heads == 1 else attended.mean(1)) + self.bias


def _matrix(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(made.weight)
    return made


def _by_head(vectors: Tensor) -> Tensor:
    """[heads, columns] as the matrix [heads, heads · columns] that multiplies each head's columns by its own vector."""
    heads = torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
    return (heads[:, :, None] * vectors).flatten(1)


# --- networks ----------------------------------------------------------------------------------------------------


class Gnn(GraphNetwork):
    """Layers with a nonlinearity and dropout between them: features [nodes, inputs] to outputs [targets, outputs],
    those of a regression with `values`."""

    def __init__(self, options: config.Network, inputs: int, outputs: int, values: bool = False) -> None:
        super().__init__()
        assert options.depth is not None
        assert options.width is not None
        assert options.dropout is not None
        self.options = options
        sizes = [inputs, *[options.width] * (options.depth - 1), outputs]
        last = options.depth - 1
        layers = (_layer(options, sizes[i], sizes[i + 1], i == last, values) for i in range(options.depth))
        self.layers = cast("Sequence[Layer]", nn.ModuleList(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(options.width) for _ in range(last if options.norm else 0))

    @property
    def drops_features(self) -> bool:
        """Whether dropout takes of the features too, as GCN's and GAT's authors have it."""
        return bool(self.options.dropout) and isinstance(self.options, config.Gcn | config.Gat)

    @property
    def aggregates_once(self) -> bool:
        """Whether the first layer aggregates rows that are the same at every step, where the graph is too."""
        return not self.drops_features and self.layers[0].aggregated_first(torch.empty(0))

    def forward(self, features: Tensor, blocks: Sequence[MessageBlock]) -> Tensor:
        """One block for each layer, the one that reads `features` first."""
        rows: Rows = features
        for at, block in enumerate(blocks):
            rows = self.step(at, block, rows)
        return dense(rows)

    def step(self, at: int, block: MessageBlock, rows: Rows) -> Rows:
        """Layer `at` with the nonlinearity and the dropout behind it; the last one's result is left as it is."""
        share = (self.options.dropout or 0.0) if self.training else 0.0
        if at == 0 and share and self.drops_features:
            rows = activated(dense(rows), "none", share)
        x: Tensor = self.layers[at](block, rows)
        if at == len(self.layers) - 1:
            return x
        if self.options.norm:
            x = self.norms[at](x)
        if self.options.activation == "maxk":
            assert self.options.k is not None
            values, columns = rtopk(x, self.options.k, self.options.max_iterations)
            return Kept(activated(values, "none", share), columns, x.shape[1])
        return activated(x, self.options.activation or "relu", share)


def _layer(options: config.Network, inputs: int, outputs: int, last: bool, values: bool) -> Layer:
    match options:
        case config.Gat():
            return GraphAttention(inputs, outputs, 1 if last else options.heads, not last, options.dropout or 0.0)
        case config.Gcn():
            return Convolution(inputs, outputs)
        case config.Sage():
            return Mean(inputs, outputs)
        case _:
            return Isomorphism(inputs, outputs, bool(options.norm), last and values)


def style_of(model: config.Model) -> Style:
    """What blocks a network of these options is called with."""
    if isinstance(model, config.Gcn):
        return Style(loops=True, scale="symmetric")
    if isinstance(model, config.Gat):
        return Style(loops=True, scale="none")
    return Style(loops=False, scale="mean" if isinstance(model, config.Sage) else "none")
