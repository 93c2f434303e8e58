"""To and from PyTorch Geometric: `Data` in, `Data` out, saved files of it, and networks that are called as PyG's are.
Nothing of PyG is needed for these.

A heterogeneous graph is refused by name. Files are pickles: loading one may run any code, so they are read with
torch's weights-only loader, which PyG's own classes of data pass where it is installed, and whole only if the user says
so (`graph.pickle = true`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from espalier import recipe as config
from espalier.graph.data.array_file import KEYS, MASKS, both_ends, graph_of, understood
from espalier.graph.data.graph import Array, Graph
from espalier.graph.data.targets import as_array, of_graphs
from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.foreign_files import FieldUse, parsing
from espalier.recipe.import_function import function
from espalier.recipe.offsets import offsets_of

EDGE_VALUES = ("edge_weight", "edge_attr")
"""Names of a third argument of a network's forward that is filled."""


def from_pyg(data: Any, *, origin: str = "Data", **how: Any) -> Graph:
    """The `Graph` of a PyG `Data` (or of anything with its attributes). `how`: `undirected` and `target`, as
    `Graph.from_edges` takes them. Raises UserError."""
    use = FieldUse(KEYS, origin)
    known = _known(data, use)
    known["y"] = _labels(known.get("y"))
    return graph_of(known, _ends(known, origin), known["x"], origin=origin, notes=use.notes(), **how)


def from_many(items: Any, *, origin: str, **how: Any) -> Graph:
    """Many small PyG graphs side by side; `y` of each is its label, or a row of them [1, columns]; `how` as of
    `from_pyg`. Raises UserError naming the item at fault."""
    use = FieldUse(KEYS, origin)
    items = [_known(item, use) for item in items]
    if not items:
        raise UserError(f"{origin} holds no graphs.", do="give one Data object, or a list of them")
    sizes = [len(item["x"]) for item in items]
    starts = offsets_of(sizes)
    edges = [_shifted(item, starts[at : at + 2], f"{origin}, item {at}") for at, item in enumerate(items)]
    labels = [item["y"] for item in items if "y" in item]
    if len(labels) < len(items):
        raise UserError(f"{origin}: a graph has no label y.", do="give each of them one")
    joined: dict[str, Any] = {name: _joined(name, items, origin) for name in ("x", "edge_weight", "edge_attr")}
    joined["y"] = _labels(of_graphs(labels, sizes, origin))
    sources, targets = torch.cat(edges, 1)
    more = {"starts": starts, "origin": origin, "notes": use.notes(), **how}
    return graph_of(joined, (sources, targets), joined["x"], **more)


def _known(data: Any, use: FieldUse) -> dict[str, Any]:
    """The values of a `Data`, a dict, or anything with attributes that are used, by PyG's names; `x` is filled, and
    `edge_attr` of one dimension is weights."""
    data = one_relation(data, None, use.origin)
    if not isinstance(data, dict):
        count = getattr(data, "num_nodes", None)
        data = {"num_nodes": count, **(data.to_dict() if hasattr(data, "to_dict") else vars(data))}
    table = {str(name): value for name, value in data.items() if value is not None}
    if "adj_t" in table and "edge_index" not in table:
        table |= _entries(table.pop("adj_t"))
    use.count(table)
    known = understood(table, use.origin)
    if "edge_weight" not in known and "edge_attr" in known and known["edge_attr"].ndim == 1:
        known["edge_weight"] = known.pop("edge_attr")
    return {**known, "x": _features(known, use.origin)}


def _entries(matrix: Any) -> dict[str, Any]:
    """The edges of a sparse tensor [targets, sources] of torch or torch_sparse, and its values, unless all are 1."""
    if hasattr(matrix, "coo"):
        targets, sources, values = matrix.coo()
    else:
        entries = matrix.to_sparse_coo().coalesce()
        targets, sources = entries.indices()
        values = entries.values()
    plain = values is None or bool((values == 1).all())
    weights = {} if plain else {"edge_weight" if values.ndim == 1 else "edge_attr": values}
    return {"edge_index": torch.stack([sources, targets]), **weights}


def _ends(known: dict[str, Any], origin: str) -> tuple[Any, Any]:
    if "edge_index" not in known:
        raise UserError(
            f"{origin} has no edge_index.", why="edges are given as int64 [2, edges]", do="see docs/graph.md"
        )
    return both_ends(known["edge_index"], origin)


def _shifted(item: Any, nodes: Array, origin: str) -> torch.Tensor:
    """The edges of a small graph whose nodes are numbered from `nodes[0]` to before `nodes[1]`."""
    edges = torch.stack(_ends(item, origin))
    count = int(nodes[1] - nodes[0])
    strange = edges[(edges < 0) | (edges >= count)]
    if len(strange):
        raise UserError(
            f"{origin} has an edge at {int(strange[0])}, outside its {count} nodes.",
            why="it would connect two graphs",
            do="number the nodes of each graph from 0",
        )
    return edges + int(nodes[0])


def _joined(name: str, items: list[dict[str, Any]], origin: str) -> torch.Tensor | None:
    """What graphs know under `name`, end to end."""
    without = [at for at, item in enumerate(items) if name not in item]
    if len(without) == len(items):
        return None
    if without:
        raise UserError(
            f"{origin}, item {without[0]} lacks {name}, which other items have.", do="give all of them it, or none"
        )
    return torch.cat([item[name] for item in items])


def to_pyg(graph: Graph) -> Any:
    """A PyG `Data` of `graph`; edges by target, masks for its split. Needs torch_geometric."""
    data = _library(f"Graph {graph.origin} as a PyG Data").data.Data()
    targets = torch.from_numpy(graph.targets())
    data.edge_index = torch.stack([torch.from_numpy(np.asarray(graph.indices, np.int64)), targets])
    known = {"x": graph.features, "y": graph.labels, "edge_weight": graph.weights, "edge_attr": graph.edge_features}
    for name, array in known.items():
        if array is not None:
            data[name] = torch.from_numpy(np.array(array))
    if graph.parts is not None and graph.starts is None:
        for ids, name in zip(graph.parts, MASKS, strict=True):
            mask = torch.zeros(graph.nodes, dtype=torch.bool)
            mask[torch.from_numpy(ids)] = True
            setattr(data, name, mask)
    return data


def load(path: Path, options: config.GraphOptions) -> Graph:
    """The graph in a file written by `torch.save` of a `Data`, a `HeteroData`, a (data, slices) tuple, a dict, or a
    list of them.

    Raises UserError for a file that needs unpickling of other classes than PyG's without `graph.pickle`.
    """
    with parsing(path, "save it again with torch.save(data, path)"):
        return _graph(_loaded(path, options.pickle), str(path), options)


def _loaded(path: Path, pickle: bool) -> Any:
    if pickle:
        return torch.load(path, weights_only=False, map_location="cpu")
    try:
        return _plain(path)
    except OSError:
        raise
    except Exception:  # torch's and pickle's errors have no common base
        raise UserError(
            f"{path} is pickled, and is not read.",
            why="unpickling can execute arbitrary code",
            do="torch.save(data.to_dict(), path), for a list one dict each; or pip install torch_geometric, if it is a "
            "Data of PyG; or graph.pickle=true if you trust it",
        ) from None


def _graph(content: Any, origin: str, options: config.GraphOptions) -> Graph:
    how: dict[str, Any] = {"undirected": options.undirected, "origin": origin, "target": options.target}
    if isinstance(content, tuple) and content and not all(hasattr(item, "edge_index") for item in content):
        slices = next((item for item in content[1:] if isinstance(item, dict)), {})  # PyG's processed files
        many = len(slices.get("edge_index", ())) > 2
        content = _separated(content[0], slices) if many else content[0]
    if isinstance(content, list | tuple):
        return from_many([one_relation(item, options.relation, origin) for item in content], **how)
    return from_pyg(one_relation(content, options.relation, origin), **how)


def _separated(data: Any, slices: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The graphs that PyG has collated into one: of each value they have the piece between two of its `slices`."""
    table = data if isinstance(data, dict) else data.to_dict()
    items: list[dict[str, Any]] = [{} for _ in slices["edge_index"][1:]]
    for name, ends in slices.items():
        bounds = as_array(ends).tolist()
        for item, start, stop in zip(items, bounds, bounds[1:], strict=False):
            item[name] = table[name][:, start:stop] if name == "edge_index" else table[name][start:stop]
    return items


def one_relation(data: Any, relation: str | None, origin: str) -> Any:
    """`data`; of a heterogeneous graph the kind of edges that `graph.relation` names, as a dict. Raises UserError where
    that is not one between nodes of one kind."""
    table = data.to_dict() if hasattr(data, "edge_types") else data
    kinds = [key for key in table if isinstance(key, tuple)] if isinstance(table, dict) else []
    if not kinds and relation is None:
        return data
    if not kinds:
        raise UserError(f"graph.relation = {relation!r}: {origin} has one kind of edges.", do="leave it out")
    chosen = [kind for kind in kinds if relation in (kind[1], ",".join(kind)) and kind[0] == kind[2]]
    if len(chosen) != 1:
        nodes = [key for key in table if isinstance(key, str) and key != "_global_store"]
        raise UserError(
            f"{origin} is a heterogeneous graph: it has node types {', '.join(nodes)}.",
            why=f"graph.relation = {relation!r}, and its edges are {'; '.join(map(','.join, kinds))}",
            do='graph.relation = "paper,cites,paper" chooses edges between nodes of one kind; or data.to_homogeneous()',
        )
    return {**table[chosen[0][0]], **table[chosen[0]]}


def _plain(path: Path) -> Any:
    """What is in the file, of tensors, plain values and PyG's classes of data, which hold nothing else."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        if "torch_geometric" not in str(error):
            raise
        from torch_geometric.data import Data, HeteroData, data, storage

        known = [Data, HeteroData, data.DataEdgeAttr, data.DataTensorAttr]
        known += [storage.GlobalStorage, storage.BaseStorage, storage.NodeStorage, storage.EdgeStorage]
        with torch.serialization.safe_globals(known):
            return torch.load(path, weights_only=True, map_location="cpu")


def dataset(name: str, root: Path, options: config.GraphOptions) -> Graph:
    """`pyg:Planetoid/Cora`: the dataset class of `torch_geometric.datasets` and its name, if it takes one."""
    datasets = _library(f"data.path = 'pyg:{name}'").datasets
    kind, _, which = name.partition("/")
    if not hasattr(datasets, kind):
        from espalier.recipe.errors import nearest

        near = nearest(kind, [class_name for class_name in dir(datasets) if class_name[0].isupper()])
        raise UserError(
            f"data.path = 'pyg:{name}': PyG has no dataset class {kind!r}.",
            do=f"did you mean pyg:{near}?" if near else "pyg:Planetoid/Cora",
        )
    made = getattr(datasets, kind)
    try:
        graphs = made(str(root / kind), which) if which else made(str(root / kind))
    except Exception as error:  # downloads fail in many ways
        raise UserError(
            f"data.path = 'pyg:{name}' cannot be loaded.",
            why=f"{type(error).__name__}: {error}",
            do=f"put its raw files below {root / kind}, or check the name",
        ) from None
    return _graph(list(graphs) if len(graphs) > 1 else graphs[0], f"pyg:{name}", options)


def _library(purpose: str) -> Any:
    try:
        import torch_geometric.data
        import torch_geometric.datasets
    except ImportError:
        raise missing_extra("torch_geometric", "graph", purpose) from None
    return torch_geometric


def _features(known: dict[str, Any], origin: str) -> torch.Tensor:
    if "x" in known:
        return torch.as_tensor(known["x"]).to(torch.float32)
    if "num_nodes" not in known:
        raise UserError(f"{origin} has neither x nor num_nodes.", do="give x, float32 [nodes, columns]")
    return torch.ones(int(known["num_nodes"]), 1)


def _labels(labels: Any) -> Array | None:
    """As `targets.read` takes them; one column of numbers is a vector, unless some are NaN."""
    if labels is None:
        return None
    given = np.atleast_1d(as_array(labels))
    column = given.ndim == 2 and given.shape[1] == 1 and not (given.dtype.kind == "f" and np.isnan(given).any())
    return given[:, 0] if column else given


def built(options: config.MessagesModel, features: int, classes: int, folder: str | Path | None) -> nn.Module:
    """The network that `model.build` makes, called with (features, classes, **model.arguments): its forward takes
    (x [nodes, features], edge_index int64 [2, edges]) and gives [nodes, classes]; a third argument called `edge_weight`
    or `edge_attr` is filled where the graph has it. Raises UserError for whatever its code raises or does not give."""
    made, author = function(options.build, folder)
    with author.answers("when it was called"):
        model = made(features, classes, **options.arguments)
    if not isinstance(model, nn.Module) or not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"model.build = {options.build!r} returned {type(model).__name__}.",
            why="it must return a network with parameters to train",
            do="see docs/graph.md",
        )
    _refuse_arguments(model, options.build)
    return model


def _refuse_arguments(model: nn.Module, build: str) -> None:
    """Refuses a network whose forward needs what no step gives it, such as `batch`."""
    signature = inspect.signature(model.forward)
    third = [name for name in list(signature.parameters)[2:3] if name in EDGE_VALUES]
    try:
        signature.bind("x", "edge_index", *third)
    except TypeError as error:
        code: Any = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        raise UserError(
            f"model.build = {build!r}: {type(model).__name__} is called with (x, edge_index): {error}.",
            why=code and f"{code.co_filename}:{code.co_firstlineno}",
            do=f"a default for all others; a third argument {' or '.join(EDGE_VALUES)} is filled; graph.task = 'graph' "
            "pools the nodes of each graph, and graph.relation chooses one kind of edges",
        ) from None
