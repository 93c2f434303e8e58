"""Parts of a graph: about as many nodes in each, few edges between them. By METIS where it is installed.

METIS: Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998, through pymetis (extra `graph`). Else our own sweeps: pieces
of the RCM++ order, whose nodes then move to where most of their neighbours are, as far as there is room (label
propagation with capacities, after Ugander and Backstrom, WSDM 2013).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from espalier.recipe.errors import UserError
from espalier.sparse.rcmpp.cuthill_mckee import trace
from espalier.sparse.rcmpp.pattern import SparsityPattern

Begin = Callable[[str, int, int], None]
"""Called with the name of a stage that begins, how many are done and how many there are."""


def _unseen(stage: str, done: int, total: int) -> None:
    """Nobody looks."""


SLACK = 0.03
"""A part may be this much larger than the mean: METIS's own default (its ufactor 30)."""
SWEEPS = 10
"""Half of the nodes may move in each, so each node five times. A choice, not a measurement."""


def installed() -> bool:
    """Whether METIS makes parts here."""
    return importlib.util.find_spec("pymetis") is not None


def library() -> str:
    """What makes parts here, for people."""
    return "METIS" if installed() else "our own sweeps (pymetis is not installed)"


def clusters(
    indptr: Any,
    indices: Any,
    parts: int,
    shares: Sequence[float] | None = None,
    volume: bool = True,
) -> np.ndarray:
    """The part of each node, int32 [nodes] in 0 .. parts-1; deterministic.

    `indptr` [nodes + 1] and `indices` [entries] as for `rcmpp`; directions and repeated entries do not matter.
    `shares`: of the nodes for each part, in any unit (devices of unequal speed); None: equal. `volume`: METIS minimizes
    the rows that parts send one another, else the edges between parts.
    Raises UserError: arrays that fit not, or a number of parts that is not between 1 and the number of nodes, or shares
    that are not one above 0 for each.
    """
    return clusters_of(SparsityPattern.of(indptr, indices), parts, shares, volume)


def clusters_of(
    pattern: SparsityPattern,
    parts: int,
    shares: Sequence[float] | None = None,
    volume: bool = True,
    begin: Begin = _unseen,
) -> np.ndarray:
    """As `clusters`, which tells `begin` of its stages."""
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= max(1, pattern.nodes):
        raise UserError(
            f"parts={parts!r} cannot be made of {pattern.nodes} nodes.", do=f"parts from 1 to {max(1, pattern.nodes)}"
        )
    if shares is not None and (len(shares) != parts or min(shares) <= 0):
        raise UserError(f"shares={list(shares)} are not for {parts} parts.", do="a number above 0 for each part")
    if parts == 1:
        return np.zeros(pattern.nodes, np.int32)
    if shares is not None and max(shares) <= (1 + SLACK) * min(shares):
        shares = None
    if installed():
        labels = by_metis(pattern, parts, shares, volume=volume, begin=begin)
        if shares is None or _as_wanted(labels, parts, shares):
            return labels
    return by_sweeps(pattern, parts, shares, begin)


def _as_wanted(labels: np.ndarray, parts: int, shares: Sequence[float]) -> bool:
    """Whether each part has its share of the nodes: METIS bounds parts from above only."""
    wanted = len(labels) * np.asarray(shares, np.float64) / sum(shares)
    return bool((np.abs(np.bincount(labels, minlength=parts) - wanted) <= 2 * SLACK * wanted + 1).all())


def by_metis(
    pattern: SparsityPattern,
    parts: int,
    shares: Sequence[float] | None = None,
    *,
    volume: bool = True,
    begin: Begin = _unseen,
) -> np.ndarray:
    """As `clusters`, by METIS. For `volume` of the parts by either of its objectives those with less of it: its search
    for the volume sometimes ends with more than that for the cut."""
    import pymetis

    matrix = symmetric(pattern)
    rows = pymetis.CSRAdjacency(matrix.indptr, matrix.indices)
    weights = None if shares is None else [share / sum(shares) for share in shares]

    def partitioned(aim: int, recursive: bool) -> np.ndarray:
        options = pymetis.Options(seed=1, objtype=int(aim))
        made = pymetis.part_graph(parts, rows, tpwgts=weights, recursive=recursive, options=options)
        return np.asarray(made.vertex_part, np.int32)

    begin("METIS, fewest edges between parts", 0, 1 + volume)
    few = partitioned(pymetis.ObjType.CUT, parts <= 8)
    if not volume:
        return few
    begin("METIS, fewest rows between parts", 1, 2)
    return min(few, partitioned(pymetis.ObjType.VOL, False), key=lambda labels: crossing(matrix, labels))


def by_sweeps(
    pattern: SparsityPattern, parts: int, shares: Sequence[float] | None = None, begin: Begin = _unseen
) -> np.ndarray:
    """As `clusters`, without METIS: never a larger cut than that of pieces of the RCM++ order."""
    begin("RCM++", 0, SWEEPS + 1)
    nodes = pattern.nodes
    matrix = symmetric(pattern)
    labels = np.empty(nodes, np.int32)
    each = np.ones(parts) if shares is None else np.asarray(shares, np.float64)
    ends = np.cumsum(each)[:-1] * (nodes / each.sum())
    labels[trace(pattern).permutation] = np.searchsorted(ends, np.arange(nodes), side="right")
    best = labels
    least = cut(matrix, labels)
    room = np.ceil(nodes * each / each.sum() * (1 + SLACK)).astype(np.int64)
    least_room = np.zeros(parts, np.int64) if shares is None else (room * (1 - 2 * SLACK)).astype(np.int64)
    for sweep in range(SWEEPS):
        begin(f"sweep {sweep + 1} of {SWEEPS}", sweep + 1, SWEEPS + 1)
        labels = _moved(matrix, labels, (least_room, room), sweep)
        if (crossings := cut(matrix, labels)) < least:
            best = labels
            least = crossings
    return best


def symmetric(pattern: SparsityPattern) -> sparse.csr_array:
    """A + Aᵀ without its diagonal, all ones (float32)."""
    rows = pattern.both_ways
    matrix = sparse.csr_array(
        (np.ones(len(rows.indices), np.float32), rows.indices.astype(np.int32), rows.indptr.astype(np.int64)),
        shape=(pattern.nodes, pattern.nodes),
    )
    loops = np.repeat(np.arange(pattern.nodes), np.diff(matrix.indptr)) == matrix.indices
    if loops.any():
        matrix.data[loops] = 0
        matrix.eliminate_zeros()
    return matrix


def cut(matrix: sparse.csr_array, labels: np.ndarray) -> int:
    """Entries of `matrix` whose row and column are in different parts."""
    return int((np.repeat(labels, np.diff(matrix.indptr)) != labels[matrix.indices]).sum())


def crossing(matrix: sparse.csr_array, labels: np.ndarray) -> int:
    """Rows that parts read of one another: pairs of a column's node and another part with a row that reads it."""
    there = np.repeat(labels, np.diff(matrix.indptr)).astype(np.int64)
    other = there != labels[matrix.indices]
    return len(np.unique(there[other] * len(labels) + matrix.indices[other]))


def _moved(
    matrix: sparse.csr_array, labels: np.ndarray, sizes: tuple[np.ndarray, np.ndarray], sweep: int
) -> np.ndarray:
    """Half of the nodes (each sweep another) move to the part of most of their neighbours, the most eager first.
    `sizes`: nodes of each part at least, and at most."""
    (fewest, room), nodes, parts = sizes, len(labels), len(sizes[1])
    ids = np.arange(nodes)
    members = sparse.csr_array((np.ones(nodes, np.float32), labels, np.arange(nodes + 1)), shape=(nodes, parts))
    near = sparse.csr_array(matrix @ members)  # [nodes, parts]: neighbours in each part
    own_weight = np.asarray(near[ids, labels]).ravel()
    wanted = np.asarray(near.argmax(axis=1)).ravel()
    eager = np.asarray(near.max(axis=1).todense()).ravel() - own_weight
    movers = np.flatnonzero((eager > 0) & ((ids * 0x9E3779B1 >> 16) + sweep & 1 == 0))
    movers = movers[np.lexsort((movers, -eager[movers], wanted[movers]))]
    target = wanted[movers]
    turn = np.arange(len(movers)) - np.searchsorted(target, target)  # who is how manieth to enter a part
    counts = np.bincount(labels, minlength=parts)
    source = labels[movers]
    leaving = np.lexsort((movers, -eager[movers], source))
    out = np.empty(len(movers), np.int64)  # who is how manieth to leave one
    out[leaving] = np.arange(len(movers)) - np.searchsorted(source[leaving], source[leaving])
    moved = labels.copy()
    accepted = (turn < (room - counts)[target]) & (out < (counts - fewest)[source])
    moved[movers[accepted]] = target[accepted]
    return moved
