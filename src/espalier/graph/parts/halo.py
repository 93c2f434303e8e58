"""Halo exchange: layers over a whole graph that is cut into parts, one for each rank.

A rank owns the nodes of its part and has the edges into them. Sources of its edges are its own nodes, then halo nodes:
those of other parts, by rank, ascending. Before a layer aggregates, each rank sends its boundary rows to the ranks that
have them as halos, one message per peer; backward sends the gradients of halo rows to their owners, which add them up
in order of rank. The layout is that of BNS-GCN (arXiv 2203.10983) and Sylvie (arXiv 2303.01277): degrees are those of
the whole graph. What crosses, and when, is the field `transport`: the plain one sends rows as they are and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic, traffic
from espalier.graph.data.graph import selected
from espalier.graph.networks.base import Aggregate, Forms, GraphAttend, Kept, MessageBlock, MessageBlocks, Rows, dense
from espalier.graph.networks.gnn import Gnn, GraphAttention
from espalier.graph.networks.network import quantizers_of
from espalier.graph.parts.coded_rows import Coding, RowSize
from espalier.kernels import row_widths
from espalier.recipe.errors import UserError
from espalier.recipe.offsets import offsets_of
from espalier.sparse.condense import condense

if TYPE_CHECKING:
    from espalier.graph.data.graph import Array

COLUMN = 4
"""Bytes of the column of a kept value (int32)."""


class Boundary(NamedTuple):
    """Who needs whose nodes: `receiver[i]` needs `node[i]`, of the part `owner[i]`; ascending in this order, once each:
    the regions of MEGA's Condense-Edge (`sparse.condense`), each cut into a message from every owner.

    Attributes:
        parts: int32 [nodes], the rank that owns each node; ranks: how many there are.
    """

    parts: Array
    ranks: int
    receiver: Array
    owner: Array
    node: Array

    @property
    def rows(self) -> Array:
        """int64 [ranks, ranks]: rows that rank i sends to rank j before a layer aggregates."""
        counts = np.bincount(self.owner * self.ranks + self.receiver, minlength=self.ranks**2)
        return counts.reshape(self.ranks, self.ranks)


def checked(parts: Any, nodes: int, ranks: int) -> Array:
    """int32 [nodes]: `parts`, the rank of each node. Raises UserError where they are of another number of nodes, or
    name a rank that is not there."""
    parts = np.asarray(parts)
    if parts.shape != (nodes,) or parts.dtype.kind not in "iu":
        raise UserError(
            f"parts is {parts.dtype}{list(parts.shape)}, and the graph has {nodes:,} nodes.",
            why="every node belongs to one part",
            do="one whole number for each node",
        )
    if not 1 <= ranks <= max(1, nodes):
        raise UserError(f"{nodes:,} nodes cannot be cut over {ranks} ranks.", do=f"1 to {max(1, nodes)} ranks")
    outside = np.flatnonzero((parts < 0) | (parts >= ranks))
    if len(outside):
        raise UserError(
            f"parts has {int(parts[outside[0]])} for node {int(outside[0])}, and there are {ranks} ranks.",
            why=f"{len(outside):,} nodes are in no part",
            do=f"parts from 0 to {ranks - 1}",
        )
    return parts.astype(np.int32)


def boundary(indptr: Any, indices: Any, parts: Any, ranks: int) -> Boundary:
    """Of a graph whose node v hears from `indices[indptr[v]:indptr[v + 1]]`, cut into `parts` [nodes], 0 .. ranks-1. A
    rank may own no node. Raises UserError for parts that do not cover the graph, and for more ranks than nodes."""
    indptr = np.asarray(indptr, np.int64)
    indices = np.asarray(indices, np.int64)
    parts = checked(parts, len(indptr) - 1, ranks)
    plan = condense(indptr, indices, parts)
    receiver = np.repeat(np.arange(plan.parts), np.diff(plan.bounds))
    owner = parts[plan.regions].astype(np.int64)
    order = np.lexsort((owner, receiver))  # stable: nodes ascend in a region
    return Boundary(parts, ranks, receiver[order], owner[order], plan.regions[order])


def edges_into(indptr: Array, nodes: Array) -> tuple[Array, Array]:
    """int64 [nodes + 1] and [edges]: where the edges into each of `nodes` begin, and their places in the graph."""
    counts = np.diff(indptr)[nodes]
    ends = offsets_of(counts)
    return ends, np.repeat(indptr[nodes] - ends[:-1], counts) + np.arange(ends[-1])


class ForeignRows(NamedTuple):
    """What crosses when a network that is not ours runs over parts (`foreign_network.study`).

    Attributes:
        widths: values in a row that each layer reads; the first one's rows are there from the beginning.
        deep: 1: edges into halo nodes are needed; 2: also those out of them.
    """

    widths: tuple[int, ...]
    deep: int


class Crossing(NamedTuple):
    """Which rows cross: those that `layer` reads, or (`backward`) their gradients."""

    layer: int
    backward: bool


Arrival = Callable[[], None]
"""Waits for rows, and puts them where they belong."""


class Transport(Protocol):
    """How rows cross. Later ones encode them by layer, peer and direction, or give those of the epoch before."""

    def __call__(self, halo: Halo, sent: Tensor, received: Tensor, crossing: Crossing) -> Arrival:
        """Begins to send `sent`, by peer as `halo.leaving(crossing)` counts its rows. What is returned fills
        `received`, by peer as `halo.arriving(crossing)` counts. All ranks call both alike."""


def synchronous(halo: Halo, sent: Tensor, received: Tensor, crossing: Crossing) -> Arrival:
    """The plain transport: one message per peer, as it is, and a wait for all of them."""
    with traffic(Traffic.HALO):
        counts = halo.arriving(crossing), halo.leaving(crossing)
        work = dist.all_to_all_single(received, sent, *counts, group=halo.group, async_op=True)

    def arrive(message: Tensor = sent) -> None:
        """`message` is referenced until it has left."""
        work.wait()

    return arrive


@dataclass(frozen=True, eq=False)
class Halo:
    """A graph that is cut over ranks, as one of them sees it. Immutable.

    Attributes:
        owned: int64, the nodes of this rank, ascending; outer: int64, its halo nodes, by rank, then ascending.
        sends: for each peer, int64 positions among `owned`; receives: for each peer, how many of `outer` it owns.
        edges: int64, the places of this rank's edges in the whole graph; indptr, indices: its edges by target, sources
            numbered as `owned`, then `outer`, ascending in each row.
        group: of the ranks; None: this one is alone.
        layer: that the next exchange is for; transport: what it goes through.
        sums: makes the rows that leave of own rows, a SciPy matrix [leaving, owned] (`partial_sums`); None: they are
            those of `sends`.
        degrees: int64 [owned], in-degrees in the whole graph, where sums stand for edges; None: those of `indptr`.
        coding: of rows that are codes times steps, so that codes cross; None: rows cross as they are.
        mention: what messages call a node; by default its number in the graph as it was cut (`Graph.mention`).
    """

    owned: Tensor
    outer: Tensor
    sends: tuple[Tensor, ...]
    receives: tuple[int, ...]
    edges: Tensor
    indptr: Tensor
    indices: Tensor
    group: dist.ProcessGroup | None = None
    layer: int = 0
    transport: Transport = synchronous
    sums: Any = None
    degrees: Tensor | None = None
    coding: Coding | None = None
    mention: Callable[[int], str] = "node {}".format

    @classmethod
    def of(cls, indptr: Any, indices: Any, cut: Boundary, rank: int, group: dist.ProcessGroup | None = None) -> Halo:
        """What `rank` sees of the graph that `cut` was made of. Raises UserError for a group of another size."""
        size = 1 if group is None else group.size()
        if group is not None and size != cut.ranks:
            raise UserError(f"{cut.ranks} parts are not for a group of {size} ranks.", do=f"boundary(..., {size})")
        indptr = np.asarray(indptr, np.int64)
        indices = np.asarray(indices, np.int64)
        owned = np.flatnonzero(cut.parts == rank)
        needed = cut.receiver == rank
        outer = cut.node[needed]
        place = np.empty(len(cut.parts), np.int64)  # read only at the nodes that are written
        place[owned] = np.arange(len(owned))
        place[outer] = len(owned) + np.arange(len(outer))
        asked = [cut.node[(cut.receiver == peer) & (cut.owner == rank)] for peer in range(cut.ranks)]
        ends, edges = edges_into(indptr, owned)
        local = place[indices[edges]]
        order = np.lexsort((local, np.repeat(np.arange(len(owned)), np.diff(ends))))
        return cls(
            torch.from_numpy(owned),
            torch.from_numpy(outer),
            tuple(torch.from_numpy(place[nodes]) for nodes in asked),
            tuple(np.bincount(cut.owner[needed], minlength=cut.ranks).tolist()),
            torch.from_numpy(edges[order]),
            torch.from_numpy(ends),
            torch.from_numpy(local[order]),
            group,
        )

    @property
    def rank(self) -> int:
        """This one among the ranks."""
        return 0 if self.group is None else self.group.rank()

    @property
    def sources(self) -> int:
        """Own and halo nodes."""
        return len(self.owned) + len(self.outer)

    @property
    def nodes(self) -> Tensor:
        """int64 [sources]: the ids of own nodes, then of halo nodes."""
        return torch.cat([self.owned, self.outer])

    @cached_property
    def leaves(self) -> Tensor:
        """int64: positions among `owned` of the rows for all peers."""
        return torch.cat(self.sends)

    @cached_property
    def _products(self) -> dict[tuple[Any, bool], Any]:
        """Of `matrix`."""
        return {}

    def matrix(self, dtype: Any, transposed: bool = False) -> Any:
        """`sums` by rows in a NumPy dtype, made once."""
        if (dtype, transposed) not in self._products:
            matrix = self.sums.T.tocsr() if transposed else self.sums
            self._products[dtype, transposed] = matrix.astype(dtype, copy=False)
        return self._products[dtype, transposed]

    def to(self, device: torch.device | str) -> Halo:
        """The same with its tensors on `device`, where the rows are that it exchanges."""
        named = {name: getattr(self, name).to(device) for name in ("owned", "outer", "edges", "indptr", "indices")}
        return replace(self, sends=tuple(rows.to(device) for rows in self.sends), **named)

    def leaving(self, crossing: Crossing) -> list[int]:
        """Rows for each peer."""
        return list(self.receives) if crossing.backward else [len(rows) for rows in self.sends]

    def arriving(self, crossing: Crossing) -> list[int]:
        """Rows from each peer."""
        return self.leaving(crossing._replace(backward=not crossing.backward))

    def exchange(self, rows: Tensor) -> Tensor:
        """Rows of own nodes [owned, ...] to those of own and halo nodes [sources, ...]. Differentiable; all ranks call
        it alike, and go backward through it alike. Raises UserError for another number of rows, and for NaN from a
        peer."""
        return dense(self.begin(rows).both(rows))

    def check(self, received: Tensor) -> None:
        """Raises UserError for the first of the halo rows [outer, ...] that has NaN, by its node and owner."""
        if not received.is_floating_point() or not received.sum().isnan():
            return
        bad = received.flatten(1).isnan().any(1).nonzero()
        if not len(bad):  # infinities of both signs
            return
        at = int(bad[0])
        owner = int(np.searchsorted(np.cumsum(self.receives), at, side="right"))
        node = int(self.outer[at])
        what = f"the row of {self.mention(node)}, which rank {owner} owns"
        if (self.owned == node).any():
            what = f"a sum for {self.mention(node)}, from rank {owner}"
        raise UserError(
            f"Rank {self.rank} received NaN for layer {self.layer + 1}: {what}.",
            why=f"{len(bad):,} of {len(received):,} rows have it, and sums over neighbours would spread it",
            do="look at the node's features; where they are finite, a smaller learning rate",
        )

    def both(self, rows: Rows) -> Rows:
        """As `exchange`; of kept rows (MaxK) values and columns cross, a message each."""
        return self.begin(rows).both(rows)

    def begin(self, rows: Rows) -> Begun:
        """Sends what others need of own rows; the gradients of halo rows are waited for when those of own rows are all
        there. So what is computed of own rows between this and `Begun.both` is computed while rows travel, both ways.
        Raises UserError for another number of rows."""
        count = len(rows.values if isinstance(rows, Kept) else rows)
        if count != len(self.owned):
            raise UserError(
                f"This rank owns {len(self.owned):,} nodes, and there are {count:,} rows.",
                do="one row for each of halo.owned",
            )
        if self.group is None:
            return Begun(rows, ())
        tensors = [rows.values, rows.columns.int()] if isinstance(rows, Kept) else [rows]
        return Begun(rows, tuple((_Leave.apply(tensor, trip), trip) for tensor in tensors if (trip := _Trip(self))))

    def block(self, whole: MessageBlock) -> MessageBlock:
        """The edges into own nodes, with the scales they have in the `whole` graph. A layer is given the rows of own
        and halo nodes."""
        made = MessageBlock(self.indptr, self.indices.to(whole.indices.dtype), self.sources, Forms())
        return made._replace(
            weights=selected(whole.weights, self.edges),
            left=selected(whole.left, self.owned),
            right=selected(whole.right, self.nodes),
            features=selected(whole.features, self.edges),
        )

    def blocks(self, whole: MessageBlock, depth: int) -> MessageBlocks:
        """One for each of `depth` layers: see `by_layer`."""
        return self.by_layer(self.block(whole), depth)

    def by_layer(self, first: MessageBlock, depth: int) -> MessageBlocks:
        """The block of this rank for each of `depth` layers. The first reads own and halo rows, which do not change;
        others are given own rows, and an equipped layer exchanges what it aggregates."""
        return (first, *(first._replace(halo=replace(self, layer=layer)) for layer in range(1, depth)))


class _Trip:
    """Rows under way, or their gradients. Has state."""

    def __init__(self, halo: Halo) -> None:
        self.halo = halo
        self.rows = self.gradients = torch.zeros(0)
        self.arrive: Arrival = _nothing

    def taken(self) -> tuple[Tensor, Tensor]:
        """Rows and gradients, which have arrived and are let go: who keeps rows of its own graph is never freed."""
        self.arrive()
        rows_and_gradients = (self.rows, self.gradients)
        self.arrive = _nothing
        self.rows = self.gradients = torch.zeros(0)
        return rows_and_gradients

    def home(self, gradients: Tensor) -> Tensor:
        """Gradients of own rows with those that others have of them."""
        halo = self.halo
        total = gradients.clone()
        _, received = self.taken()
        if halo.sums is not None:
            return total + _product(halo, received, transposed=True)
        counts = halo.arriving(Crossing(halo.layer, backward=True))
        for rows, part in zip(halo.sends, received.split(counts), strict=True):
            total.index_add_(0, rows, part)  # a node is there once: the same bits on any device
        return total


def _nothing() -> None:
    """Nothing is under way."""


class Begun(NamedTuple):
    """Own rows whose boundary is under way: see `Halo.begin`."""

    given: Rows
    sent: tuple[tuple[Tensor, _Trip], ...]

    def both(self, rows: Rows) -> Rows:
        """Own and halo rows; `rows` are those that were sent."""
        assert rows is self.given, "other rows were sent"
        if not self.sent:
            return rows
        tensors: list[Tensor] = [_Arrive.apply(tensor, trip) for tensor, trip in self.sent]
        return Kept(tensors[0], tensors[1], rows.width) if isinstance(rows, Kept) else tensors[0]

    def exchange(self, rows: Tensor) -> Tensor:
        """As `both`."""
        return dense(self.both(rows))

    def begin(self, rows: Rows) -> Begun:
        """They have begun."""
        return self


class _Leave(torch.autograd.Function):
    """Own rows, which leave; backward waits for the gradients of halo rows, and adds them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        halo = trip.halo
        owned = len(rows)
        trip.rows = rows.new_empty(halo.sources, *rows.shape[1:])
        trip.rows[:owned] = rows
        crossing = Crossing(halo.layer, False)
        leaving = leaving_rows(halo, rows)
        if halo.coding is not None and rows.is_floating_point():
            trip.arrive = send_codes(halo, halo.coding, leaving, trip.rows[owned:], crossing)
        else:
            trip.arrive = halo.transport(halo, leaving, trip.rows[owned:], crossing)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.home(gradients[0]), None


class _Arrive(torch.autograd.Function):
    """Own rows to own and halo rows; backward sends the gradients of halo rows home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        made, _ = trip.taken()
        trip.halo.check(made[len(rows) :])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        gradient = gradients[0].contiguous()
        halo = ctx.trip.halo
        owned = len(halo.owned)
        crossing = Crossing(halo.layer, backward=True)
        trip.gradients = gradient.new_empty(sum(halo.arriving(crossing)), *gradient.shape[1:])
        trip.arrive = halo.transport(halo, gradient[owned:], trip.gradients, crossing)
        return gradient[:owned], None


def send_codes(halo: Halo, coding: Coding, leaving: Tensor, received: Tensor, crossing: Crossing) -> Arrival:
    """As `halo.transport(halo, leaving, received, crossing)`, in codes. Raises UserError: NaN, by the row's node."""
    bad = leaving.isnan().any(1).nonzero()
    if len(bad):
        raise not_finite(halo, crossing, int(bad[0]), "codes cannot say that")
    size = coding.size(leaving.shape[1], leaving.element_size())
    lines = coding.encoded(leaving, coding.steps[halo.leaves] if coding.by_row else coding.steps)
    wire = _longer(halo, size.steps)
    if size.steps:
        room = size.steps * size.bytes
        last = torch.nn.functional.pad(coding.steps, (0, room - len(coding.steps))).view(size.steps, size.bytes)
        parts = lines.split(halo.leaving(crossing))
        lines = torch.cat([torch.cat([part, last]) if len(part) else part for part in parts])
    arriving = lines.new_empty(sum(wire.receives), size.bytes)
    done = halo.transport(wire, lines, arriving, crossing)

    def arrive() -> None:
        done()
        parts = zip(arriving.split(list(wire.receives)), received.split(list(halo.receives)), strict=True)
        for part, out in parts:
            if len(out):
                coding.decode(part[: len(out)], part[len(out) :].flatten()[: len(coding.steps)], out)

    return arrive


def _longer(halo: Halo, rows: int) -> Halo:
    """With so many rows more in each message that is not empty."""
    if not rows:
        return halo

    def longer(ids: Tensor) -> Tensor:
        return torch.cat([ids, ids[-1:].repeat(rows)])

    receives = tuple(count + rows if count else 0 for count in halo.receives)
    outer = torch.cat([longer(ids) for ids in halo.outer.split(list(halo.receives))])
    return replace(halo, sends=tuple(map(longer, halo.sends)), receives=receives, outer=outer)


def not_finite(halo: Halo, crossing: Crossing, at: int, why: str) -> UserError:
    """Of the row at place `at` of those that leave."""
    nodes = halo.outer if crossing.backward else halo.owned[halo.leaves]
    what = "gradient" if crossing.backward else "row"
    return UserError(
        f"Rank {halo.rank} cannot send the {what} of "
        f"{halo.mention(int(nodes[at]))} for layer {crossing.layer + 1}: it is not finite.",
        why=why,
        do="look at the node's features; where they are finite, a smaller learning rate",
    )


def leaving_rows(halo: Halo, rows: Tensor) -> Tensor:
    """Of own rows [owned, ...] those, or the sums of those, that leave, by peer. Raises UserError for sums of rows that
    are not finite, by the first such node."""
    if halo.sums is None:
        return rows.index_select(0, halo.leaves)
    made = _product(halo, rows)
    if made.is_floating_point() and not made.sum().isfinite():
        read = torch.from_numpy(np.unique(halo.sums.indices)).long()
        bad = read[~rows.detach().flatten(1)[read.to(rows.device)].isfinite().all(1).cpu()]
        if len(bad):
            raise UserError(
                f"Rank {halo.rank} cannot send sums with the row of "
                f"{halo.mention(int(halo.owned[bad[0]]))} for layer {halo.layer + 1}: it is not finite.",
                why=f"{len(bad):,} of {len(read):,} rows that others need are not",
                do="look at the node's features; where they are finite, a smaller learning rate",
            )
    return made


def _product(halo: Halo, rows: Tensor, transposed: bool = False) -> Tensor:
    """`halo.sums` (`transposed`) times `rows` [columns, ...], in float64 for that and in float32 for others, on the
    CPU."""
    flat = rows.detach().flatten(1).to("cpu", torch.promote_types(rows.dtype, torch.float32)).numpy()
    made = torch.from_numpy(np.ascontiguousarray(halo.matrix(flat.dtype, transposed) @ flat))
    return made.view(-1, *rows.shape[1:]).to(rows.device, rows.dtype)


def degree_shares(halo: Halo) -> tuple[Tensor, Tensor]:
    """uint8 by row that leaves forward, and backward: 256 times the share of the rows for the same peer whose nodes
    have a lower in-degree in the whole graph (ties in order). A sum counts as the node of the highest degree that it
    has a row of. All ranks call it alike; owners tell the others once."""
    degrees = leaving_degrees(halo).split([len(rows) for rows in halo.sends])
    leaving = torch.cat([torch.from_numpy(row_widths.shares(peer_degrees.numpy())) for peer_degrees in degrees])
    forward = Crossing(0, backward=False)
    others = torch.empty(sum(halo.receives), dtype=torch.uint8)
    with traffic(Traffic.HALO):
        dist.all_to_all_single(others, leaving, halo.arriving(forward), halo.leaving(forward), group=halo.group)
    return leaving, others


def leaving_degrees(halo: Halo) -> Tensor:
    """int64: of the rows that leave forward, see `degree_shares`."""
    degrees = (halo.indptr.diff() if halo.degrees is None else halo.degrees).cpu()
    if halo.sums is None or not halo.sums.nnz:
        return degrees[halo.leaves.cpu()]
    return torch.from_numpy(np.maximum.reduceat(degrees.numpy()[halo.sums.indices], halo.sums.indptr[:-1]))


def equip(model: nn.Module) -> nn.Module:
    """`model` with layers that exchange rows before they aggregate, where their block is cut over ranks."""
    if isinstance(model, Gnn):
        for layer in model.layers:
            inner = getattr(layer, "quantized", None)  # rows are quantized before they cross
            if inner is None:
                layer.aggregate, layer.attend = _aggregating(layer.aggregate), _attending(layer.attend)
                layer.begin = _begun
            else:
                inner.plain, inner.attention = _aggregating(inner.plain), _attending(inner.attention)
    return model


def _begun(block: MessageBlock, rows: Rows) -> MessageBlock:
    """Rows leave before the layer needs those of others."""
    return block if block.halo is None else block._replace(halo=block.halo.begin(rows))


def _aggregating(inner: Aggregate) -> Aggregate:
    def aggregate(block: MessageBlock, rows: Rows, start: Tensor | None = None) -> Tensor:
        return inner(block, rows if block.halo is None else block.halo.both(rows), start)

    return aggregate


def _attending(inner: GraphAttend) -> GraphAttend:
    def attend(block: MessageBlock, rows: Tensor, scores: tuple[Tensor, Tensor], dropout: float) -> Tensor:
        if block.halo is None:
            return inner(block, rows, scores, dropout)
        heads, columns = rows.shape[1:]
        both = block.halo.exchange(torch.cat([rows.flatten(1), scores[1]], 1))  # one message for rows and scores
        values = both[:, : heads * columns].unflatten(1, (heads, columns))
        return inner(block, values, (scores[0], both[:, heads * columns :]), dropout)

    return attend


def depth(network: Gnn | ForeignRows) -> int:
    """Layers that read rows of neighbours."""
    return len(network.layers if isinstance(network, Gnn) else network.widths)


def row_bytes(network: Gnn | ForeignRows, at: int, size: int) -> tuple[int, int]:
    """Bytes of a boundary row of layer `at`, forward and backward, for values of `size` bytes. Nothing crosses for the
    first: its halo rows are there from the beginning."""
    if at == 0:
        return 0, 0
    if isinstance(network, ForeignRows):
        return (same := size * network.widths[at]), same
    layer = network.layers[at]
    if isinstance(layer, GraphAttention):
        return (both := size * layer.heads * (layer.columns + 1)), both
    if network.options.activation == "maxk":
        assert network.options.k is not None
        return network.options.k * (size + COLUMN), network.options.k * size
    return (bytes_of_row := size * min(layer.inputs, layer.outputs)), bytes_of_row


def step_bytes(network: Gnn | ForeignRows, rows: Array, size: int) -> Array:
    """int64 [ranks]: payload bytes that leave each rank in a step, given `Boundary.rows`: the ledger's row `halo`."""
    each = [row_bytes(network, at, size) for at in range(depth(network))]
    return rows.sum(1) * sum(forward for forward, _ in each) + rows.sum(0) * sum(backward for _, backward in each)


def crossing_codes(network: Gnn | ForeignRows, at: int, size: int) -> RowSize | None:
    """See `Quantizers.row_size`; None where a network does not round."""
    quantizers = quantizers_of(network)
    return None if quantizers is None or not isinstance(network, Gnn) else quantizers.row_size(network, at, size)
