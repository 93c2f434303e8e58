"""Where the graph comes from: `data.path` read, checked, and divided into training, validation and test."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier import recipe as config
from espalier.graph.data import edge_lists, import_graph, ogb, planetoid, pyg, synthetic
from espalier.graph.data.graph import Graph, Progress, targeted
from espalier.graph.parts import partition_folder
from espalier.recipe import Data, data_path
from espalier.recipe.cache_dir import cache_folder
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.foreign_files import parsing
from espalier.recipe.units import plural

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")

PYG_FILES = (".pt", ".pth")
INSTALLED = "python:imports"
"""The graph of what is installed here."""

KNOWN = (
    INSTALLED,
    "pyg:Planetoid/Cora",
    "rmat:scale=16",
    "planted:nodes=10000",
    "a .pt file",
    "an edge list (.csv, .tsv, .txt, .mtx, .npz, .parquet, .json, .graphml, .metis)",
    "a Planetoid folder",
    "an OGB folder",
)


def load(data: Data, options: config.GraphOptions, progress: Progress | None = None) -> Graph:
    """The graph that `data.path` names. Raises UserError naming what is wrong with it."""
    return _with_split(targeted(_read(data, options, progress), options.target), options.split)


def _with_split(graph: Graph, split: Any) -> Graph:
    """`graph` with the split of its masks that `graph.split` numbers, or with the first; with all, where it asks for
    them: a run trains on each in turn (`cli.split_runs`)."""
    count = len(graph.splits)
    number = split if isinstance(split, int) else 0
    if (split == number and number >= count) or (split == "all" and count < 2):
        what = f"graph.split = {split}: the masks of {graph.origin} are of {plural(count, 'split')}."
        other = "leave graph.split out" if split == "all" else f"a number below {count}"
        raise UserError(what, do=other if count else "graph.split = [0.6, 0.2, 0.2]")
    if count < 2:
        return graph
    if split == "all":
        return replace(graph, parts=graph.splits[0])
    note = f"the masks are of {count} splits: number {number}, counted from 0, is used (graph.split)"
    return replace(graph, parts=graph.splits[number], splits=(), notes=(*graph.notes, note))


def _read(data: Data, options: config.GraphOptions, progress: Progress | None) -> Graph:
    path = data.path
    both = options.undirected
    if options.relation is not None and not path.startswith("pyg:") and Path(path).suffix.lower() not in PYG_FILES:
        raise UserError(
            f"graph.relation = {options.relation!r} is not possible with data.path = {path!r}.",
            why="kinds of edges are read from PyG's HeteroData",
            do="leave it out",
        )
    if path == INSTALLED:
        return import_graph.load(progress)
    if path.startswith("pyg:"):
        return pyg.dataset(path.removeprefix("pyg:"), _cache(data) / "pyg", options)
    if path.partition(":")[0] in synthetic.KINDS:
        return synthetic.load(path, _cache(data), progress)
    place = Path(path).expanduser()
    if place.is_dir():
        with parsing(place, "name the file itself"):
            return _folder(place, options)
    if not place.exists():
        if place.name in planetoid.names(place.parent):  # one data set of a folder that holds several
            return planetoid.load(place.parent, place.name, undirected=both)
        raise _missing(path)
    with parsing(place, f"give one of: {'; '.join(KNOWN)}"):
        return _file(place, path, options)


def _file(place: Path, path: str, options: config.GraphOptions) -> Graph:
    ending = place.suffix.lower()
    both = options.undirected
    if ending in PYG_FILES:
        return pyg.load(place, options)
    if ending in (".pkl", ".pickle"):
        raise UserError(
            f"data.path = {path!r} is a pickle, and is not read.",
            why="unpickling can execute arbitrary code",
            do="numpy.savez(file, edge_index=…, x=…, y=…), or torch.save(data.to_dict(), path)",
        )
    if edge_lists.is_edge_list(place):
        return edge_lists.load(place, undirected=both, target=options.target)
    raise UserError(f"data.path = {path!r} is not a graph known by its name.", do=f"one of: {'; '.join(KNOWN)}")


def _cache(data: Data) -> Path:
    return Path(data.cache).expanduser() if data.cache else cache_folder() / "graphs"


def _folder(place: Path, options: config.GraphOptions) -> Graph:
    undirected = options.undirected
    if synthetic.is_store(place):
        return synthetic.opened(place)
    if partition_folder.is_partition(place):
        return partition_folder.outlined(place)[0]
    if ogb.is_ogb(place):
        return ogb.load(place, undirected=undirected, task=options.task, target=options.target)
    for folder in (place, place / "raw"):
        names = planetoid.names(folder)
        if len(names) == 1:
            return planetoid.load(folder, names[0], undirected=undirected)
        if names:
            raise UserError(
                f"data.path = {str(place)!r} holds several data sets: {', '.join(names)}.",
                do=f"data.path = {str(place / names[0])!r}",
            )
    tables = edge_lists.beside(place, "edges", edge_lists.SUFFIXES)
    if len(tables) > 1:
        raise UserError(
            f"data.path = {str(place)!r} holds {' and '.join(table.name for table in tables)}.",
            why="each could be the edges of the graph",
            do=f"data.path = {str(tables[0])!r}",
        )
    if tables:
        return edge_lists.load(tables[0], undirected=undirected, target=options.target)
    raise UserError(
        f"data.path = {str(place)!r} holds no graph that is known.",
        why="looked for ind.NAME.graph (Planetoid), raw/edge.csv.gz (OGB) and edges.csv, .tsv, .mtx, .npz or .parquet",
        do="name the file itself",
    )


def _missing(path: str) -> UserError:
    if _SCHEME.match(path):
        near = nearest(path, [INSTALLED])
        meant = f"did you mean {near}? " if near else ""
        return UserError(f"data.path = {path!r}: unknown kind of source.", do=f"{meant}known: {'; '.join(KNOWN)}")
    return data_path.missing(path, INSTALLED)
