"""RCM++: reverse Cuthill-McKee from the node whose levels are narrowest. After Hou, Liu and Zhu, arXiv 2409.04171.

The walk towards remote nodes is George and Liu's (ACM TOMS 5(3), 1979). Deviations: a walk begins at the component's
node of least degree, not at a random one, so that an order is reproducible; every traversal already is an ordering,
so that the chosen one need not be made again; on small graphs two traversals are compared by bandwidth
(`small_graphs`), and more restarts measure bandwidth and profile of a few more nodes of the last levels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from espalier.recipe.errors import UserError, nearest
from espalier.sparse.rcmpp.pattern import SparsityPattern, like, positions

FINDERS = ("bi-criteria", "george-liu", "mind")
SPARE_WORK = 2**21
"""Entries and nodes that may be visited for trials beyond the walk: about 10 ms; none for most graphs of 10⁵ nodes."""
LEAST_TRIALS, MOST_TRIALS = 4, 16
"""Fewer than the first are not worth measuring for; the second is all of the two lists that a walk leaves."""
NODE_WORK = 4
"""Visiting a node costs about as much as four entries."""


def rcmpp(indptr: Any, indices: Any, *, finder: str = "bi-criteria", restarts: int = 1) -> Any:
    """An order of the nodes of a square sparse matrix in which neighbours are near each other.

    Unsymmetric patterns are ordered as A + Aᵀ; entries on the diagonal and repeated entries make no difference.
    Components follow each other, each from a start of its own; ties go to the smaller degree, then to the smaller id.

    Args:
        indptr: integers [nodes + 1], where each row begins. indices: integers [entries], the columns of its entries.
            NumPy or torch; CSR and CSC are the same here.
        finder: how a component's start is found: "bi-criteria" (RCM++), "george-liu" (remotest), "mind" (least degree,
            no search).
        restarts: walks from different nodes, of which the best is kept; each costs about as much as the first.

    Returns:
        `permutation` [nodes] of the same kind (int32 if `indices` is, else int64), as SciPy's:
        `permutation[new] = old`, so that `A[permutation][:, permutation]` is the ordered matrix.

    Raises:
        UserError: ids outside the matrix or offsets that do not fit, unknown finder, restarts below 1 or without use.
    """
    if finder == FINDERS[0] and type(restarts) is int and restarts == 1:
        order = _of_arrays(indptr, indices)
        if order is not None:
            return order.permutation.astype(np.int32 if indices.dtype == np.int32 else np.int64, copy=False)
    _check(finder, restarts)
    return like(trace(SparsityPattern.of(indptr, indices), finder, restarts).permutation, indices)


class Trace(NamedTuple):
    """An order, and how it came about: uint32 [nodes] new to old; traversals made; nodes in the widest level kept."""

    permutation: np.ndarray
    traversals: int
    width: int


def trace(pattern: SparsityPattern, finder: str = "bi-criteria", restarts: int = 1) -> Trace:
    """`rcmpp` for a pattern that is checked already."""
    from espalier.sparse.rcmpp import compiled, pattern_passes

    count = trials(pattern.entries, pattern.nodes) if finder == FINDERS[0] else 0
    if count and restarts == 1:
        return _of_small(pattern)
    rows = pattern.both_ways
    by_rank, rank, order = (np.empty(pattern.nodes, np.uint32) for _ in range(3))
    pattern_passes.ranked(rows.degree, by_rank, rank)
    choice = FINDERS.index(finder), restarts, count
    few = rows.twins < pattern.nodes // 8  # then looking for them costs more than they save
    traversals, width = compiled.cuthill_mckee(
        rows.indptr, rows.indices, rows.same, not few, rows.degree, by_rank, rank, *choice, order
    )
    return Trace(order[::-1], int(traversals), int(width))


def _of_arrays(indptr: Any, indices: Any) -> Trace | None:
    """`_of_small` for SciPy's own arrays, in the 20 µs that SciPy takes for a thousand nodes; None: look closer."""
    if not (type(indptr) is type(indices) is np.ndarray and indptr.ndim == indices.ndim == 1 and len(indptr)):
        return None
    nodes = len(indptr) - 1
    if not trials(len(indices), nodes):
        return None
    if indptr.dtype.kind + indices.dtype.kind not in ("ii", "iu", "ui", "uu"):
        return None
    kernels = _small()
    if not (indptr.dtype == indices.dtype == np.int32 and indptr.flags.carray and indices.flags.carray):
        given = (np.ascontiguousarray(indptr, np.int64), np.ascontiguousarray(indices, np.int64))
        indptr = np.empty(nodes + 1, np.int32)
        indices = np.empty(len(given[1]), np.int32)
        if not kernels.shortened.direct(*given, indptr, indices):
            return None
    degree = np.empty(nodes, np.int32)
    order = np.empty(nodes, np.int32)
    if kernels.prepare.direct(indptr, indices, degree) != kernels.READY:
        return None
    return Trace(order, *kernels.narrower.direct(indptr, indices, degree, degree.argsort(), order))


def _of_small(pattern: SparsityPattern) -> Trace:
    """By `small`: rows that do not ascend, or do not name each neighbour both ways, are made anew."""
    from espalier.sparse.rcmpp import pattern_passes

    given = pattern.indptr.astype(np.int32), pattern.indices.view(np.int32)
    order = _of_arrays(*given)
    if order is None:
        rows = pattern.both_ways
        indices = pattern_passes.ascending(rows.indptr, rows.indices)
        order = _of_arrays(rows.indptr.astype(np.int32), indices.view(np.int32))
        assert order is not None
    return order._replace(permutation=order.permutation.view(np.uint32))


@functools.cache
def _small() -> Any:
    """The module of the kernels for small graphs: an import that is done already takes 1 µs."""
    from espalier.sparse.rcmpp import small_graphs

    return small_graphs


def trials(entries: int, nodes: int) -> int:
    """How many starts beyond the walk's are tried, all candidates being measured; 0: the levels' width decides.

    Where there are any, a single walk is two traversals, of which the one of smaller bandwidth is kept.
    """
    affordable = SPARE_WORK // max(1, entries + NODE_WORK * nodes)
    return min(affordable, MOST_TRIALS) if affordable >= LEAST_TRIALS else 0


def bandwidth(indptr: Any, indices: Any, permutation: Any = None) -> int:
    """The greatest distance of an entry from the diagonal, max |new(u) - new(v)|, under `permutation` if given.

    Arrays and errors as in `rcmpp`; `permutation[new] = old` [nodes].
    """
    return _spread(indptr, indices, permutation)[0]


def profile(indptr: Any, indices: Any, permutation: Any = None) -> int:
    """Entries from each row's first to the diagonal, summed over the rows of A + Aᵀ, under `permutation` if given.

    That is the sum over u of new(u) - min(new(u), new of its neighbours): what a Cholesky factor in a skyline holds.
    Arrays and errors as in `rcmpp`; `permutation[new] = old` [nodes].
    """
    return _spread(indptr, indices, permutation)[1]


def _spread(indptr: Any, indices: Any, permutation: Any) -> tuple[int, int]:
    from espalier.sparse.rcmpp import pattern_passes

    pattern = SparsityPattern.of(indptr, indices)
    widths = pattern_passes.spread(pattern.indptr, pattern.indices, positions(permutation, pattern.nodes))
    return int(widths[0]), int(widths[1])


def _check(finder: str, restarts: int) -> None:
    if finder not in FINDERS:
        near = nearest(str(finder), FINDERS)
        raise UserError(
            f"finder={finder!r} is not known.",
            why=f"there are {', '.join(FINDERS)}",
            do=f"finder={near or FINDERS[0]!r}",
        )
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 1:
        raise UserError(f"restarts={restarts!r} is not a number of walks.", do="restarts=1, or more")
    if finder == "mind" and restarts > 1:
        raise UserError(
            f"restarts={restarts} is of no use with finder='mind'.", why="it does not search", do="finder='bi-criteria'"
        )
