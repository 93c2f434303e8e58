"""Planetoid's raw files (`ind.cora.x` and its kin; Yang et al., arXiv 1603.08861), read without trusting them.

They are pickles, which `numpy_pickle` reads: whatever is no array or plain container is refused.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from espalier.graph.data import numpy_pickle
from espalier.graph.data.array_file import refuse_far_ids
from espalier.graph.data.graph import IGNORED, Array, DataSplit, Graph
from espalier.machine.resource_limits import refuse_large
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing

VALIDATION = 500
"""Nodes after the training nodes that validate (arXiv 1603.08861 and GCN, arXiv 1609.02907, section 5.1)."""
_DO = "copy it again from its source"


def names(folder: Path) -> list[str]:
    """The data sets whose raw files lie in `folder`."""
    return sorted(file.name.split(".")[1] for file in folder.glob("ind.*.graph"))


def load(folder: Path, name: str, *, undirected: bool) -> Graph:
    """The data set `name` with its standard split. Rows that the files lack (CiteSeer's 15) are zeros without label."""
    missing = [
        part for part in ("x", "tx", "allx", "y", "ty", "ally", "graph") if not _file(folder, name, part).exists()
    ]
    if missing:
        raise UserError(
            f"{folder} lacks {', '.join(f'ind.{name}.{part}' for part in missing)}.",
            do="copy all eight files of the data set there",
        )
    with parsing(_file(folder, name, "test.index"), _DO):
        order = np.loadtxt(_file(folder, name, "test.index"), dtype=np.int64, ndmin=1)
    seen, tested, known, answers, training = (
        numpy_pickle.matrix(_file(folder, name, part), _DO) for part in ("allx", "tx", "ally", "ty", "y")
    )
    sources, targets, listed = _edges(_file(folder, name, "graph"))
    with parsing(folder / f"ind.{name}", "copy all eight files of the data set again"):
        count = max(listed, int(order.max()) + 1)
        refuse_far_ids(count, len(sources), _file(folder, name, "test.index"))
        refuse_large(f"a table of {count:,} nodes", count * seen.shape[1] * 4)
        features = np.zeros((count, seen.shape[1]), np.float32)
        labels = np.full(count, IGNORED, np.int64)
        features[: len(seen)] = seen
        features[order] = tested
        labels[: len(seen)] = _classes(known)
        labels[order] = _classes(answers)
        validation = np.arange(len(training), min(len(training) + VALIDATION, len(seen)))
        absent = count - len(seen) - len(order)
        notes = (f"{absent} nodes of {name} have no row in its files: zeros, without a label",) if absent else ()
        return Graph.from_edges(
            sources,
            targets,
            features=features / np.maximum(features.sum(1, keepdims=True), 1),
            undirected=undirected,
            labels=labels,
            parts=DataSplit(np.arange(len(training)), validation, np.sort(order)),
            origin=f"Planetoid {name}",
            notes=notes,
        )


def _classes(rows: Array) -> Array:
    """int64 [rows]: the column of the one in each row, -1 where there is none."""
    ones = (rows != 0).sum(1)
    if ones.max(initial=0) > 1:
        raise ValueError("a node has several labels, which are not read from Planetoid's files")
    return np.where(ones == 0, IGNORED, rows.argmax(1))


def _edges(file: Path) -> tuple[Array, Array, int]:
    """Sources and targets of a dict of neighbours, and how many nodes it has."""
    neighbours = numpy_pickle.read(file, _DO)
    with parsing(file, _DO):
        counts = [len(near) for near in neighbours.values()]
        refuse_large(f"a list of {sum(counts):,} edges", 32 * sum(counts))
        targets = np.repeat(np.fromiter(neighbours, np.int64, len(counts)), counts)
        return np.fromiter(chain.from_iterable(neighbours.values()), np.int64, sum(counts)), targets, len(counts)


def _file(folder: Path, name: str, part: str) -> Path:
    return folder / f"ind.{name}.{part}"
