"""Node reordering of a graph: RCM++ for meshes, clusters for small worlds, or the order it has; with reasons.

What an order is worth is counted, not guessed: the different feature rows, pages or tiles that consecutive rows of the
ordered matrix touch, before and after. Only the step from rows touched to seconds of a sparse product is a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from espalier.recipe.errors import UserError, nearest
from espalier.sparse.partition import clusters
from espalier.sparse.rcmpp.cuthill_mckee import trace
from espalier.sparse.rcmpp.pattern import SparsityPattern, like, positions


class Purpose(NamedTuple):
    """What is counted for a use: rows that are worked on together, columns that are read together, and their name."""

    window: int
    page: int
    unit: str


PURPOSES = {
    "spmm": Purpose(4096, 1, "feature rows fetched"),  # 64 float32 features: 1 MiB, a core's second-level cache
    "disk": Purpose(1024, 16, "4 KiB pages read"),  # batches of 1024 nodes; 16 rows of 64 float32 features on a page
    "blocks": Purpose(64, 64, "tiles of 64 x 64 with entries"),
}
FETCH = 3.0
"""A feature row from memory costs this many times one from the cache: between what the products of bench/rcmpp.py gave
for grids (1.3) and for triangles (8) on a Xeon whose other core was busy. Their rows print the prediction beside."""
LEAST_GAIN = 1.1
"""Below this, moving features and labels into a new order is not worth its trouble."""
SMALL_WORLD = 0.2
"""Levels wider than this share of all nodes mean that everything is a few steps from everything: no band to find.
Of the structures in bench/rcmpp.py grids, meshes and roads have at most 0.11, circuits with far nets 0.37, preferential
attachment 0.54."""
MOST_PARTS = 1024


@dataclass(frozen=True, eq=False)
class NodeOrder:
    """An order and why.

    Attributes:
        method: "rcm++", "clusters" or "none".
        permutation: [nodes], `permutation[new] = old`, of the graph's own kind; None for "none".
        reason: one sentence for people.
        gain: predicted speed of the use, new order over old: of the product's seconds ("spmm"), else of what is
            counted. 1 for "none".
        before, after: what is counted, in the old and the new order; `unit` names it.
    """

    method: Literal["rcm++", "clusters", "none"]
    permutation: Any
    reason: str
    gain: float
    before: int
    after: int
    unit: str


def order(graph: Any, for_: str = "spmm") -> NodeOrder:
    """The order of `graph`'s nodes for one use.

    Args:
        graph: what has `indptr` and `indices` (our `Graph` and `CSR`, SciPy's CSR and CSC), a torch sparse CSR
            tensor, or the pair `(indptr, indices)`.
        for_: "spmm" (multiply with features often), "disk" (read features of neighbouring batches from pages) or
            "blocks" (attend over tiles).

    Raises:
        UserError: unknown use, a matrix that is not square, arrays that do not fit.
    """
    if for_ not in PURPOSES:
        near = nearest(str(for_), PURPOSES) or "spmm"
        raise UserError(f"for_={for_!r} is not known.", why=f"there are {', '.join(PURPOSES)}", do=f"for_={near!r}")
    indptr, indices = _arrays(graph)
    pattern = SparsityPattern.of(indptr, indices)
    purpose = PURPOSES[for_]
    before = _count(pattern, np.arange(pattern.nodes, dtype=np.uint32), purpose)
    traversal = trace(pattern)
    share = traversal.width / max(1, pattern.nodes)
    method: Literal["rcm++", "clusters"] = "rcm++"
    permutation = np.ascontiguousarray(traversal.permutation)
    after = _count(pattern, permutation, purpose)
    why = f"the widest level of a traversal holds {share:.1%} of the nodes"
    if share > SMALL_WORLD:
        parts = min(MOST_PARTS, max(1, pattern.nodes // max(purpose.window, 256)))
        other = grouped(pattern, permutation, parts)
        counted = _count(pattern, other, purpose)
        if counted < after:
            method = "clusters"
            permutation = other
            after = counted
        why += ", so there is no narrow band; parts with few edges between them were tried"
    gain = predicted(pattern, before, after, for_)
    counts = f"{before:,} {purpose.unit} become {after:,}, predicted gain {gain:.2f}"
    if gain < LEAST_GAIN:
        return NodeOrder("none", None, f"{why}; {counts} is below {LEAST_GAIN}", 1.0, before, before, purpose.unit)
    return NodeOrder(method, like(permutation, indices), f"{why}; {counts}", gain, before, after, purpose.unit)


def predicted(pattern: SparsityPattern, before: int, after: int, for_: str) -> float:
    """Speed of the new order over the old: a product reads every entry and writes every row, wherever they are."""
    always = pattern.entries + pattern.nodes if for_ == "spmm" else 0
    weight = FETCH if for_ == "spmm" else 1.0
    return (always + weight * before) / max(1e-9, always + weight * after) if before else 1.0


def _count(pattern: SparsityPattern, permutation: np.ndarray, purpose: Purpose) -> int:
    from espalier.sparse.rcmpp.pattern_passes import touched

    new = positions(permutation, pattern.nodes)
    return int(touched(pattern.indptr, pattern.indices, permutation, new, purpose.window, purpose.page))


def grouped(pattern: SparsityPattern, permutation: np.ndarray, parts: int) -> np.ndarray:
    """Cluster after cluster, by their mean place in `permutation`; within a cluster as in `permutation`. uint32."""
    labels = clusters(pattern.indptr, pattern.indices, parts, volume=False)
    place = positions(permutation, pattern.nodes)
    mean = np.bincount(labels, place, parts) / np.maximum(1, np.bincount(labels, minlength=parts))
    return np.lexsort((place, labels, mean[labels])).astype(np.uint32)


def _arrays(graph: Any) -> tuple[Any, Any]:
    shape = getattr(graph, "shape", None)
    if shape is not None and (len(shape) != 2 or shape[0] != shape[1]):
        raise UserError(
            f"The matrix has the shape {tuple(shape)}.",
            why="an order is for the nodes of a graph: rows are columns",
            do="give a square matrix; for a matrix A that is not, order A·Aᵀ",
        )
    if hasattr(graph, "indptr") and hasattr(graph, "indices") and not callable(graph.indices):
        return graph.indptr, graph.indices
    if hasattr(graph, "crow_indices"):
        return graph.crow_indices(), graph.col_indices()
    if isinstance(graph, tuple) and len(graph) == 2:
        return graph
    raise UserError(
        f"order cannot read a graph from a {type(graph).__name__}.",
        do="give (indptr, indices), or something that has both (SciPy: matrix.tocsr())",
    )
