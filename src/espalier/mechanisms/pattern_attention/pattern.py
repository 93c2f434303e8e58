"""Attention pattern: which tokens each token attends to. Edges, self-loops, a path, expanders, virtual nodes.

Expander edges after Exphormer (arXiv 2303.06147, section 3.1): the union of random permutations, both ways. A virtual
token attends to all tokens, and all to it. The path through the tokens in their order makes the conditions true under
which sparse attention approximates what full attention does (Yun et al., arXiv 2006.04862).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.mechanisms.pattern_attention.edge_attention import Entries
from espalier.recipe import data_hash
from espalier.recipe.cache_dir import cache_folder, hashed, keep_made
from espalier.recipe.errors import UserError
from espalier.recipe.offsets import offsets_of
from espalier.sparse import CSR
from espalier.sparse.csr import balanced_cuts

ROWS = 16
"""Rows of a window, as in `window_kernels`."""
KEPT, FORMAT = 1 << 21, 1
"""Entries from which on windows are kept on disk; another number where the same entries are divided otherwise."""
ARRAYS = ("windows", "columns", "masks", "starts", "entries", "rest indptr", "rest indices", "rest entries")
"""Of kept windows."""


class Windows(NamedTuple):
    """Windows of 16 rows with the columns that enough of them read, compacted, and the entries that are left over.

    Attributes:
        windows: int64 [windows + 1], where each window's columns begin; columns: int32.
        masks: int32, of each column, which of the window's rows read it.
        starts: int64 [columns + 1], where each column's entries begin; entries: int64, their numbers in the pattern.
        rest: the pattern without them; rest_entries: int64, the numbers of its entries.
    """

    windows: Tensor
    columns: Tensor
    masks: Tensor
    starts: Tensor
    entries: Tensor
    rest: CSR
    rest_entries: Tensor

    @property
    def cuts(self) -> Any:
        """int64: windows that cut the work into pieces with about as many columns."""
        return balanced_cuts(self.windows.numpy())


def windows_of(matrix: CSR, least: int) -> Windows:
    """The windows of `matrix` with the columns that at least `least` rows of a window read."""
    rows = matrix.rows.numpy()
    columns = matrix.indices.numpy()
    keys = (rows // ROWS) * np.int64(matrix.shape[1]) + columns
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(first, len(keys)))
    dense = sizes >= least
    in_windows = np.repeat(dense, sizes)
    masks = np.bitwise_or.reduceat(1 << (rows[order] % ROWS), first) if len(keys) else first
    window = keys[first[dense]] // matrix.shape[1]
    count = -(-matrix.shape[0] // ROWS)
    windows = offsets_of(np.bincount(window, minlength=count))
    left = np.sort(order[~in_windows])
    rest = CSR(offsets(rows[left], matrix.shape[0]), matrix.indices[torch.from_numpy(left)], matrix.shape)
    arrays = (
        windows,
        columns[order[first[dense]]].astype(np.int32),
        masks[dense].astype(np.int32),
        offsets_of(sizes[dense]),
        order[in_windows].astype(np.int64),
    )
    a, b, c, d, e = map(torch.from_numpy, arrays)
    return Windows(a, b, c, d, e, rest, torch.from_numpy(left))


def kept_windows(matrix: CSR, least: int) -> Windows:
    """As `windows_of`; of many entries from the cache folder, where the same ones were divided before."""
    if matrix.entries < KEPT:
        return windows_of(matrix, least)
    name = hashed(
        [data_hash.of_arrays(matrix.indptr.numpy(), matrix.indices.numpy()), list(matrix.shape), ROWS, least, FORMAT]
    )
    place = cache_folder() / "windows" / f"{name}.safetensors"
    with suppress(OSError, SafetensorError, KeyError):
        tensors = load_file(place)
        a, b, c, d, e, indptr, indices, entries = (tensors[name] for name in ARRAYS)
        return Windows(a, b, c, d, e, CSR(indptr, indices, matrix.shape), entries)
    made = windows_of(matrix, least)
    known = (*made[:5], made.rest.indptr, made.rest.indices, made.rest_entries)
    with suppress(SafetensorError):
        keep_made(place, lambda file: save_file(dict(zip(ARRAYS, known, strict=True)), file))
    return made


def offsets(rows: Any, count: int) -> Tensor:
    """int64 [count + 1]: where each row begins, given the row of each entry."""
    return torch.from_numpy(offsets_of(np.bincount(rows, minlength=count)))


class Divided(NamedTuple):
    """A pattern for one plan: its windows and those of its transpose; None: entry by entry."""

    by_row: Windows | None
    by_column: Windows | None


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which tokens each token attends to. Immutable; keeps what plans have made of it.

    Attributes:
        matrix: [tokens, tokens], row = the token that attends; None: every token attends to all.
        tokens: how many there are.
        kinds: int8 [entries], 0 a self-loop, 1 an edge of the graph, 2 added (path, expander), 3 a virtual token's.
    """

    matrix: CSR | None
    tokens: int
    kinds: Tensor | None = None

    @classmethod
    def full(cls, tokens: int) -> Pattern:
        """Every token attends to every one."""
        return cls(None, tokens)

    @classmethod
    def of(cls, matrix: CSR) -> Pattern:
        """The places of the entries of a square matrix, each once: a repeated entry is one, with one bias (`entries`,
        `entry`). Raises UserError where it is not square."""
        if matrix.shape[0] != matrix.shape[1]:
            raise UserError(
                f"A pattern of attention is square; this matrix is {matrix.shape[0]} x {matrix.shape[1]}.",
                do="one row and one column for each token",
            )
        return cls(matrix.binary().coalesced(), matrix.shape[0])

    @property
    def entries(self) -> int:
        """Pairs of tokens."""
        return self.tokens**2 if self.matrix is None else self.matrix.entries

    @property
    def device(self) -> torch.device:
        """Where its arrays are."""
        return torch.device("cpu") if self.matrix is None else self.matrix.device

    @cached_property
    def identity(self) -> str:
        """Of what is in it: 16 hexadecimal digits."""
        digest = xxhash.xxh3_64(str(self.tokens).encode())
        for array in () if self.matrix is None else self.matrix.arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @cached_property
    def _entries(self) -> dict[torch.device, Entries]:
        return {}

    def on(self, device: torch.device) -> Entries:
        """Its entries by rows and by columns on `device`; made once."""
        if device not in self._entries:
            assert self.matrix is not None
            self._entries[device] = Entries.of(self.matrix, device)
        return self._entries[device]

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """The plan that `auto` is, under its name, where it was measured (`plan_choice`)."""
        return {}

    @cached_property
    def _divided(self) -> dict[int, Divided]:
        return {}

    def forget(self, keep: int) -> None:
        """Drops what was made for plans with another `least`."""
        for least in set(self._divided) - {keep}:
            del self._divided[least]

    def divided(self, least: int) -> Divided:
        """For a plan whose windows hold the columns that `least` of their rows read; 0: no windows."""
        if least not in self._divided:
            assert self.matrix is not None
            both = (self.matrix, self.matrix.transpose.pattern) if 0 < least <= ROWS else (None, None)
            self._divided[least] = Divided(*(None if csr is None else kept_windows(csr, least) for csr in both))
        return self._divided[least]

    def dense_columns(self, least: int) -> tuple[int, int]:
        """How many columns of windows at least `least` rows read, and how many entries they hold; makes nothing."""
        assert self.matrix is not None
        dense = self._column_sizes[self._column_sizes >= least]
        return len(dense), int(dense.sum())

    @cached_property
    def _column_sizes(self) -> Any:
        """int64: of each column that a window reads, how many of its rows do."""
        assert self.matrix is not None
        keys = np.sort((self.matrix.rows // ROWS * self.tokens + self.matrix.indices).numpy())
        return np.diff(np.concatenate([[-1], np.flatnonzero(keys[1:] != keys[:-1]), [len(keys) - 1]]))

    def entry(self, sources: Any, targets: Any) -> Tensor:
        """int64: the number of each entry [target, source], to fill in a bias. Raises UserError for one that is not
        in the pattern."""
        assert self.matrix is not None, "a full pattern has a dense bias"
        rows, columns = (torch.as_tensor(ids).long().cpu() for ids in (targets, sources))
        asked = rows * self.tokens + columns
        keys = self.matrix.rows * self.tokens + self.matrix.indices
        entries = torch.searchsorted(keys, asked).clamp(max=max(0, len(keys) - 1))
        wrong = torch.nonzero(keys[entries] != asked).flatten() if len(keys) else torch.arange(len(asked))
        if len(wrong):
            pair = int(asked[wrong[0]]) % self.tokens, int(asked[wrong[0]]) // self.tokens
            raise UserError(f"The pattern has no entry {pair[0]} -> {pair[1]}.", do="the edges it was made of")
        return entries

    def dense(self) -> Tensor:
        """bool [tokens, tokens]: the mask of dense attention."""
        if self.matrix is None:
            return torch.ones(self.tokens, self.tokens, dtype=torch.bool)
        return self.matrix.to_dense() > 0


@dataclass(frozen=True)
class Additions:
    """What a pattern holds besides the edges of a graph.

    Attributes:
        loops: every token attends to itself.
        path: each token and the next attend to one another.
        virtual: tokens behind the last one that attend to all, one another included, and all to them.
        expander: random permutations whose edges are added, both ways (each adds 2 to the degree).
        seed: of the permutations.
        sizes: int64 [graphs], nodes of each of several graphs side by side: nothing is added between two of them, and
            each has virtual tokens of its own. None: one graph.
        complete: every node and its graph's others attend to one another.
    """

    loops: bool = True
    path: bool = False
    virtual: int = 0
    expander: int = 0
    seed: int = 0
    sizes: Tensor | None = None
    complete: bool = False


def pattern(edges: Any, nodes: int, additions: Additions | None = None) -> Pattern:
    """The pattern of a graph's edges int64 [2, edges], sources above targets, and of what `additions` names.

    Its tokens are the nodes, then the virtual ones. An edge given twice is one entry. Edges may be on any device; the
    pattern is in host memory.

    Raises UserError: ids outside the graph, no node, negative counts.
    """
    added = additions or Additions()
    if nodes < 1 or added.virtual < 0 or added.expander < 0:
        raise UserError(
            f"nodes = {nodes}, virtual = {added.virtual} and expander = {added.expander} make no pattern.",
            do="at least one node, and counts that are not negative",
        )
    edges = torch.as_tensor(edges).long().reshape(2, -1).cpu()
    if edges.numel() and (int(edges.min()) < 0 or int(edges.max()) >= nodes):
        raise UserError(
            f"edges names nodes from {int(edges.min())} to {int(edges.max())}; there are {nodes}.",
            do="ids from 0 to nodes - 1",
        )
    groups = torch.tensor([nodes]) if added.sizes is None else added.sizes.cpu()
    if int(groups.sum()) != nodes:
        raise UserError(
            f"sizes sum up to {int(groups.sum())}, and there are {nodes} nodes.", do="the nodes of each graph"
        )
    owner = torch.repeat_interleave(torch.arange(len(groups)), groups)
    tokens = nodes + added.virtual * len(groups)
    loops = edges[0] == edges[1]
    each = torch.arange(nodes, tokens).view(-1, len(groups))  # virtual tokens: of each graph, one column
    kinds = (
        [torch.arange(tokens).expand(2, -1) if added.loops else edges[:, loops]],
        [edges[:, ~loops]],
        _added(added, groups, owner),
        [_both(row[owner], torch.arange(nodes)) for row in each]
        + [_both(first, second) for first, second in combinations(each, 2)],
    )
    whole = torch.cat([torch.cat([edges[:, :0], *pieces], 1) for pieces in kinds], 1)
    counts = torch.tensor([sum(piece.shape[1] for piece in pieces) for pieces in kinds])
    kind = torch.repeat_interleave(torch.arange(len(kinds), dtype=torch.int8), counts)
    keys = whole[1] * tokens + whole[0]
    order = torch.argsort(keys, stable=True)  # the first of several is kept: an edge stays an edge
    keys = keys[order]
    fresh = torch.ones(len(keys), dtype=torch.bool)
    fresh[1:] = keys[1:] != keys[:-1]
    unique = order[fresh]
    rows = whole[1][unique]
    columns = whole[0][unique]
    matrix = CSR(offsets(rows.numpy(), tokens), columns.int(), (tokens, tokens))
    return Pattern(matrix, tokens, kind[unique])


def _added(added: Additions, groups: Tensor, owner: Tensor) -> list[Tensor]:
    """Edges [2, edges] of the path, of the permutations and of all pairs, inside each graph."""
    every = torch.arange(len(owner))
    edges = []
    if added.path:
        inside = owner[:-1] == owner[1:]
        edges.append(_both(every[:-1][inside], every[1:][inside]))
    starts = groups.cumsum(0) - groups
    for number in range(added.expander):
        shuffled = torch.from_numpy(np.random.default_rng([added.seed, number]).permutation(len(owner)))
        order = shuffled[torch.argsort(owner[shuffled], stable=True)]
        following = torch.where(every + 1 == (starts + groups)[owner], starts[owner], every + 1)
        edges.append(_both(order, order[following]))
    if added.complete:
        count = groups[owner]
        targets = torch.repeat_interleave(every, count)
        before = torch.repeat_interleave(count.cumsum(0) - count, count)
        edges.append(torch.stack([torch.arange(len(targets)) - before + starts[owner][targets], targets]))
    return edges


def _both(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([torch.stack([left, right]), torch.stack([right, left])], 1)
