"""Planetoid's raw files (`ind.cora.x` and its kin; Yang et al., arXiv 1603.08861), read without trusting them.

They are pickles. An unpickler that knows NumPy arrays, SciPy's CSR matrices and plain containers, and nothing else,
reads them: whatever else a file names is refused, so nothing in it can run.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from espalier.errors import UserError
from espalier.graph.data import IGNORED, Array, DataSplit, Graph

VALIDATION = 500
"""Nodes after the training nodes that validate (arXiv 1603.08861 and GCN, arXiv 1609.02907, section 5.1)."""


class _Sparse:
    """A SciPy CSR matrix's state: data, indices, indptr and _shape."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state

    def dense(self) -> Array:
        """float32 [rows, columns]."""
        rows, columns = self.state["_shape"]
        indptr, indices = self.state["indptr"], self.state["indices"]
        found = np.zeros((rows, columns), np.float32)
        found[np.repeat(np.arange(rows), np.diff(indptr)), indices] = self.state["data"]
        return found


def _latin(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
    **{(f"scipy.sparse{part}", "csr_matrix"): _Sparse for part in ("", ".csr", "._csr")},
}


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return _KNOWN[module, name]


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
    order = np.loadtxt(_file(folder, name, "test.index"), dtype=np.int64, ndmin=1)
    seen, tested = _pickled(folder, name, "allx").dense(), _pickled(folder, name, "tx").dense()
    known, answers = np.asarray(_pickled(folder, name, "ally")), np.asarray(_pickled(folder, name, "ty"))
    links = _pickled(folder, name, "graph")
    count = max(len(links), int(order.max()) + 1)
    features = np.zeros((count, seen.shape[1]), np.float32)
    labels = np.full(count, IGNORED, np.int64)
    features[: len(seen)], features[order] = seen, tested
    labels[: len(seen)], labels[order] = known.argmax(1), answers.argmax(1)
    training = len(_pickled(folder, name, "y"))
    parts = DataSplit(np.arange(training), np.arange(training, training + VALIDATION), np.sort(order))
    targets = np.repeat(np.fromiter(links, np.int64), [len(near) for near in links.values()])
    sources = np.concatenate([np.asarray(near, np.int64) for near in links.values()])
    absent = count - len(seen) - len(order)
    notes = (f"{absent} nodes of {name} have no row in its files: zeros, without a label",) if absent else ()
    return Graph.from_edges(
        sources,
        targets,
        features=features / np.maximum(features.sum(1, keepdims=True), 1),
        undirected=undirected,
        labels=labels,
        parts=parts,
        origin=f"Planetoid {name}",
        notes=notes,
    )


def _file(folder: Path, name: str, part: str) -> Path:
    return folder / f"ind.{name}.{part}"


def _pickled(folder: Path, name: str, part: str) -> Any:
    file = _file(folder, name, part)
    try:
        with open(file, "rb") as opened:
            return _Careful(opened, encoding="latin1").load()
    except Exception as error:  # a broken pickle raises anything
        raise UserError(f"{file} cannot be read: {error}.", do="copy it again from its source") from None
