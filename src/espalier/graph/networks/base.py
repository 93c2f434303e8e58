"""One layer's edges, rows of which only k columns are kept, and the two ways to aggregate over them: the seam.

Networks know nothing of formats, kernels or ranks: they call their fields `aggregate` and `attend`, which default to
the plain forms here and are replaced when a run is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from espalier.kernels.tall_matmul import tall_product
from espalier.sparse.attention import Edges, attend_edges


class Forms:
    """What was once computed from a block's edges, by name. Has state: it fills on first use."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The thing called `name`, made now if it is not there."""
        if name not in self.known:
            self.known[name] = make()
        return self.known[name]


class Kept(NamedTuple):
    """Rows of which only k columns are not zero: values float [rows, k] at columns int64 [rows, k] of `width`."""

    values: Tensor
    columns: Tensor
    width: int

    def dense(self) -> Tensor:
        """float [rows, width], zeros where nothing was kept."""
        empty = self.values.new_zeros(len(self.values), self.width)
        return empty.scatter(1, self.columns.long(), self.values)


Rows = Tensor | Kept


class RowExchange(Protocol):
    """Brings the rows of nodes that other ranks own: `halo.Halo`."""

    def exchange(self, rows: Tensor) -> Tensor:
        """Of own nodes to those of all sources of a block."""

    def both(self, rows: Rows) -> Rows:
        """The same, of kept rows too."""

    def begin(self, rows: Rows) -> RowExchange:
        """What brings them later; they begin to travel now."""


class MessageBlock(NamedTuple):
    """The edges of one layer, by target: target t hears from `indices[indptr[t]:indptr[t + 1]]`.

    Targets are the first `len(indptr) - 1` of the `sources` nodes. The matrix is diag(left) W diag(right), each part
    1 where it is None.

    Attributes:
        indptr: int64 [targets + 1]; indices: int32 or int64 [edges], below `sources`.
        weights: float [edges]; left: float [targets]; right: float [sources].
        features: float [edges, columns], for foreign networks.
        halo: brings the rows of sources that other ranks own; None: rows are those of all sources.
        full: a graph transformer attends over all nodes in this step; recall: or along this share of the edges.
        nodes: int64 [sources], which nodes of the graph they are; None: all of them, in order.
        tokens: how the nodes are cut over ranks for a graph transformer (`torchgt.over_ranks.TokenExchange`); None: a
            layer is given all of them.
    """

    indptr: Tensor
    indices: Tensor
    sources: int
    forms: Forms
    weights: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    features: Tensor | None = None
    halo: RowExchange | None = None
    full: bool = False
    recall: float = 1.0
    nodes: Tensor | None = None
    tokens: Any = None

    @property
    def targets(self) -> int:
        """Rows of the result."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """Entries."""
        return len(self.indices)

    def rows(self) -> Tensor:
        """int64 [edges]: the target of each edge."""

        def make() -> Tensor:
            counts = self.indptr.diff()
            every = torch.arange(self.targets, device=counts.device)
            return torch.repeat_interleave(every, counts, output_size=self.edges)

        return self.forms.get(f"rows on {self.indptr.device}", make)


MessageBlocks = tuple[MessageBlock, ...]
"""Of a batch, one for each layer."""


def placement(model: nn.Module) -> dict[str, Any]:
    """Device and dtype of the parameters, as `to` takes them."""
    parameter = next(model.parameters())
    return {"device": parameter.device, "dtype": parameter.dtype}


def dense(rows: Rows) -> Tensor:
    """`rows` as a matrix."""
    return rows.dense() if isinstance(rows, Kept) else rows


def each(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    """What `change` makes of `rows`; of kept rows, of their values and of their columns."""
    if isinstance(rows, Kept):
        return Kept(change(rows.values), change(rows.columns), rows.width)
    return change(rows)


def joined(pieces: Sequence[Rows]) -> Rows:
    """One behind the other."""
    first = pieces[0]
    if isinstance(first, Kept):
        values, columns, _ = zip(*pieces, strict=True)
        return Kept(torch.cat(values), torch.cat(columns), first.width)
    return torch.cat([dense(piece) for piece in pieces])


def project(rows: Rows, weight: Tensor, start: Tensor | None = None) -> Tensor:
    """The plain form of a linear map, weight [outputs, width], added to `start` [outputs] or [rows, outputs]; it also
    takes kept rows."""
    return tall_product.reference.run(dense(rows), weight, start)


class Project(Protocol):
    """A linear map: see `project`."""

    def __call__(self, rows: Rows, weight: Tensor, start: Tensor | None = None) -> Tensor:
        """Differentiable in all three."""


class Aggregate(Protocol):
    """(block, rows of its sources [sources, width]) -> the weighted sums of its targets [targets, width], added to
    `start` [width] or [targets, width]."""

    def __call__(self, block: MessageBlock, rows: Rows, start: Tensor | None = None) -> Tensor:
        """Differentiable in `rows` and `start`."""


class Begin(Protocol):
    """Told of rows that a block will aggregate as they are, before a layer does what it can with own rows alone."""

    def __call__(self, block: MessageBlock, rows: Rows) -> MessageBlock:
        """The block to aggregate them with."""


def alone(block: MessageBlock, rows: Rows) -> MessageBlock:
    """The plain form: all rows are here."""
    return block


class GraphAttend(Protocol):
    """Graph attention over a block: see `attend`."""

    def __call__(self, block: MessageBlock, rows: Tensor, scores: tuple[Tensor, Tensor], dropout: float) -> Tensor:
        """Differentiable in `rows` and `scores`."""


def aggregate(block: MessageBlock, rows: Rows, start: Tensor | None = None) -> Tensor:
    """The plain form: diag(left) W diag(right) rows + start, by gather and `index_add`."""
    x = dense(rows)
    if block.right is not None:
        x = x * block.right[:, None]
    messages = x[block.indices]
    if block.weights is not None:
        messages = messages * block.weights[:, None]
    sums = x.new_zeros(block.targets, x.shape[1]).index_add(0, block.rows(), messages)
    sums = sums if block.left is None else sums * block.left[:, None]
    return sums if start is None else sums + start


NEGATIVE_SLOPE = 0.2
"""Of the LeakyReLU in attention scores (arXiv 1710.10903, section 2.1)."""


def attend(block: MessageBlock, rows: Tensor, scores: tuple[Tensor, Tensor], dropout: float) -> Tensor:
    """The plain form of graph attention: a softmax over each target's edges, by head.

    Args:
        block: its weights are not used.
        rows: [sources, heads, columns].
        scores: what the target [targets, heads] and the source [sources, heads] add to an edge's score.
        dropout: share of coefficients dropped, the others scaled up.

    Returns:
        [targets, heads, columns]; zeros where a target has no edge.
    """
    edges = Edges(block.rows(), block.indices, block.targets)
    return attend_edges(edges, rows, scores, NEGATIVE_SLOPE, partial(functional.dropout, p=dropout))
