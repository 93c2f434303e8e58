"""GCN, GraphSAGE, GAT and GIN, each with MaxK as an alternative nonlinearity. They know nothing of kernels or ranks.

After Kipf and Welling (arXiv 1609.02907), Hamilton et al. (arXiv 1706.02216), Velickovic et al. (arXiv 1710.10903), Xu
et al. (arXiv 1810.00826) and MaxK-GNN (arXiv 2312.08656). A layer's linear map and its aggregation commute; the
narrower side is aggregated, and rows of which only k values are kept are aggregated as they are, before the map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier import config
from espalier.graph.base import Aggregate, Attend, Block, Kept, Rows, aggregate, attend, dense, project


class Layer(nn.Module):
    """One layer of message passing, `inputs` to `outputs` columns. `aggregate`, `attend` and `project` are the seam."""

    loops = False
    """Each node hears from itself through an edge of its own."""
    scale = "none"
    """How edges are scaled: `symmetric` (D^-1/2 A D^-1/2), `mean` (D^-1 A) or `none`."""
    seams: ClassVar = {"aggregate": ("aggregate", "attend")}

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.aggregate: Aggregate = aggregate
        self.attend: Attend = attend
        self.project: Callable[[Rows, Tensor, Tensor], Tensor] = project

    def aggregated_first(self, rows: Rows) -> bool:
        """Whether the neighbours are summed before the linear map: the cheaper order of the two."""
        return isinstance(rows, Kept) or self.inputs <= self.outputs

    def mapped(self, block: Block, rows: Rows, weight: Callable[[Tensor], Tensor]) -> Tensor:
        """The aggregate of `rows` through `weight`, in the cheaper order."""
        if isinstance(rows, Kept) or self.aggregated_first(rows):
            return weight(self.aggregate(block, rows))
        return self.aggregate(block, weight(rows))

    def forward(self, block: Block, rows: Rows) -> Tensor:
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

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """The normalised sum of the neighbours and the node itself."""
        if isinstance(rows, Kept) or self.aggregated_first(rows):
            return self.project(self.aggregate(block, rows), self.weight.weight, self.bias)
        return self.aggregate(block, self.weight(rows)).add_(self.bias)


class Mean(Layer):
    """GraphSAGE: X W_own + mean of the neighbours W + b."""

    scale = "mean"

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = _matrix(inputs, outputs)
        self.own = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(self.own.weight)
        nn.init.zeros_(self.own.bias)

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """The node itself and the mean of its neighbours (zero where it has none)."""
        first = _first(rows, block.targets)
        mixed = torch.is_autocast_enabled(self.own.weight.device.type)
        if isinstance(first, Tensor) and not mixed and not torch.is_grad_enabled():  # one buffer less
            return self.mapped(block, rows, self.weight).addmm_(first, self.own.weight.T).add_(self.own.bias)
        own = self.project(first, self.own.weight, self.own.bias)
        return own.add_(self.mapped(block, rows, self.weight))


class Isomorphism(Layer):
    """GIN: MLP((1 + epsilon) x + sum of the neighbours)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.epsilon = nn.Parameter(torch.zeros(1))
        self.first, self.second = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """The perceptron of the sum; its first matrix before the sum where that is narrower."""
        sums = self.mapped(block, rows, _without_bias(self.first))
        own = self.project(_first(rows, block.targets), self.first.weight, torch.zeros_like(self.first.bias))
        hidden = F.relu(sums + (1 + self.epsilon) * own + self.first.bias)
        return self.second(hidden)


class Attention(Layer):
    """GAT: a softmax over the neighbours and the node itself. `joined`: heads side by side, else their mean."""

    loops = True

    def __init__(self, inputs: int, outputs: int, heads: int, joined: bool, dropout: float) -> None:
        super().__init__(inputs, outputs)
        self.heads, self.columns, self.joined = heads, outputs // heads if joined else outputs, joined
        self.dropout = dropout
        self.weight = _matrix(inputs, heads * self.columns)
        self.target, self.source = (nn.Parameter(torch.empty(heads, self.columns)) for _ in range(2))
        for vector in (self.target, self.source):
            nn.init.xavier_uniform_(vector)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def aggregated_first(self, rows: Rows) -> bool:
        """Never: scores are made of mapped rows."""
        return False

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """The attended neighbours, heads joined or averaged."""
        x = self.weight(dense(rows)).view(-1, self.heads, self.columns)
        scores = (x[: block.targets] * self.target).sum(-1), (x * self.source).sum(-1)
        found = self.attend(block, x, scores, self.dropout if self.training else 0.0)
        return (found.flatten(1) if self.joined else found.mean(1)) + self.bias


def _matrix(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(made.weight)
    return made


def _without_bias(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda rows: F.linear(rows, linear.weight)


def _first(rows: Rows, count: int) -> Rows:
    if isinstance(rows, Kept):
        return Kept(rows.values[:count], rows.columns[:count], rows.width)
    return rows[:count]


# --- networks ----------------------------------------------------------------------------------------------------


def largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The plain form of row-wise top-k: values [rows, k], differentiable, and their columns int64 [rows, k]."""
    found = torch.topk(rows, k, sorted=False)
    return found.values, found.indices


class Network(nn.Module):
    """Layers with a nonlinearity and dropout between them: features [nodes, inputs] to outputs [targets, outputs]."""

    def __init__(self, options: config.Network, inputs: int, outputs: int) -> None:
        super().__init__()
        assert options.depth is not None
        assert options.width is not None
        assert options.dropout is not None
        self.options = options
        sizes = [inputs, *[options.width] * (options.depth - 1), outputs]
        last = options.depth - 1
        self.layers = nn.ModuleList(
            _layer(options, sizes[i], sizes[i + 1], joined=i != last) for i in range(options.depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(options.width) for _ in range(last if options.norm else 0))
        self.drop: Callable[[Tensor, float], Tensor] = F.dropout
        self.largest: Callable[[Tensor, int], tuple[Tensor, Tensor]] = largest

    def forward(self, features: Tensor, blocks: Sequence[Block]) -> Tensor:
        """One block for each layer, the one that reads `features` first."""
        rows: Rows = features
        for at, block in enumerate(blocks):
            rows = self.step(at, block, rows)
        return dense(rows)

    def step(self, at: int, block: Block, rows: Rows) -> Rows:
        """Layer `at` with what stands round it; the last one's result is left as it is."""
        if at > 0 or isinstance(self.options, config.Gcn | config.Gat):  # whose authors also drop features
            rows = self._dropped(rows)
        x: Tensor = self.layers[at](block, rows)
        if at == len(self.layers) - 1:
            return x
        if self.options.norm:
            x = self.norms[at](x)
        if self.options.activation == "maxk":
            assert self.options.k is not None
            return Kept(*self.largest(x, self.options.k), x.shape[1])
        return F.elu(x, inplace=True) if self.options.activation == "elu" else F.relu(x, inplace=True)

    def _dropped(self, rows: Rows) -> Rows:
        share = self.options.dropout or 0.0
        if not self.training or share == 0.0:
            return rows
        if isinstance(rows, Kept):
            return Kept(self.drop(rows.values, share), rows.columns, rows.width)
        return self.drop(rows, share)


def _layer(options: config.Network, inputs: int, outputs: int, joined: bool) -> Layer:
    match options:
        case config.Gat():
            return Attention(inputs, outputs, options.heads if joined else 1, joined, options.dropout or 0.0)
        case config.Gcn():
            return Convolution(inputs, outputs)
        case config.Sage():
            return Mean(inputs, outputs)
        case _:
            return Isomorphism(inputs, outputs)
