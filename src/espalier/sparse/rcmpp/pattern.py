"""What the orderings read of a matrix: where its entries are, checked, as unsigned arrays, each neighbour both ways."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from espalier.recipe.errors import UserError

LARGEST = 2**31 - 1
"""Node ids are held in 32 bits."""
LONG_ROWS = 12
"""Entries per row from which equal rows are looked for: finite elements with several unknowns at a node have more, and
the search then takes a sixth of the time of the pass before it."""


@dataclass(frozen=True, eq=False)
class SparsityPattern:
    """A square matrix's entries by rows, as given.

    Attributes:
        indptr: uint64 [nodes + 1]. indices: uint32 [entries], below `nodes`.
    """

    indptr: np.ndarray
    indices: np.ndarray

    @classmethod
    def of(cls, indptr: Any, indices: Any) -> SparsityPattern:
        """Checks two integer arrays (NumPy or torch). Raises UserError: ids outside it, offsets that fit not."""
        offsets = _integers(indptr, "indptr")
        ids = _integers(indices, "indices")
        nodes = len(offsets) - 1
        if nodes < 0 or nodes > LARGEST:
            raise UserError(
                f"indptr has {len(offsets)} values.", do="give one more than there are rows, of which 0 to 2³¹-1"
            )
        if offsets[0] != 0 or offsets[-1] != len(ids) or bool((offsets[1:] < offsets[:-1]).any()):
            raise UserError(
                f"indptr does not describe the {len(ids)} indices.",
                why="it must begin at 0, never descend, and end at their number",
                do="give the indptr and indices of one matrix by rows (CSR)",
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < nodes:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise UserError(
                f"indices holds {wrong}, outside a matrix of {nodes} rows and columns.",
                why="an order is for a square matrix: its columns are its rows",
                do=f"give ids from 0 to {nodes - 1}; for a matrix A that is not square, order A·Aᵀ",
            )
        return cls(offsets.astype(np.uint64), np.require(ids, np.int32, ["C", "W"]).view(np.uint32))

    @property
    def nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def entries(self) -> int:
        return len(self.indices)

    @cached_property
    def both_ways(self) -> Neighbours:
        """The pattern of A + Aᵀ with each neighbour once."""
        from espalier.sparse.rcmpp import pattern_passes

        degree = np.empty(self.nodes, np.uint32)
        sums = np.empty(self.nodes if self.entries >= LONG_ROWS * self.nodes else 0, np.uint64)
        asymmetry, disorder = pattern_passes.scan(self.indptr, self.indices, degree, sums)
        indptr = self.indptr
        indices = self.indices
        if asymmetry or (disorder and pattern_passes.repeats(indptr, indices)):
            indptr, indices = pattern_passes.united(indptr, indices)
            pattern_passes.scan(indptr, indices, degree, sums)
        same = np.zeros(self.nodes, np.bool_)
        count = int(pattern_passes.twins(degree, sums, same)) if len(sums) else 0
        return Neighbours(indptr, indices, degree, same, count)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """A symmetric pattern.

    Attributes:
        indptr: uint64 [nodes + 1]. indices: uint32 [entries], no id twice in a row; self-loops may be there.
        degree: uint32 [nodes], self-loops not counted.
        same: bool [nodes], the row names the nodes that an earlier row names. twins: how many rows do.
    """

    indptr: np.ndarray
    indices: np.ndarray
    degree: np.ndarray
    same: np.ndarray
    twins: int


def positions(permutation: Any, nodes: int) -> np.ndarray:
    """uint32 [nodes]: where each node goes under `permutation` (`permutation[new] = old`; None: it stays).

    Raises UserError if that is not a permutation of the nodes.
    """
    if permutation is None:
        return np.arange(nodes, dtype=np.uint32)
    old = _integers(permutation, "permutation")
    places = np.full(nodes, nodes, np.uint32)
    if len(old) == nodes and not (nodes and (int(old.min()) < 0 or int(old.max()) >= nodes)):
        places[old] = np.arange(nodes, dtype=np.uint32)
    if len(old) != nodes or bool((places == nodes).any()):
        raise UserError(
            f"permutation is not one of {nodes} nodes.",
            why="it must hold every id from 0 once",
            do="give what rcmpp returned for this matrix",
        )
    return places


def like(order: np.ndarray, given: Any) -> Any:
    """`order` as the user's own kind: tensor or array, on `given`'s device, int32 or int64 as `given`."""
    if isinstance(given, torch.Tensor):
        dtype = torch.int32 if given.dtype == torch.int32 else torch.int64
        return torch.from_numpy(order.astype(np.int64)).to(given.device, dtype)
    return order.astype(np.int32 if np.asarray(given).dtype == np.int32 else np.int64)


def _integers(values: Any, name: str) -> np.ndarray:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise UserError(
            f"{name} is an array of {array.dtype} with {array.ndim} axes.", do="give integers along one axis"
        )
    return array
