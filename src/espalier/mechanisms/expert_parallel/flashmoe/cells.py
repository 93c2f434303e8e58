"""Cells: which rows a rank sends to which, in tiles. Pure tables of one layer's routing.

A cell is what one source sends for one expert: first its fresh rows, then references to rows that an earlier expert of
the same rank got already, so that a token for two experts of one rank crosses the link once. Counts go ahead of rows
(FlashMoE, arXiv 2506.04667, sections 3.1 and 3.3, where cells have a fixed size): a cell is as large as its tokens, and
nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.parallel.expert_map import ExpertMap

if TYPE_CHECKING:
    from jaxtyping import Int

ROWS = 128
"""Rows of a tile at least (FlashMoE's bM)."""
TILE_BYTES = 2**18
"""Bytes of a tile at least: a message of a quarter MiB hides what it costs to send one."""


class Tile(NamedTuple):
    """A run of a cell's entries: what an expert works on at once.

    Attributes:
        expert: of those of the rank that holds it.
        start, stop: of its entries among all that the source has for that rank.
        fresh, until: its fresh rows among all of the source's for that rank.
        refs, refs_until: its references among all of these.
    """

    expert: int
    start: int
    stop: int
    fresh: int
    until: int
    refs: int
    refs_until: int


def tiles_of(counts: Sequence[tuple[int, int]], rows: int) -> list[Tile]:
    """The tiles of a source, in the order in which they are sent.

    Args:
        counts: of each expert of the rank, fresh rows and references.
        rows: of a tile at most.
    """
    tiles: list[Tile] = []
    entries = fresh = refs = 0
    for expert, (new, again) in enumerate(counts):
        for start in range(0, new + again, rows):
            stop = min(start + rows, new + again)
            span = (min(start, new), min(stop, new), max(start - new, 0), max(stop - new, 0))
            a, b, c, d = span
            tiles.append(Tile(expert, entries + start, entries + stop, fresh + a, fresh + b, refs + c, refs + d))
        entries = entries + new + again
        fresh = fresh + new
        refs = refs + again
    return tiles


def tile_rows(width: int, element_bytes: int) -> int:
    """Rows of a tile of so wide tokens."""
    return max(ROWS, TILE_BYTES // max(1, width * element_bytes))


@dataclass(frozen=True)
class Outgoing:
    """What one rank sends another. Immutable.

    Attributes:
        counts: of each expert there, fresh rows and references.
        tokens: int64 [fresh rows]; refs: int32 [references], each a fresh row.
        choices: int64 [entries] of all tokens' choices (token x active + choice).
    """

    counts: tuple[tuple[int, int], ...]
    tokens: Int[Tensor, " fresh"]
    refs: Int[Tensor, " refs"]
    choices: Int[Tensor, " entries"]

    @property
    def header(self) -> Int[Tensor, " numbers"]:
        """The counts as int32 [2 x experts]: the first message."""
        return torch.tensor(self.counts, dtype=torch.int32).flatten()

    def on(self, device: torch.device) -> Outgoing:
        """With what indexes tokens and answers on their device; references are a message."""
        return replace(self, tokens=self.tokens.to(device), choices=self.choices.to(device))


def outgoing(chosen: Int[Tensor, "tokens active"], experts: ExpertMap) -> list[Outgoing]:
    """What this rank sends to each rank of the map, itself included."""
    tokens, active = chosen.shape
    owner = torch.tensor([rank for rank, size in enumerate(experts.sizes) for _ in range(size)])
    position, choice = experts.positions(chosen.device)[chosen].cpu().sort(1)
    ranks = owner[position]
    again = torch.zeros_like(ranks, dtype=torch.bool)
    again[:, 1:] = ranks[:, 1:] == ranks[:, :-1]
    place = torch.arange(active).expand(tokens, active)
    first = torch.where(again, 0, place).cummax(1).values  # where the run of one rank begins
    order = (2 * position + again).flatten().argsort(stable=True)
    counts = (2 * position + again).flatten().bincount(minlength=2 * experts.count).view(-1, 2)
    base = torch.arange(tokens).unsqueeze(1) * active
    flat_again = again.flatten()[order]
    parent = (base + first).flatten()[order]
    slots = (base + choice).flatten()[order]
    row = torch.empty(tokens * active, dtype=torch.int64)
    messages = []
    at = 0
    for mine in counts.split(experts.sizes):
        span = slice(at, at + int(mine.sum()))
        fresh = order[span][~flat_again[span]]
        row[fresh] = torch.arange(len(fresh))
        refs = row[parent[span][flat_again[span]]].int()
        messages.append(Outgoing(tuple(map(tuple, mine.tolist())), fresh // active, refs, slots[span]))
        at = span.stop
    return messages
