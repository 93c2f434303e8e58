"""The networks on graphs: their options, what a recipe leaves open of them, and what they refuse. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import field

from espalier.recipe import mechanism_options
from espalier.recipe.base import Draft, Model, ModelKind, RecipeBase, refuse_mixture_and_recompute, with_optimizer
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.sections import GraphOptions, Stable


class Network(Model, frozen=True):
    """What the graph networks share: `depth` layers of message passing, from features to classes.

    `width` columns between layers; `activation = "maxk"` keeps the `k` largest of them in each row (MaxK-GNN), found
    by at most `max_iterations` bisections (RTop-K's early stop; None: exactly).
    """

    depth: int | None = None
    width: int | None = None
    activation: Literal["relu", "elu", "maxk"] | None = None
    k: int | None = None
    max_iterations: int | None = None
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
    refuse_mixture_and_recompute(recipe, "a graph")


def _width(model: Network) -> None:
    width, k = model.width, model.k
    if k is not None and width is not None and k > width:
        raise UserError(
            f"model.k = {k} is larger than the width.",
            why=f"model.width = {width}",
            do=f"model.k = {max(1, width // 8)}",
        )
    for name, value in {"k": k, "max_iterations": model.max_iterations}.items():
        if value is not None and model.activation not in (None, "maxk"):
            raise UserError(
                f'model.{name} = {value} belongs to model.activation = "maxk", not {model.activation!r}.',
                do="give one of them",
            )
    if isinstance(model, Gat):
        if width and width % model.heads:
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
    if not 0 < model.recall <= 1 or (model.recall < 1 and model.attention == "full"):
        raise UserError(
            f"model.recall = {model.recall} is not possible with model.attention = {model.attention!r}.",
            why="it is the least share of the edges that steps along them keep",
            do="model.recall = 0.9",
        )
    if len(set(model.encodings)) < len(model.encodings):
        raise UserError(f"model.encodings = {list(model.encodings)} names one twice.", do="each once")


def _split(graph: GraphOptions) -> None:
    shares = graph.shares
    if min(shares) < 0 or shares[0] <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise UserError(
            f"graph.split = {list(shares)} is not possible.",
            why="the shares of training, validation and test must add up to 1, and training needs some",
            do="graph.split = [0.6, 0.2, 0.2]",
        )
    numbered = graph.task == "node" and (graph.split == "all" or (isinstance(graph.split, int) and graph.split >= 0))
    if graph.split is not shares and not numbered:
        raise UserError(
            f"graph.split = {graph.split!r} is not possible.",
            why="it is of shares, or the number, from 0, of a column of the masks of nodes",
            do='graph.split = [0.6, 0.2, 0.2], graph.split = 0, or graph.split = "all" with graph.task = "node"',
        )


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
    _split(graph)
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
    if graph.task == "graph" and graph.inductive:
        raise UserError("graph.inductive has no effect when whole graphs are held out.", do="leave it out")


def _usual(table: dict[str, Any]) -> dict[str, Any]:
    """A graph network gets its authors' optimizer where none is named: Adam with L2 (arXiv 1609.02907, section 5.2).
    None leaves a value to `_fill`, which sees the task."""
    train = table.get("train", {})
    if isinstance(train, dict) and table["model"]["kind"] == "gin" and "schedule" not in train:
        table = {**table, "train": {**train, "schedule": {"kind": "stable", "warmup": None}}}
    return with_optimizer(table, {"kind": "adamw", "coupled": True, "weight_decay": None, "betas": [0.9, 0.999]})


KIND = ModelKind(
    name="a graph model",
    options=(Gcn, Sage, Gat, Gin, GraphTransformer, MessagesModel),
    row="espalier.graph.workload_row",
    fill=_fill,
    check=_check,
    sections=("graph",),
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


def has_all_splits(recipe: RecipeBase) -> bool:
    """Whether a recipe is trained on each split of its graph's masks in turn."""
    return recipe.graph is not None and recipe.graph.split == "all"


def is_open(recipe: Any) -> bool:
    """Whether the plan is to choose between the whole graph and drawn batches."""
    return recipe.graph is not None and recipe.graph.fanout == "auto"


def with_batches(recipe: Any, chosen: Batches) -> Any:
    """`recipe` as if `chosen` had been asked for. Its steps, and those between validations and checkpoints, are passes
    over the training nodes: they become as many times `chosen.steps`."""
    graph, train, saves = recipe.graph, recipe.train, recipe.checkpoint
    halo = None if chosen.fanout else graph.halo or mechanism_options.TABLE["graph.halo"].options()
    recipe = recipe.changed(graph=graph.changed(fanout=chosen.fanout, halo=halo))
    if not chosen.fanout:
        return recipe
    counts = {name: (getattr(train, name) or 0) * chosen.steps or None for name in ("steps", "validate_every")}
    train = train.changed(batch_tokens=chosen.batch_tokens, **counts)
    if isinstance(saves.every, int):
        saves = saves.changed(every=saves.every * chosen.steps)
    return recipe.changed(train=train, checkpoint=saves)
