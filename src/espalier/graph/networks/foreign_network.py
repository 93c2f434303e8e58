"""Anybody's network over parts of a graph: rows of halo nodes are made fresh before each layer that passes messages.

Such a layer has a method `propagate`: PyG's `MessagePassing`, or one's own. It is given rows of own and halo nodes and
makes right ones for its own nodes alone; the next layer first brings those of halo nodes from their owners. `study`
finds on a small graph how many rows a network needs: layers that scale an edge by the degree of its source (GCN's)
also need the edges into halo nodes. A network whose answers over parts are still others, evaluated or in training, is
refused. Batch normalization is over the nodes of all ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from espalier.comm.base import Traffic, traffic
from espalier.graph.data import pyg
from espalier.graph.data.graph import selected
from espalier.graph.networks import layer_work
from espalier.graph.networks.base import Forms, MessageBlock
from espalier.graph.networks.network import QUANTIZED
from espalier.graph.parts import halo, partition_folder
from espalier.graph.parts.halo import ForeignRows, edges_into
from espalier.graph.run import GraphRun, NetworkAdapter
from espalier.graph.sampling.subgraphs import MESSAGES, forward
from espalier.parallel.workload import to_device
from espalier.recipe import MessagesModel as Options
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import keep_sources
from espalier.recipe.offsets import offsets_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from espalier.graph.parts.halo import Halo
    from espalier.graph.parts.partition_folder import Part
    from espalier.graph.sampling.subgraphs import View
    from espalier.recipe.cost import Work

SAMPLE, NEAR = 48, 3
"""Nodes of the small graph that a network is studied on, and how far its edges lead."""
MOVED = 0.1
"""What is added to parameters there at most: of a factor that begins as zero something is seen then."""
CLOSE = 1e-6
"""Of the largest answer: how far answers over parts may be from those of the whole, in float64."""


class ForeignMessages:
    """What the layers of a network ask for rows. Has state: the halo of the forward pass under way (None: the graph is
    whole), how many layers it has passed, and how many ranks' nodes batch normalization is over."""

    def __init__(self) -> None:
        self.halo: Halo | None = None
        self.calls = 0
        self.fetch: Callable[[Tensor], Tensor] | None = None
        """In place of the halo's exchange."""
        self.seen: list[Tensor] | None = None
        """Where rows that layers were given are kept."""
        self.rounded: Callable[[int, Tensor], Tensor] | None = None
        """Rows that are read for the n-th time in a pass, in few bits (`quantized_networks`)."""
        self.inside = False

    @contextmanager
    def over(self, halo: Halo | None) -> Iterator[None]:
        """One forward pass."""
        self.halo = halo
        self.calls = 0
        try:
            yield
        finally:
            self.halo = None

    def fresh(self, rows: Any) -> Any:
        """Rows of own nodes, then of halo nodes, as their owners have them; also of a tuple of such."""
        if isinstance(rows, tuple | list):
            return type(rows)(self.fresh(element) if isinstance(element, Tensor) else element for element in rows)
        if self.seen is not None:
            self.seen.append(rows)
        at = self.calls
        halo = self.halo
        self.calls += 1
        if self.rounded is not None:
            rows = self.rounded(at, rows)
        if halo is None or at == 0:
            return rows
        owned_rows = rows[: len(halo.owned)]
        known = halo.sources
        exchange = replace(halo, layer=at).exchange if self.fetch is None else self.fetch
        fresh_rows = exchange(owned_rows)
        return fresh_rows if len(rows) == known else torch.cat([fresh_rows, rows[known:].detach()])


def equip(model: nn.Module) -> nn.Module:
    """`model` with layers that ask for fresh rows, and with batch normalization over all ranks, in forward passes over
    parts; it computes as before in others."""
    if getattr(model, MESSAGES, None) is not None:
        return model
    messages = ForeignMessages()
    setattr(model, MESSAGES, messages)
    for module in model.modules():
        layer: Any = module
        if callable(getattr(layer, "propagate", None)):
            layer.forward = _instead(_asking, messages, layer.forward)
            layer.propagate = _instead(_propagating, messages, layer.propagate)
        elif isinstance(module, _BatchNorm):
            layer.forward = functools.partial(_normalized, messages, layer, layer.forward)
    return model


def _instead(with_: Callable[..., Any], messages: ForeignMessages, inner: Callable[..., Any]) -> Callable[..., Any]:
    """`with_(messages, inner, ...)` in place of the method `inner`, with its signature; a copy of the module has its
    own."""
    return functools.update_wrapper(functools.partial(with_, messages, inner), inner)


def _asking(messages: ForeignMessages, inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A layer's forward pass, with fresh rows."""
    if args:
        args = (messages.fresh(args[0]), *args[1:])
    elif "x" in named:
        named["x"] = messages.fresh(named["x"])
    messages.inside = True
    return inner(*args, **named)


def _propagating(messages: ForeignMessages, inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """One pass of messages; a layer that makes several has fresh rows in each."""
    rows = named.get("x")
    if not messages.inside and isinstance(rows, Tensor):
        dim = getattr(inner.__self__, "node_dim", 0)  # type: ignore[attr-defined]  # of PyG's layers
        named["x"] = messages.fresh(rows.movedim(dim, 0)).movedim(0, dim)
    messages.inside = False
    return inner(*args, **named)


# --- batch normalization ---------------------------------------------------------------------------------------------


class _Summed(torch.autograd.Function):
    """The sum over ranks; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(value, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(value: Tensor, group: Any) -> Tensor:
    total = value.detach().clone().contiguous()
    if group is not None:
        with traffic(Traffic.ACTIVATIONS):
            dist.all_reduce(total, group=group)
    return total


def _normalized(messages: ForeignMessages, norm: Any, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Batch normalization by mean and variance of own rows of all ranks, which are at least in float32."""
    halo = messages.halo
    if halo is None or messages.fetch is not None or not (norm.training or norm.running_mean is None):
        return inner(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = wide[: len(halo.owned)]
    group = halo.group
    count = _summed(rows.new_tensor(float(len(rows))), group)
    mean: Tensor = _Summed.apply(rows.sum(0), group) / count
    variance: Tensor = _Summed.apply((rows - mean).square().sum(0), group) / count
    if norm.training and norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        share = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_((variance * count / (count - 1).clamp(min=1)).to(norm.running_var.dtype), share)
    normalized = (wide - mean) * (variance + norm.eps).rsqrt()
    return (normalized if norm.weight is None else normalized * norm.weight + norm.bias).to(x.dtype)


# --- edges into halo nodes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deep:
    """A part with the edges into its halo nodes. `nodes`: int64, own nodes, halo nodes, then others that those hear
    from."""

    nodes: Tensor
    block: MessageBlock


def deepened(halo: Halo, whole: MessageBlock, wide: bool = False) -> Deep:
    """The part of `halo` in the graph `whole`, with the edges into its halo nodes; `wide`: also with those out of them,
    where each edge runs both ways."""
    whole = to_device(whole, torch.device("cpu"))
    indptr = whole.indptr.numpy()
    indices = whole.indices.numpy()
    near = halo.nodes.cpu().numpy()
    outer = halo.outer.cpu().numpy()
    ends, more = edges_into(indptr, outer)
    edges = np.concatenate([halo.edges.cpu().numpy(), more])
    beyond = np.setdiff1d(indices[more], near)
    nodes = np.concatenate([near, beyond])
    place = np.empty(whole.sources, np.int64)
    place[nodes] = np.arange(len(nodes))
    starts = halo.indptr.cpu().numpy()
    counts = [np.diff(starts), np.diff(ends)]
    if wide:
        ends, back = edges_into(indptr, beyond)
        near_sources = np.isin(indices[back], near)
        counts.append(np.add.reduceat(near_sources, ends[:-1], dtype=np.int64) if len(beyond) else ends[1:])
        edges = np.concatenate([edges, back[near_sources]])
    made = MessageBlock(
        torch.from_numpy(offsets_of(np.concatenate(counts))),
        torch.from_numpy(place[indices[edges]].astype(np.int32)),
        len(nodes),
        Forms(),
    )
    at = torch.from_numpy(edges)
    return Deep(
        torch.from_numpy(nodes),
        made._replace(
            weights=selected(whole.weights, at),
            features=selected(whole.features, at),
        ),
    )


# --- what a network needs --------------------------------------------------------------------------------------------


def study(model: nn.Module, columns: int, whole: MessageBlock) -> ForeignRows:
    """What `model`, a network for the graph `whole` of nodes with so many features, needs over parts, found on a small
    graph of our own, which is the same on all ranks. Raises UserError where its answers over parts are others."""
    rows, block = _sample(columns, whole)
    cut = halo.boundary(block.indptr, block.indices, 2 * np.arange(len(rows)) // len(rows), 2)
    part_halo = halo.Halo.of(block.indptr, block.indices, cut, 0)
    tried = _moved(copy.deepcopy(model).cpu().double().eval())
    evaluation = _Trial(tried, rows, block)
    if not evaluation.seen:
        raise UserError(
            "[graph.halo] is not possible with this network.",
            why="none of its layers has a method propagate, by which they would say where they read rows of neighbours",
            do="layers of torch_geometric.nn, or leave [graph.halo] out",
        )
    widths = tuple(layer_rows.shape[1:].numel() for layer_rows in evaluation.seen)
    deeper = [deepened(part_halo, block, wide) for wide in (False, True)[: 1 + _symmetric(whole)]]
    evaluates = False
    trained = _Trial(tried, rows, block, training=True)
    trials = [evaluation] if trained.drawn else [evaluation, trained]
    for depth, part in enumerate((Deep(part_halo.nodes, part_halo.block(block)), *deeper)):
        same = [trial.same(part.nodes, part.block._replace(halo=part_halo)) for trial in trials]
        if all(same):
            return ForeignRows(widths, depth)
        evaluates = evaluates or same[0]
    raise UserError(
        "[graph.halo] is not possible with this network.",
        why=f"{'in training, ' * evaluates}on a small graph in two parts its answers are not those on the whole: "
        "something besides its layers that pass messages looks at other nodes' rows (pooling, a norm over the graph, "
        "attention over all nodes), or scales edges that run one way by how many leave a node, as ChebConv does",
        do="leave [graph.halo] out; batch or layer norms; graph.undirected = true",
    )


def _symmetric(whole: MessageBlock) -> bool:
    """Whether each edge runs both ways."""
    sources, targets = whole.indices.cpu().numpy().astype(np.int64), whole.rows().cpu().numpy()
    nodes = whole.sources
    return whole.targets == nodes and np.array_equal(np.sort(sources * nodes + targets), targets * nodes + sources)


_DROPOUT = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
)
"""Functions of torch."""


class _WithoutDropout(TorchFunctionMode):
    """Every kind of dropout keeps all values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        if getattr(function, "__name__", "").removesuffix("_") in _DROPOUT:
            return args[0] if args else named["input"]
        return function(*args, **named)


class _Trial:
    """What a network says of all nodes of a small graph, evaluated or as in `training`, without dropout and with batch
    normalization as it is evaluated. Has state: how often it ran."""

    def __init__(self, model: nn.Module, rows: Tensor, block: MessageBlock, training: bool = False) -> None:
        self.model = copy.deepcopy(model).train(training)
        self.rows = rows
        self.training = training
        self.runs = 0
        for module in self.model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        self.answers, self.seen = self._run(rows, block, None)
        self.drawn = training and not self._close(*self._run(rows, block, None), self.answers)
        """Whether it draws something besides dropout, so that its answers cannot be compared."""

    def same(self, nodes: Tensor, part: MessageBlock) -> bool:
        """Whether its answers for own nodes of a part with the rows of `nodes` are those on the whole."""
        owned = cast("Halo", part.halo).owned
        return self._close(*self._run(self.rows[nodes], part, self.seen), self.answers[owned])

    def _close(self, answers: Tensor, asked: list[Tensor], wanted: Tensor) -> bool:
        return len(asked) == len(self.seen) and bool((answers - wanted).abs().max() <= CLOSE * wanted.abs().max())

    def _run(self, rows: Tensor, block: MessageBlock, seen: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        model = copy.deepcopy(self.model)
        self.runs += 1
        if not self.training:
            return _run(model, rows, block, seen)
        with torch.random.fork_rng(devices=[]), _WithoutDropout():
            torch.default_generator.manual_seed(self.runs)  # other numbers in each run, the same on all ranks
            return _run(model, rows, block, seen)


def row_widths(model: nn.Module, columns: int, whole: MessageBlock) -> list[int | None]:
    """Values in a row each time that a layer of `model` reads rows, in order, as it does on a small graph; None: those
    are the features themselves. Raises UserError as `study`."""
    rows, block = _sample(columns, whole)
    _, seen = _run(copy.deepcopy(model).cpu().double().eval(), rows, block, None, "[quant]")
    return [None if layer_rows is rows else layer_rows.shape[1:].numel() for layer_rows in seen]


def study_part(model: nn.Module, part: Part) -> ForeignRows:
    """As `study`, of a graph of which a part is here, with edges into its own nodes alone. Raises UserError for a
    network that needs more."""
    needs = study(model, part.features.shape[1], part.block)
    if needs.deep:
        raise UserError(
            "This network cannot train on a graph that was cut beforehand.",
            why="it scales edges by the degrees of their sources, and a part has no edges into nodes of others",
            do="the graph itself as data.path, or a network such as PyG's SAGEConv, GATConv or GINConv",
        )
    return needs


@torch.no_grad()
def _run(
    model: nn.Module, rows: Tensor, block: MessageBlock, whole: list[Tensor] | None, section: str = "[graph.halo]"
) -> tuple[Tensor, list[Tensor]]:
    """Answers for own nodes, and the rows that layers were given; those of halo nodes come from `whole`."""
    vars(model).pop(QUANTIZED, None)
    messages: ForeignMessages = getattr(equip(model), MESSAGES)
    messages.rounded = None
    messages.seen = []
    halo = cast("Halo | None", block.halo)
    if halo is not None and whole is not None:
        known = whole
        outer = halo.outer
        messages.fetch = lambda owned_rows: torch.cat([owned_rows, known[messages.calls - 1][outer]])
    try:
        return forward(model, rows, (block,)), messages.seen
    except UserError:
        raise
    except Exception as error:  # of the network's code
        raise UserError(
            f"{section} is not possible with this network: on {len(rows)} nodes it raised {type(error).__name__}.",
            why=str(error),
            do=f"a network that takes any number of nodes, or leave {section} out",
        ) from error


@torch.no_grad()
def _moved(model: nn.Module) -> nn.Module:
    """With parameters none of which is zero."""
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not is_lazy(parameter):
            parameter.add_(MOVED * torch.rand(parameter.shape, generator=draw, dtype=parameter.dtype))
    return model


def _sample(columns: int, whole: MessageBlock) -> tuple[Tensor, MessageBlock]:
    """A small graph both ways, with weights and features of edges where `whole` has them, and features from 0 to 1.
    Edges lead at most `NEAR` nodes round a ring, so that most nodes are far from a part."""
    draw = np.random.default_rng(0)
    nodes = SAMPLE
    ends = draw.integers(0, nodes, (2, 2 * nodes))
    ends[1] = (ends[0] + 1 + ends[1] % NEAR) % nodes
    both = np.unique(np.concatenate([ends, ends[::-1]], 1), axis=1)
    targets, sources = both
    indptr = offsets_of(np.bincount(targets, minlength=nodes))
    made = MessageBlock(torch.from_numpy(indptr), torch.from_numpy(sources.astype(np.int32)), nodes, Forms())
    count = len(sources)
    made = made._replace(
        weights=None if whole.weights is None else torch.from_numpy(draw.random(count)),
        features=None if whole.features is None else torch.from_numpy(draw.random((count, whole.features.shape[1]))),
    )
    return torch.from_numpy(draw.random((nodes, columns))), made


# --- what the workload asks --------------------------------------------------------------------------------------


class ForeignAdapter(NetworkAdapter):
    """Of networks of anybody's code."""

    def build(self, run: GraphRun, inputs: int, outputs: int) -> nn.Module:
        """What `model.build` makes."""
        assert isinstance(self.recipe.model, Options)
        return pyg.built(self.recipe.model, inputs, outputs, run.folder)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The network is one."""
        return [model]

    def embeddings(self, model: Any) -> Sequence[nn.Parameter]:
        """The first matrix and the last."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        return [*matrices[:1], *matrices[-1:]]

    def decisions(self, run: GraphRun, sentences: tuple[str, ...], bits: tuple[str, ...]) -> tuple[str, ...]:
        """Its bits: what it computes is not known."""
        return bits

    def work(self, run: GraphRun, micro_batch: Any, precision: str) -> Work:
        """By its parameters."""
        reach = run.batching.reach()
        times = run.batching.times(micro_batch)
        work = layer_work.foreign_work(run.bare(), reach[0], len(run.task.graph.features[0]), micro_batch, times)
        return run.rounding.work(work, run.rounding.network, reach[:1], times, precision)

    def freeze(self, run: GraphRun, folder: Path) -> None:
        """Its code."""
        assert isinstance(self.recipe.model, Options)
        keep_sources(self.recipe.model.build, folder)

    def crossing(self, run: GraphRun) -> ForeignRows:
        """Found on a small graph."""
        view = run.whole_task.train
        if view.graph.partition is None:
            return study(run.bare(), view.graph.features.shape[1], view.block)
        return study_part(run.bare(), partition_folder.any_part(view.graph.partition.folder))

    def over_parts(self, model: Any, view: View, part: Part) -> ForeignRows:
        """Layers ask for fresh rows."""
        if view.graph.partition is None:
            rows = study(model, view.graph.features.shape[1], view.block)
        else:
            rows = study_part(model, part)
        equip(model)
        return rows
