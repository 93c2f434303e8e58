"""Sequence slots: which tokens of a sequence each rank holds, and which blocks of attention are between two slots.

Zigzag: `2 n` blocks for `n` context slots, of which slot c holds blocks c and 2n-1-c, so that under a causal mask every
slot does the same work, at every step of the ring (LoongTrain, arXiv 2406.18485). Blocks may be unequal: with mirrored
lengths the work of a slot is proportional to its tokens, whatever the lengths are. No padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Disjoint `[start, stop)`, ascending."""
Bounds = tuple[tuple[int, ...], ...]
"""Of each row of a batch, where its documents begin, and last the length; one row where all rows are alike."""


class Block(NamedTuple):
    """Queries `[q_start, q_stop)` of one slot that see keys `[k_start, k_stop)` of another; positions in the slots."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool


@dataclass(frozen=True)
class SequenceSlots:
    """How the tokens of a sequence are divided among `context * heads` ranks. Immutable.

    Rank `number` of the sequence group holds piece `number % heads` of context slot `number // heads`.

    Attributes:
        length: tokens of the whole sequence.
        context: slots, between which keys and values travel; heads: ranks that share a slot.
        causal: whether slots are zigzag; else each is one run of tokens.
        shares: speeds of the slots, to which their tokens are proportional; empty: equal.
        head_shares: speeds of the ranks that share a slot, to which their tokens and heads are proportional.
    """

    length: int
    context: int = 1
    heads: int = 1
    causal: bool = True
    shares: tuple[float, ...] = ()
    head_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert not self.shares or len(self.shares) == self.context, "a share for each slot"
        fewest = min(min(self.pieces(slot)) for slot in range(self.context))
        if fewest < 1:
            raise UserError(
                f"A sequence of {self.length} tokens is too short for cp = {self.context} and hp = {self.heads}.",
                why="some rank would hold no token",
                do=f"sequences of {2 * self.context * self.heads} tokens or more, or fewer ranks along the sequence",
            )

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        speeds = self.shares or (1.0,) * self.context
        return divided(self.length, (*speeds, *(reversed(speeds) if self.causal else ())))

    def ranges(self, slot: int) -> Ranges:
        """The tokens of a context slot, by their positions in the sequence."""
        ends = self._ends
        if not self.causal:
            return ((ends[slot], ends[slot + 1]),)
        mirrored = 2 * self.context - 1 - slot
        return ((ends[slot], ends[slot + 1]), (ends[mirrored], ends[mirrored + 1]))

    def tokens(self, slot: int) -> int:
        """How many tokens a context slot has."""
        return sum(stop - start for start, stop in self.ranges(slot))

    def pieces(self, slot: int) -> list[int]:
        """How many tokens of a context slot each of its ranks holds."""
        ends = divided(self.tokens(slot), self.head_shares or (1.0,) * self.heads)
        return [stop - start for start, stop in pairwise(ends)]

    def index(self, number: int) -> NDArray[np.int64]:
        """The positions of the tokens that rank `number` holds, in its order."""
        slot, piece = divmod(number, self.heads)
        whole = np.concatenate([np.arange(start, stop) for start, stop in self.ranges(slot)])
        start = sum(self.pieces(slot)[:piece])
        return whole[start : start + self.pieces(slot)[piece]]

    def take(self, whole: Tensor, number: int, dim: int = -1) -> Tensor:
        """What rank `number` holds of something of the whole sequence: tokens, targets or positions alike."""
        import torch

        return whole.index_select(dim, torch.from_numpy(self.index(number)).to(whole.device))

    def join(self, parts: Sequence[Tensor], dim: int = -1) -> Tensor:
        """The whole sequence from what all ranks hold."""
        import torch

        order = np.argsort(np.concatenate([self.index(number) for number in range(len(parts))]))
        return torch.cat(list(parts), dim).index_select(dim, torch.from_numpy(order).to(parts[0].device))

    # --- blocks of attention -----------------------------------------------------------------------------------------

    def blocks(self, slot: int, other: int, bounds: tuple[int, ...]) -> list[Block]:
        """What queries of `slot` compute on the keys of `other`, for documents that begin at `bounds`. Blocks without
        any visible key are not among them."""
        mine = _runs(self, bounds)[slot]
        theirs = _runs(self, bounds)[other]
        blocks = []
        for document in np.flatnonzero((mine.size > 0) & (theirs.size > 0)):
            first = int(mine.first[document])
            size = int(mine.size[document])
            if self.causal and slot == other:
                blocks.append(Block(first, first + size, first, first + size, True))
                continue
            k_first = int(theirs.first[document])
            at = first
            rows: list[Block] = []
            for start, stop in mine.parts[:, document]:
                seen = theirs.before(int(document), int(start)) if self.causal else int(theirs.size[document])
                if stop > start and seen:
                    rows.append(Block(at, at + int(stop - start), k_first, k_first + seen, False))
                at += max(0, int(stop - start))
            if len(rows) == 2 and rows[0].k_stop == rows[1].k_stop:
                rows = [rows[0]._replace(q_stop=rows[1].q_stop)]
            blocks += rows
        return blocks

    def needed(self, owner: int, visitors: Sequence[int], bounds: Bounds) -> Ranges:
        """The positions in slot `owner` whose keys some of the `visitors` see: whole runs of documents."""
        needed: list[tuple[int, int]] = []
        for row in bounds:
            runs = _runs(self, row)
            last = np.max([runs[visitor].last for visitor in visitors], axis=0, initial=-1)
            seen = (runs[owner].size > 0) & ((runs[owner].start <= last) if self.causal else (last >= 0))
            needed += [
                (int(a), int(a + n)) for a, n in zip(runs[owner].first[seen], runs[owner].size[seen], strict=True)
            ]
        return _united(needed)


def shares_of(speeds: Sequence[float], heads: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`shares` and `head_shares` of `SequenceSlots` for ranks of these speeds, `heads` of which share a slot.

    Heads are divided alike in all slots, as keys and values of the same heads pass from slot to slot.
    """
    if not speeds:
        return (), ()
    slots = np.array(speeds).reshape(-1, heads)
    rows = slots.sum(1)
    return tuple(rows.tolist()), tuple((slots / rows[:, None]).sum(0).tolist())


def divided(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """The ends of runs of `count` things that are proportional to `speeds`, beginning with 0."""
    weights = np.cumsum([0.0, *speeds])
    return tuple(int(end) for end in np.floor(count * weights / weights[-1] + 1e-9))


class Runs(NamedTuple):
    """The documents of one row as one slot holds them; a document is one run of it. Arrays [documents] but `parts`.

    Attributes:
        parts: [ranges, documents, 2], positions in the sequence, by the slot's ranges.
        first: where the run begins in the slot; size: its tokens.
        start, last: the positions of its first and last token in the sequence; last is -1 where it has none.
    """

    parts: NDArray[Any]
    first: NDArray[Any]
    size: NDArray[Any]
    start: NDArray[Any]
    last: NDArray[Any]

    def before(self, document: int, position: int) -> int:
        """How many tokens of the run stand before `position` of the sequence, which is in none of its parts."""
        return sum(max(0, int(stop - start)) for start, stop in self.parts[:, document] if start < position)


@lru_cache(maxsize=512)
def _runs(slots: SequenceSlots, bounds: tuple[int, ...]) -> tuple[Runs, ...]:
    begins = np.array(bounds[:-1])
    ends = np.array(bounds[1:])
    runs = []
    for slot in range(slots.context):
        starts, stops = np.array(slots.ranges(slot)).T[:, :, None]
        parts = np.stack([np.maximum(starts, begins), np.minimum(stops, ends)], -1)
        sizes = np.maximum(0, parts[..., 1] - parts[..., 0])
        size = sizes.sum(0)
        begun = np.where(sizes > 0, parts[..., 0], slots.length).min(0)
        last = np.where(sizes > 0, parts[..., 1] - 1, -1).max(0)
        runs.append(Runs(parts, np.cumsum(size) - size, size, begun, last))
    return tuple(runs)


def _united(ranges: Sequence[tuple[int, int]]) -> Ranges:
    united: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(stop, united[-1][1]))
        else:
            united.append((start, stop))
    return tuple(united)


def bounds_of(documents: Tensor | None, length: int) -> Bounds:
    """Where the documents of each row begin; `documents`: int64 [batch, length] of whole sequences. Raises UserError
    where it is of other sequences, or one document is in several places."""
    if documents is None:
        return ((0, length),)
    if documents.dim() != 2 or documents.shape[1] != length:
        raise UserError(
            f"documents is {list(documents.shape)}, and the sequences have {length} tokens.",
            do=f"one number for each token of the whole sequence: int64 [batch, {length}]",
        )
    rows = []
    for row in documents.cpu().numpy():
        begins = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist()]
        if len(set(row[begins].tolist())) < len(begins):
            raise UserError("A document is in several places of one sequence.", do="a number of its own for each run")
        rows.append((*begins, length))
    return (rows[0],) if len(set(rows)) == 1 else tuple(rows)
