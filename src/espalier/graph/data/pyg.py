"""To and from PyTorch Geometric: `Data` in, `Data` out, saved files of it, and networks that are called as PyG's are.
Nothing of PyG is needed for these.

A heterogeneous graph is refused by name. Files are pickles: loading one may run any code, so they are read with
torch's weights-only loader, which PyG's own classes of data pass where it is installed, and whole only if the user says
so (`graph.pickle = true`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from espalier import recipe as config
from espalier.graph.data.array_file import KEYS, MASKS, both_ends, masked_parts, understood
from espalier.graph.data.graph import Array, Graph
from espalier.graph.data.targets import as_array, of_graphs
from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.foreign_files import FieldUse, parsing
from espalier.recipe.import_function import function
from espalier.recipe.offsets import offsets_of


def from_pyg(data: Any, *, undirected: bool = False, origin: str = "Data", target: str | None = None) -> Graph:
    """The `Graph` of a PyG `Data` (or of anything with its attributes), its `y` as `target`. Raises UserError."""
    use = FieldUse(KEYS, origin)
    data = _known(data, use)
    notes = list(use.notes())
    features = _features(data, origin)
    sources, targets = _ends(data, origin)
    weights, edge_features = _of_edges(data)
    return Graph.from_edges(
        sources,
        targets,
        features=features,
        undirected=undirected,
        labels=_labels(getattr(data, "y", None)),
        target=target,
        parts=masked_parts([getattr(data, name, None) for name in MASKS], len(features), notes),
        weights=weights,
        edge_features=edge_features,
        origin=origin,
        notes=notes,
    )


def from_many(items: Any, *, undirected: bool = False, origin: str, target: str | None = None) -> Graph:
    """Many small PyG graphs side by side; `y` of each is its label, or a row of them [1, columns]; `target` is
    `graph.target`. Raises UserError naming the item at fault."""
    use = FieldUse(KEYS, origin)
    items = [_known(item, use) for item in items]
    if not items:
        raise UserError(f"{origin} holds no graphs.", do="give one Data object, or a list of them")
    widths = [_features(item, origin) for item in items]
    starts = offsets_of([len(features) for features in widths])
    edges = [_shifted(item, starts[at : at + 2], f"{origin}, item {at}") for at, item in enumerate(items)]
    labels = [getattr(item, "y", None) for item in items]
    known = [label for label in labels if label is not None]
    if len(known) < len(labels):
        raise UserError(f"{origin}: a graph has no label y.", do="give each of them one")
    joined = torch.cat(edges, 1)
    weights, edge_features = (_joined(list(values), origin) for values in zip(*map(_of_edges, items), strict=True))
    return Graph.from_edges(
        joined[0],
        joined[1],
        features=torch.cat(widths),
        labels=_labels(of_graphs(known, [len(features) for features in widths], origin)),
        target=target,
        starts=starts,
        undirected=undirected,
        weights=weights,
        edge_features=edge_features,
        origin=origin,
        notes=use.notes(),
    )


def _known(data: Any, use: FieldUse) -> Any:
    """The values of a `Data`, a dict, or anything with attributes that are used, as attributes by PyG's names."""
    if not isinstance(data, dict):
        _refuse_heterogeneous(data)
        count = getattr(data, "num_nodes", None)
        data = {"num_nodes": count, **(data.to_dict() if hasattr(data, "to_dict") else vars(data))}
    _refuse_kinds(data)
    table = {str(name): value for name, value in data.items() if value is not None}
    use.count(table)
    return SimpleNamespace(**understood(table, use.origin))


def _ends(data: Any, origin: str) -> tuple[Any, Any]:
    edges = getattr(data, "edge_index", None)
    if edges is None:
        raise UserError(
            f"{origin} has no edge_index.", why="edges are given as int64 [2, edges]", do="see docs/graph.md"
        )
    return both_ends(edges, origin)


def _of_edges(data: Any) -> tuple[Any, Any]:
    """Weights and features of the edges of a `Data`; `edge_attr` of one dimension is weights."""
    weights = getattr(data, "edge_weight", None)
    features = getattr(data, "edge_attr", None)
    if weights is None and features is not None and features.ndim == 1:
        return features, None
    return weights, features


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


def _joined(values: list[Any], origin: str) -> torch.Tensor | None:
    """What graphs know of their edges, end to end."""
    without = [at for at, tensor in enumerate(values) if tensor is None]
    if len(without) == len(values):
        return None
    if without:
        raise UserError(
            f"{origin}, item {without[0]} lacks edge attributes that other items have.",
            do="give all of them it, or none",
        )
    return torch.cat(values)


def to_pyg(graph: Graph) -> Any:
    """A PyG `Data` of `graph`; edges by target, masks for its split. Needs torch_geometric."""
    data = _library(f"Graph {graph.origin} as a PyG Data").data.Data()
    targets = torch.from_numpy(graph.targets())
    data.edge_index = torch.stack([torch.from_numpy(np.asarray(graph.indices, np.int64)), targets])
    data.x = torch.from_numpy(np.array(graph.features))
    if graph.labels is not None:
        data.y = torch.from_numpy(np.array(graph.labels))
    if graph.weights is not None:
        data.edge_weight = torch.from_numpy(np.array(graph.weights))
    if graph.edge_features is not None:
        data.edge_attr = torch.from_numpy(np.array(graph.edge_features))
    if graph.parts is not None and graph.starts is None:
        for (_, ids), name in zip(graph.parts.named(), MASKS, strict=True):
            mask = torch.zeros(graph.nodes, dtype=torch.bool)
            mask[torch.from_numpy(ids)] = True
            setattr(data, name, mask)
    return data


def load(path: Path, *, pickle: bool, undirected: bool, target: str | None = None) -> Graph:
    """The graph in a file written by `torch.save` of a `Data`, a (data, slices) tuple, a dict, or a list of either.

    Raises UserError for a file that needs unpickling of other classes than PyG's while `pickle` is False.
    """
    do = "save it again with torch.save(data, path)"
    with parsing(path, do):
        return _graph(_loaded(path, pickle), undirected, path, target)


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


def _graph(content: Any, undirected: bool, path: Path, target: str | None) -> Graph:
    if isinstance(content, list) or (
        isinstance(content, tuple) and all(hasattr(item, "edge_index") for item in content)
    ):
        return from_many(content, undirected=undirected, origin=str(path), target=target)
    if isinstance(content, tuple) and content:  # PyG's processed files: (data, slices, …)
        slices = content[1] if len(content) > 1 and isinstance(content[1], dict) else {}
        if (count := len(slices.get("edge_index", ())) - 1) > 1:
            raise UserError(
                f"{path} holds {count} collated graphs (data, slices).",
                why="their edges would be read as those of one graph",
                do="torch.save(list(dataset), path) with graph.pickle = true, or pyg:NAME",
            )
        content = content[0]
    return from_pyg(content, undirected=undirected, origin=str(path), target=target)


def _plain(path: Path) -> Any:
    """What is in the file, of tensors, plain values and PyG's classes of data, which hold nothing else."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        if "torch_geometric" not in str(error):
            raise
        from torch_geometric.data import Data, data, storage

        known = [Data, data.DataEdgeAttr, data.DataTensorAttr, storage.GlobalStorage]
        with torch.serialization.safe_globals(known):
            return torch.load(path, weights_only=True, map_location="cpu")


def dataset(name: str, root: Path, *, undirected: bool, target: str | None = None) -> Graph:
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
    if len(graphs) > 1:
        return from_many(graphs, undirected=undirected, origin=f"pyg:{name}", target=target)
    return from_pyg(graphs[0], undirected=undirected, origin=f"pyg:{name}", target=target)


def _library(purpose: str) -> Any:
    try:
        import torch_geometric.data
        import torch_geometric.datasets
    except ImportError:
        raise missing_extra("torch_geometric", "graph", purpose) from None
    return torch_geometric


def _refuse_heterogeneous(data: Any) -> None:
    if hasattr(data, "edge_types") or type(data).__name__ == "HeteroData":
        kinds = [str(node_type) for node_type in getattr(data, "node_types", [])]
        raise UserError(
            f"A heterogeneous graph cannot be trained{': it has node types ' + ', '.join(kinds) if kinds else ''}.",
            why="networks here have one kind of node and one kind of edge",
            do="data.to_homogeneous(), or one of its relations",
        )


def _refuse_kinds(table: dict[Any, Any]) -> None:
    """Refuses what `HeteroData.to_dict()` gives: a dict for each kind of node and, by (from, how, to), of edge."""
    if "edge_index" not in table and any(isinstance(storage, dict) for storage in table.values()):
        kinds = [key for key in table if isinstance(key, str) and key != "_global_store"]
        _refuse_heterogeneous(
            SimpleNamespace(edge_types=[key for key in table if isinstance(key, tuple)], node_types=kinds)
        )


def _features(data: Any, origin: str) -> torch.Tensor:
    features = getattr(data, "x", None)
    if features is not None:
        return torch.as_tensor(features).to(torch.float32)
    count = getattr(data, "num_nodes", None)
    if count is None:
        raise UserError(f"{origin} has neither x nor num_nodes.", do="give x, float32 [nodes, columns]")
    return torch.ones(int(count), 1)


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
    return model
