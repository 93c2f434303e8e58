"""The networks on graphs: their options, what a recipe leaves open of them, and what they refuse. Imports no torch."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
from msgspec import field

from espalier.recipe import units
from espalier.recipe.base import Draft, Model, ModelKind, RecipeBase
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.sections import GraphOptions, HaloOptions, Quant, Stable, Store, Uniform


class Network(Model, frozen=True):
    """What the graph networks share: `depth` layers of message passing, from features to classes.

    `width` columns between layers; `activation = "maxk"` keeps the `k` largest of them in each row (MaxK-GNN).
    """

    depth: int | None = None
    width: int | None = None
    activation: Literal["relu", "elu", "maxk"] | None = None
    k: int | None = None
    dropout: float | None = None
    norm: bool | None = False


class Gcn(Network, frozen=True, tag="gcn"):
    """Graph convolution with symmetric normalisation (arXiv 1609.02907)."""


class Sage(Network, frozen=True, tag="sage"):
    """GraphSAGE with the mean of the neighbours (arXiv 1706.02216)."""


class Gat(Network, frozen=True, tag="gat"):
    """Graph attention (arXiv 1710.10903); `heads` share the width."""

    heads: int = 8


class Gin(Network, frozen=True, tag="gin"):
    """Graph isomorphism network (arXiv 1810.00826): sums and two-layer perceptrons; `norm` is inside these as well."""

    norm: bool | None = None


Encoding = Literal["degree", "laplacian", "random-walk"]


class GraphTransformer(Model, frozen=True, tag="graph-transformer"):
    """A transformer whose tokens are nodes (TorchGT, arXiv 2407.14106): attention along edges, in some steps over all.

    `encodings` are columns beside the features: the logarithm of the degree, `encoding_size` eigenvectors of the
    Laplacian, returns of `encoding_size` steps of a random walk. `distance`: scores have a learned bias for each number
    of hops up to it (Graphormer, arXiv 2106.05234). `virtual` tokens attend to all and all to them, `expander` random
    permutations add edges (Exphormer, arXiv 2303.06147), `path` joins each node and the next. `local`: features are
    averages over up to so many hops (S²GC, ICLR 2021), whose linear map the layers correct: for few labels. `recall`:
    steps may leave edges out down to this share (1: none), which follows how fast the loss changes. `attention`: along
    the edges (`sparse`), over all in each `interleave`-th step (`interleaved`) or in all of them (`full`).
    """

    depth: int | None = None
    width: int | None = None
    heads: int | None = None
    feed_forward: int | None = None
    dropout: float | None = None
    encodings: tuple[Encoding, ...] = ()
    encoding_size: int = 8
    distance: int = 0
    virtual: int = 1
    expander: int = 0
    path: bool = False
    local: int = 0
    attention: Literal["auto", "sparse", "interleaved", "full"] = "auto"
    interleave: int = 5
    recall: float = 1.0


class MessagesModel(Model, frozen=True, tag="messages"):
    """Anybody's PyG network: `build = "package.module:function"` is called with (features, classes, **arguments)."""

    build: str
    arguments: dict[str, bool | int | float | str] = field(default_factory=dict)


# --- what is left open ----------------------------------------------------------------------------------------------

VALIDATION_COST = 1 / 3
"""Of a training step on the whole graph: a forward pass over it, without the backward pass (twice a forward)."""

_TABLES = data_table(__file__)
_WARMUP = (0.2, "sums grow with degrees: early steps at the full rate end all activity of GIN's ReLUs")
"""The default share of steps in which the rate of GIN rises."""


def _fill(draft: Draft) -> None:
    """Sizes, steps and rates of a graph network."""
    if draft.recipe.graph is None:
        draft.recipe = draft.recipe.changed(graph=GraphOptions())
    graph, model = draft.recipe.graph, draft.recipe.model
    assert graph is not None
    if isinstance(model, Network):
        _network(draft, type(model).__struct_config__.tag, graph)
    if isinstance(model, GraphTransformer):
        _transformer(draft)
    draft.fill("train.sequence", 1, "one target (node, link or graph) counts as one token")
    whole = not graph.fanouts and graph.task == "node"
    if not whole:
        draft.fill("train.batch_tokens", 1024 if graph.task != "graph" else 64, f"{graph.task}s per step, as is usual")
    steps = (200, "as many passes as GCN's authors make (arXiv 1609.02907, section 5.2)")
    draft.fill("train.steps", *(steps if whole else (1000, "the size of the data is not known here: a thousand steps")))
    draft.fill("train.optimizer.weight_decay", *_TABLES["decays"][graph.task])
    if isinstance(draft.get("train.schedule"), Stable):
        draft.fill("train.schedule.warmup", *_WARMUP)
    draft.rates(0.01, "the rate of GCN's authors (arXiv 1609.02907, section 5.2)")


def _transformer(draft: Draft) -> None:
    source = "GPH_slim (arXiv 2407.14106, section 4.1)"
    local, few = draft.get("model.local"), "few labels: as GCN's (arXiv 1609.02907, section 5.2)"
    source_of_one = "few labels: one layer of attention, as SGFormer has (arXiv 2306.10759)"
    draft.fill("model.depth", *((1, source_of_one) if local else (4, source)))
    draft.fill("model.width", 64, source)
    draft.fill("model.heads", 8 if draft.get("model.width") % 8 == 0 else 1, source)
    draft.fill("model.feed_forward", draft.get("model.width"), source)
    draft.fill("model.dropout", *((0.5, few) if local else (0.3, source)))


def _network(draft: Draft, kind: Any, graph: GraphOptions) -> None:
    depth, width, activation, dropout = _TABLES["papers"][kind]
    source = _TABLES["sources"][kind]
    if graph.fanouts:
        draft.fill("model.depth", len(graph.fanouts), "one layer for each entry of graph.fanout")
    draft.fill("model.depth", depth, source)
    draft.fill("model.width", width, source)
    draft.fill("model.activation", "maxk" if draft.get("model.k") is not None else activation, source)
    draft.fill("model.dropout", dropout, source)
    if kind == "gin":
        draft.fill("model.norm", *_TABLES["norms"][graph.task])
    if draft.get("model.activation") == "maxk":
        eighth = max(1, draft.get("model.width") // 8)
        draft.fill("model.k", eighth, "width / 8, MaxK-GNN's example (32 of 256, arXiv 2312.08656)")


# --- limits ------------------------------------------------------------------------------------------------------


def _check(recipe: RecipeBase) -> None:
    model, graph = recipe.model, recipe.graph
    if isinstance(model, Network):
        _width(model)
    if isinstance(model, GraphTransformer):
        _attention(model)
    if graph is not None:
        _graph(graph, model)
        _precision(graph.halo or HaloOptions(), recipe.train.precision)
    if recipe.store is not None:
        _store(recipe.store, graph or GraphOptions())
    if recipe.quant is not None:
        _quant(recipe.quant, model, graph or GraphOptions())
    if len(recipe.data) > 1:
        raise UserError(f"A graph recipe has one [data] table; this one has {len(recipe.data)}.", do="keep one of them")
    if recipe.train.recompute not in (None, "none"):
        raise UserError(f"train.recompute = {recipe.train.recompute!r} is not possible for a graph.", do='"none"')


def _width(model: Network) -> None:
    width, k = model.width, model.k
    if k is not None and k < 1:
        raise UserError(f"model.k = {k} keeps nothing.", why="it has to be above 0", do="model.k = 8")
    if k is not None and width is not None and k > width:
        raise UserError(
            f"model.k = {k} is larger than the width.",
            why=f"model.width = {width}",
            do=f"model.k = {max(1, width // 8)}",
        )
    if k is not None and model.activation not in (None, "maxk"):
        raise UserError(
            f'model.k = {k} belongs to model.activation = "maxk", not {model.activation!r}.', do="give one of them"
        )
    if isinstance(model, Gat):
        if model.heads < 1 or (width and width % model.heads):
            raise UserError(
                f"model.heads = {model.heads} does not divide model.width = {width}.", do="model.heads = 8, width = 64"
            )
        if model.activation == "maxk":
            raise UserError(
                'model.activation = "maxk" is not possible with model.kind = "gat".',
                why="attention weighs every column of a neighbour",
                do='model.kind = "sage", "gcn" or "gin"',
            )


def _attention(model: GraphTransformer) -> None:
    if model.width and model.heads and model.width % model.heads:
        raise UserError(
            f"model.heads = {model.heads} does not divide model.width = {model.width}.", do="model.heads = 1"
        )
    least = {"virtual": 0, "expander": 0, "distance": 0, "local": 0, "encoding_size": 1, "interleave": 2, "heads": 1}
    for name, lowest in least.items():
        value = getattr(model, name)
        if value is not None and value < lowest:
            raise UserError(f"model.{name} = {value} is not possible.", do=f"model.{name} = {lowest} or more")
    if not 0 < model.recall <= 1 or (model.recall < 1 and model.attention == "full"):
        raise UserError(
            f"model.recall = {model.recall} is not possible with model.attention = {model.attention!r}.",
            why="it is the least share of the edges that steps along them keep",
            do="model.recall = 0.9",
        )
    if len(set(model.encodings)) < len(model.encodings):
        raise UserError(f"model.encodings = {list(model.encodings)} names one twice.", do="each once")


def _graph(graph: GraphOptions, model: Model) -> None:
    if any(fanout < 1 and fanout != -1 for fanout in graph.fanouts):
        raise UserError(
            f"graph.fanout = {list(graph.fanouts)} is not possible.",
            why="each entry is a number of neighbours above 0, or -1 for all",
            do="graph.fanout = [10, 10]",
        )
    depth = model.depth if isinstance(model, Network) else None
    if graph.fanouts and depth is not None and depth != len(graph.fanouts):
        raise UserError(
            f"graph.fanout = {list(graph.fanouts)} has {len(graph.fanouts)} entries for model.depth = {depth} layers.",
            do="one entry for each layer",
        )
    if min(graph.split) < 0 or graph.split[0] <= 0 or abs(sum(graph.split) - 1) > 1e-6:
        raise UserError(
            f"graph.split = {list(graph.split)} is not possible.",
            why="the shares of training, validation and test must add up to 1, and training needs some",
            do="graph.split = [0.6, 0.2, 0.2]",
        )
    if graph.negatives < 1:
        raise UserError(f"graph.negatives = {graph.negatives} is not possible.", do="graph.negatives = 1")
    if graph.fanout == "auto" and graph.task != "node":
        raise UserError(
            f'graph.fanout = "auto" is not possible with graph.task = {graph.task!r}.',
            why="it is chosen between parts of the whole graph and drawn batches, and parts train on nodes",
            do="graph.fanout = [10, 10]",
        )
    if graph.task == "graph" and graph.fanout:
        raise UserError(
            'graph.fanout is not possible with graph.task = "graph".',
            why="each small graph is taken whole",
            do="leave graph.fanout out",
        )
    if graph.target is not None and graph.task == "link":
        raise UserError(
            f"graph.target = {graph.target!r} is not possible with graph.task = 'link'.",
            why="links are predicted from the edges, and labels are not read",
            do='graph.task = "node" or "graph", or leave graph.target out',
        )
    if graph.halo is not None:
        _halo(graph.halo, graph, model)
    if graph.task == "graph" and graph.inductive:
        raise UserError("graph.inductive has no effect when whole graphs are held out.", do="leave it out")


def _halo(halo: HaloOptions, graph: GraphOptions, model: Model) -> None:
    if graph.task != "node" or graph.fanouts:
        raise UserError(
            f"[graph.halo] is not possible with graph.task = {graph.task!r} and graph.fanout = {list(graph.fanouts)}.",
            why="the whole graph is cut into parts, and each rank trains on the nodes of its own",
            do='graph.task = "node" without graph.fanout, or leave [graph.halo] out',
        )
    if isinstance(model, GraphTransformer):
        if halo != HaloOptions():
            raise UserError(
                "[graph.halo] has no options for a graph transformer.",
                why="its ranks exchange queries, keys and values, as they are and in every step",
                do="[graph.halo] without options",
            )
        return
    _halo_options(halo, isinstance(model, Network) and model.activation == "maxk")


def _halo_options(halo: HaloOptions, maxk: bool) -> None:
    if halo.synchronize < 0:
        raise UserError(f"graph.halo.synchronize = {halo.synchronize} is below 0.", do="graph.halo.synchronize = 1")
    if halo.bits == "auto" and (halo.by_degree or halo.adapt or halo.delta):
        raise UserError(
            'graph.halo.bits = "auto" is not possible with by_degree, adapt and delta.',
            why="it gives all rows for a peer the bits that the link to it carries",
            do="graph.halo.bits = 1",
        )
    if (halo.by_degree or halo.adapt) and halo.bits == WHOLE:
        raise UserError(
            f"graph.halo.{'by_degree' if halo.by_degree else 'adapt'} has no effect when values cross as they are.",
            why=f"graph.halo.bits = {WHOLE}",
            do="graph.halo.bits = 1",
        )
    if halo.by_degree and not halo.adapt and halo.bits == MOST:
        raise UserError(
            f"graph.halo.by_degree has no effect with graph.halo.bits = {MOST}.",
            why=f"rows of nodes with more neighbours have more bits, up to {MOST}",
            do="graph.halo.bits = 4",
        )
    if halo.staleness < 1 or (halo.staleness > 1 and halo.synchronize == 1):
        setting = f"graph.halo.synchronize = {halo.synchronize}"
        raise UserError(
            f"graph.halo.staleness = {halo.staleness} is not possible with {setting}.",
            why="it is how many steps old rows may be, at least 1, in steps that do not wait for fresh ones",
            do="graph.halo.staleness = 1" if halo.synchronize == 1 else "graph.halo.staleness = 2",
        )
    if halo.delta and (halo.bits == WHOLE or halo.adapt):
        raise UserError(
            f"graph.halo.delta is not possible with graph.halo.bits = {halo.bits}{' and adapt' * halo.adapt}.",
            why="values that cross as they are lose nothing that could be sent later",
            do="graph.halo.bits = 1, without adapt",
        )
    if halo.delta and maxk:
        raise UserError(
            'graph.halo.delta is not possible with model.activation = "maxk".',
            why="kept values are of other columns in each step",
            do="graph.halo.delta = false",
        )
    if halo.synchronize != 1 and maxk:
        raise UserError(
            f'graph.halo.synchronize = {halo.synchronize} is not possible with model.activation = "maxk".',
            why="the gradients of a late row are for columns that its owner no longer keeps",
            do="graph.halo.synchronize = 1",
        )


def _precision(halo: HaloOptions, precision: str) -> None:
    if precision == "fp16" and halo.bits != WHOLE:
        raise UserError(
            f'graph.halo.bits = {halo.bits!r} is not possible with train.precision = "fp16".',
            why="a step whose scaled gradients overflow is left out, and few bits cannot say that one did",
            do='train.precision = "bf16", or graph.halo.bits = 32',
        )


WHOLE, MOST = 32, 8
"""Bits of a value that crosses as it is, and the most of one that is rounded."""


def _store(store: Store, graph: GraphOptions) -> None:
    if graph.task != "node" or not graph.fanouts:
        raise UserError(
            f"[store] is not possible with graph.task = {graph.task!r} and graph.fanout = {list(graph.fanout)}.",
            why="the rows of sampled neighbourhoods of nodes are packed",
            do='graph.task = "node" and graph.fanout = [10, 10]',
        )
    if units.size(store.memory, "store.memory") <= 0:
        raise UserError(f"store.memory = {store.memory!r} holds no batch.", do='store.memory = "512MiB"')
    if store.disk is not None:
        units.size(store.disk, "store.disk")
    if not 0 <= store.resample <= 1:
        raise UserError(
            f"store.resample = {store.resample} is not possible.",
            why="it is the share of the pool that is sampled anew in each epoch, between 0 and 1",
            do="store.resample = 0.1",
        )
    if store.path == () or (isinstance(store.path, tuple) and len(set(store.path)) < len(store.path)):
        raise UserError(
            f"store.path = {list(store.path)} is not possible.", do="one folder for each disk, or leave it out"
        )


def _quant(quant: Quant, model: Model, graph: GraphOptions) -> None:
    for name, value, least in (
        ("bits", quant.bits, 1),
        ("weights", quant.weights, 2),
        ("messages", quant.messages, 2),
        ("aggregates", quant.aggregates, 2),
    ):
        if not least <= value <= 8 and not (value == 0 and name != "bits"):
            raise UserError(
                f"quant.{name} = {value} is not possible.",
                why=f"a value takes {least} to 8 bits" + ("" if name == "bits" else "; 0: it is not quantized"),
                do=f"quant.{name} = 4",
            )
    if isinstance(quant, Uniform) and quant.bits != int(quant.bits):
        raise UserError(
            f'quant.bits = {quant.bits} is not possible with quant.kind = "uniform".',
            why="all values have as many bits, and no value has a part of one",
            do=f'quant.bits = {math.ceil(quant.bits)}, or quant.kind = "a2q", whose widths differ',
        )
    if isinstance(model, MessagesModel) and quant.aggregates:
        raise UserError(
            f'quant.aggregates = {quant.aggregates} is not possible with model.kind = "messages".',
            why="sums are made inside layers that are not ours: rows that they read are rounded, and their matrices",
            do="quant.aggregates = 0",
        )
    if quant.target is None:
        return
    if isinstance(quant, Uniform):
        raise UserError(
            'quant.target has no effect with quant.kind = "uniform".',
            why="quant.bits are the bits of every value",
            do='quant.bits, or quant.kind = "a2q"',
        )
    units.size(quant.target, "quant.target")


def _usual(table: dict[str, Any]) -> dict[str, Any]:
    """A graph network gets its authors' optimizer where none is named: Adam with L2 (arXiv 1609.02907, section 5.2).
    None leaves a value to `_fill`, which sees the task."""
    train = table.get("train", {})
    given = train.get("optimizer", {}) if isinstance(train, dict) else None
    if isinstance(train, dict) and table["model"]["kind"] == "gin" and "schedule" not in train:
        train = {**train, "schedule": {"kind": "stable", "warmup": None}}
    if not isinstance(given, dict) or "kind" in given:
        return {**table, "train": train}
    usual = {"kind": "adamw", "coupled": True, "weight_decay": None, "betas": [0.9, 0.999]}
    return {**table, "train": {**train, "optimizer": {**usual, **given}}}


KIND = ModelKind(
    name="a graph model",
    options=(Gcn, Sage, Gat, Gin, GraphTransformer, MessagesModel),
    row="espalier.graph.workload_row",
    fill=_fill,
    check=_check,
    sections=("graph", "store", "quant"),
    usual=_usual,
    validation=lambda recipe: VALIDATION_COST,
    data="python:imports",
)


# --- what a step trains on, where the recipe leaves it open ----------------------------------------------------------


class Batches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for `graph.fanout = "auto"`: `fanout` of drawn batches of `batch_tokens` nodes, of which `steps`
    are a pass over the training nodes; empty: the whole graph, of which every step is one."""

    fanout: tuple[int, ...] = ()
    batch_tokens: int = 0
    steps: int = 1


def is_open(recipe: Any) -> bool:
    """Whether the plan is to choose between the whole graph and drawn batches."""
    return recipe.graph is not None and recipe.graph.fanout == "auto"


def with_batches(recipe: Any, chosen: Batches) -> Any:
    """`recipe` as if `chosen` had been asked for. Its steps, and those between validations and checkpoints, are passes
    over the training nodes: they become as many times `chosen.steps`."""
    graph, train, saves = recipe.graph, recipe.train, recipe.checkpoint
    halo = None if chosen.fanout else graph.halo or HaloOptions()
    recipe = recipe.changed(graph=graph.changed(fanout=chosen.fanout, halo=halo))
    if not chosen.fanout:
        return recipe
    counts = {name: (getattr(train, name) or 0) * chosen.steps or None for name in ("steps", "validate_every")}
    train = train.changed(batch_tokens=chosen.batch_tokens, **counts)
    if isinstance(saves.every, int):
        saves = saves.changed(every=saves.every * chosen.steps)
    return recipe.changed(train=train, checkpoint=saves)
