"""Builds the compressed form of a binary matrix: similar rows, the tree that joins them, the differences along it.

Exact: every pair of rows that shares a column is looked at, as in A·Aᵀ, and the tree is the cheapest there is. Fast:
only rows whose MinHash signatures sort near each other; for matrices where A·Aᵀ would cost too much, because some
columns are in very many rows. Both are exact in what they multiply.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.recipe.offsets import offsets_of
from espalier.sparse.csr import CSR

Search = Literal["exact", "fast"]

EXACT_WORK = 400
"""Exact search up to this many comparisons for each entry: about 1 ns each, so about 20 products at 128 columns."""
SORTS, WINDOW = 6, 8
"""Fast search: rows are sorted by signature this often, and each is compared with this many after it: more than nine
tenths of the exact compression on the cliques of bench/cbm.py."""
PIECES = 64
"""Pieces of work of a product, as many as a plain product has."""
HEAVY = 64
"""A subtree with more than this share (1/64) of all work hangs at the root, so that threads can share the work ..."""
LIGHT = 1 << 16
"""... but none with fewer entries than this, some 50 µs at 16 columns."""


class Pairs(NamedTuple):
    """Rows u < v that may be each other's parent, and the length h of their difference; int32 [pairs]."""

    u: Any
    v: Any
    h: Any


@dataclass(frozen=True, eq=False)
class Deltas:
    """Rows as differences from their parents, in an order in which each parent comes before its children.

    Attributes:
        order: int32 [rows], the row at each place. parent: int32 [rows], at each place the parent's row, -1 for none.
        plus_ptr, minus_ptr: int32 [rows + 1]; plus, minus: int32, columns that the row has more or less.
        cuts: int64 [pieces + 1], places at which whole branches end.
    """

    order: Tensor
    parent: Tensor
    plus_ptr: Tensor
    plus: Tensor
    minus_ptr: Tensor
    minus: Tensor
    cuts: Tensor

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """All of them as NumPy arrays, for kernels: made once, since a small product would notice."""
        return tuple(getattr(self, field.name).numpy() for field in fields(self))

    @property
    def differences(self) -> int:
        """Entries of all differences."""
        return len(self.plus) + len(self.minus)

    @property
    def edges(self) -> int:
        """Rows that have a parent: each adds one row of the result."""
        return int((self.parent >= 0).sum())

    @property
    def additions(self) -> int:
        """Rows added or subtracted in a product; never more than the matrix has entries."""
        return self.differences + self.edges

    def bytes(self) -> int:
        """Of the arrays that say which rows are added."""
        arrays = (self.order, self.parent, self.plus_ptr, self.plus, self.minus_ptr, self.minus)
        return 4 * sum(map(len, arrays))

    def depth(self) -> int:
        """Rows on the longest way from the root."""
        depth = np.zeros(len(self.order), dtype=np.int64)
        for row, above in zip(self.order.tolist(), self.parent.tolist(), strict=True):
            depth[row] = 1 if above < 0 else depth[above] + 1
        return int(depth.max(initial=0))

    def branches(self) -> Tensor:
        """Rows of each branch below the root, int64."""
        starts = torch.nonzero(self.parent < 0).flatten()
        return torch.cat([starts, torch.tensor([len(self.order)])]).diff()


def compress(matrix: CSR, alpha: int, search: Search | None = None) -> Deltas:
    """The differences of binary `matrix`. A row has a parent only where that saves more than `alpha` entries.

    `similar_rows`: "exact" or "fast"; None takes the exact one where its work is bounded (see `EXACT_WORK`).
    """
    if search is None:
        search = "exact" if comparisons(matrix) <= EXACT_WORK * max(1, matrix.entries) else "fast"
    pairs = overlaps(matrix, alpha) if search == "exact" else near(matrix, alpha)
    return written(matrix, parents(matrix, pairs, alpha))


def comparisons(matrix: CSR) -> int:
    """Pairs of rows met in A·Aᵀ, u < v, counted once for each column they share."""
    met = torch.bincount(matrix.indices, minlength=matrix.shape[1])
    return int((met * (met - 1) // 2).sum())


def overlaps(matrix: CSR, alpha: int) -> Pairs:
    """All pairs of rows of which one saves more than `alpha` entries as a difference from the other."""
    from espalier.sparse.cbm import similar_rows

    by_column = matrix.transpose.pattern
    signed = (matrix.indptr, matrix.indices, by_column.indptr, by_column.indices)
    arrays = tuple(array.numpy().view(f"uint{8 * array.element_size()}") for array in signed)
    similar_rows.overlaps.compile()  # before the threads share it
    return _shared_out(lambda first, last: similar_rows.overlaps(*arrays, first, last, alpha), matrix)


def near(matrix: CSR, alpha: int) -> Pairs:
    """Such pairs among rows whose signatures are neighbours in one of several sortings."""
    from espalier.sparse.cbm import similar_rows

    indptr = matrix.indptr.numpy()
    indices = matrix.indices.numpy()
    factors = np.random.default_rng(0).integers(1 << 62, 1 << 63, SORTS + 2, dtype=np.uint64) * 2 + 1
    least = np.empty((matrix.shape[0], len(factors)), dtype=np.uint32)
    similar_rows.signatures(least, indptr, indices, factors)
    similar_rows.near.compile()  # before the threads share it
    pairs = []
    for sort in range(SORTS):
        order = np.lexsort((least[:, (sort + 2) % len(factors)], least[:, sort + 1], least[:, sort])).astype(np.int32)

        def look(first: int, last: int, order: Any = order) -> Any:
            return similar_rows.near(indptr, indices, order, least, WINDOW, first, last, alpha, matrix.shape[1])

        pairs.append(_shared_out(look, matrix))
    return Pairs(*(np.concatenate(parts) for parts in zip(*pairs, strict=True)))


def _shared_out(look: Any, matrix: CSR) -> Pairs:
    """`look(first row, last row)` of pieces of the matrix, by as many threads as torch uses."""
    cuts = matrix.cuts.tolist()
    if len(cuts) == 1:  # no rows
        return Pairs(*(np.empty(0, dtype=np.int32) for _ in Pairs._fields))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = list(pool.map(look, cuts[:-1], cuts[1:]))
    return Pairs(*(np.concatenate(kind) for kind in zip(*parts, strict=True)))


def parents(matrix: CSR, pairs: Pairs, alpha: int) -> Any:
    """int32 [rows]: each row's parent in the cheapest tree, -1 for the root.

    Without `alpha` lengths are symmetric, and a minimum spanning tree is the cheapest arborescence: its edges never
    cost more than the root's, or the root would have been nearer. With it, edges that save too little are forbidden in
    one direction only, and Edmonds' algorithm is needed.
    """
    from espalier.sparse.cbm.arborescence import arborescence
    from espalier.sparse.cbm.similar_rows import spanning_tree

    degrees = matrix.degrees.numpy()
    return spanning_tree(degrees, *pairs) if alpha == 0 else arborescence(degrees, *pairs, alpha)


def written(matrix: CSR, parent: Any) -> Deltas:
    """The differences along the tree of `parent` [rows]; heavy subtrees are cut off for the sake of the threads."""
    from espalier.sparse.cbm import deltas, similar_rows

    indptr = matrix.indptr.numpy()
    indices = matrix.indices.numpy()
    order = similar_rows.preorder(parent)
    more, less = _measured(matrix, order, parent)
    weights = np.empty(matrix.shape[0], dtype=np.int64)
    weights[order] = more + less + 1
    cut = deltas.cut_branches(order, parent, weights, max(LIGHT, int(weights.sum()) // HEAVY))
    if not np.array_equal(cut, parent):
        parent = cut
        order = similar_rows.preorder(cut)
        more, less = _measured(matrix, order, parent)
    plus_ptr, minus_ptr = (offsets_of(part).astype(np.int32) for part in (more, less))
    plus = np.empty(plus_ptr[-1], dtype=np.int32)
    minus = np.empty(minus_ptr[-1], dtype=np.int32)
    deltas.write(indptr, indices, order, parent, plus_ptr, plus, minus_ptr, minus)
    above = parent[order]
    arrays = (order, above, plus_ptr, plus, minus_ptr, minus, _pieces(above, more + less + 1))
    return Deltas(*(torch.from_numpy(array) for array in arrays))


def _measured(matrix: CSR, order: Any, parent: Any) -> tuple[Any, Any]:
    from espalier.sparse.cbm import deltas

    more = np.empty(len(order), dtype=np.int64)
    less = np.empty(len(order), dtype=np.int64)
    deltas.measure(matrix.indptr.numpy(), matrix.indices.numpy(), order, parent, more, less)
    return more, less


def _pieces(above: Any, weights: Any) -> Any:
    """Places where branches start, chosen so that the pieces between them weigh about the same."""
    starts = np.flatnonzero(above < 0)
    if len(starts) == 0:
        return np.array([0], dtype=np.int64)
    total = np.cumsum(weights)
    wanted = np.searchsorted(total, np.linspace(0, total[-1], PIECES + 1)[1:-1])
    cuts = starts[np.minimum(np.searchsorted(starts, wanted), len(starts) - 1)]
    return np.unique(np.concatenate([[0], cuts, [len(above)]])).astype(np.int64)
