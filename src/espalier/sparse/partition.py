"""Parts of a graph: about as many nodes in each, few edges between them. By METIS where it is installed.

METIS: Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998, through pymetis (extra `graph`). Else our own sweeps: equal
pieces of the RCM++ order, whose nodes then move to where most of their neighbours are, as far as there is room (label
propagation with capacities, after Ugander and Backstrom, WSDM 2013).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from scipy import sparse

from espalier.errors import UserError
from espalier.sparse.rcmpp.cuthill_mckee import trace
from espalier.sparse.rcmpp.pattern import Pattern

SLACK = 0.03
"""A part may be this much larger than the mean: METIS's own default (its ufactor 30)."""
SWEEPS = 10
"""Half of the nodes may move in each, so each node five times. A choice, not a measurement."""


def clusters(indptr: Any, indices: Any, parts: int) -> np.ndarray:
    """The part of each node, int32 [nodes] in 0 .. parts-1; deterministic.

    `indptr` [nodes + 1] and `indices` [entries] as for `rcmpp`; directions and repeated entries do not matter.
    Raises UserError: arrays that fit not, or a number of parts that is not between 1 and the number of nodes.
    """
    pattern = Pattern.of(indptr, indices)
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= max(1, pattern.nodes):
        raise UserError(
            f"parts={parts!r} cannot be made of {pattern.nodes} nodes.", do=f"parts from 1 to {max(1, pattern.nodes)}"
        )
    if parts == 1:
        return np.zeros(pattern.nodes, np.int32)
    return by_metis(pattern, parts) if importlib.util.find_spec("pymetis") else by_sweeps(pattern, parts)


def by_metis(pattern: Pattern, parts: int) -> np.ndarray:
    """As `clusters`, by METIS."""
    import pymetis

    matrix = symmetric(pattern)
    rows = pymetis.CSRAdjacency(matrix.indptr, matrix.indices)
    found = pymetis.part_graph(parts, rows, options=pymetis.Options(seed=1))
    return np.asarray(found.vertex_part, np.int32)


def by_sweeps(pattern: Pattern, parts: int) -> np.ndarray:
    """As `clusters`, without METIS: never a larger cut than that of equal pieces of the RCM++ order."""
    nodes, matrix = pattern.nodes, symmetric(pattern)
    labels = np.empty(nodes, np.int32)
    labels[trace(pattern).permutation] = np.arange(nodes) * parts // max(1, nodes)
    best, least = labels, cut(matrix, labels)
    room = int(np.ceil(nodes / parts * (1 + SLACK)))
    for sweep in range(SWEEPS):
        labels = _moved(matrix, labels, parts, room, sweep)
        if (found := cut(matrix, labels)) < least:
            best, least = labels, found
    return best


def symmetric(pattern: Pattern) -> sparse.csr_array:
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


def _moved(matrix: sparse.csr_array, labels: np.ndarray, parts: int, room: int, sweep: int) -> np.ndarray:
    """Half of the nodes (each sweep another) move to the part of most of their neighbours, the most eager first."""
    nodes = len(labels)
    ids = np.arange(nodes)
    members = sparse.csr_array((np.ones(nodes, np.float32), labels, np.arange(nodes + 1)), shape=(nodes, parts))
    near = sparse.csr_array(matrix @ members)  # [nodes, parts]: neighbours in each part
    own = np.asarray(near[ids, labels]).ravel()
    wanted = np.asarray(near.argmax(axis=1)).ravel()
    eager = np.asarray(near.max(axis=1).todense()).ravel() - own
    movers = np.flatnonzero((eager > 0) & ((ids * 0x9E3779B1 >> 16) + sweep & 1 == 0))
    movers = movers[np.lexsort((movers, -eager[movers], wanted[movers]))]
    target = wanted[movers]
    turn = np.arange(len(movers)) - np.searchsorted(target, target)  # who is how manieth to enter a part
    free = room - np.bincount(labels, minlength=parts)
    moved = labels.copy()
    accepted = turn < free[target]
    moved[movers[accepted]] = target[accepted]
    return moved
