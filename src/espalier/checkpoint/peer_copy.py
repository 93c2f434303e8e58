"""Peer copies: copies of another rank's state, for when its machine is lost. After Gemini (SOSP 2023), section 4.

Rank r's are kept by rank r + g of W, g being the least distance at which no two ranks are of one machine. Every copy is
passed on as it lies in memory and known to be whole by its hash, there as here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.checkpoint.coordination import Coordinator

_PIECE = 2**28
"""Bytes of a message: Gloo counts them in 32 bits."""


class SavedCopy(Protocol):
    """What is needed of `in_memory.CopySlot`."""

    @property
    def step(self) -> int:
        """Of the copy; -1: there is none."""

    def good(self) -> bool:
        """Whether it is whole."""

    def clear(self) -> None:
        """There is none any more."""

    def content(self, size: int | None = None) -> Tensor:
        """[size] bytes of the copy, or of room for one."""


def distance(nodes: Sequence[int]) -> int:
    """g, where `nodes` says the machine of each rank; 0: there is none, as where one has most of the ranks."""
    world = len(nodes)
    return next(
        (gap for gap in range(1, world) if all(nodes[r] != nodes[(r + gap) % world] for r in range(world))), 0
    )  # fmt: skip


class Partner:
    """What this rank keeps for another. Has state: those copies.

    Args:
        team: the ranks.
        slots: where the copies lie.
        apart: g, at least 1.
    """

    def __init__(self, team: Coordinator, slots: Sequence[SavedCopy], apart: int) -> None:
        self._team = team
        self._slots = slots
        self._apart = apart
        self.of = (team.rank - apart) % team.world

    def keeps(self, rank: int) -> int:
        """Who keeps the copies of `rank`."""
        return (rank + self._apart) % self._team.world

    def stored_steps(self) -> set[int]:
        """The steps of which there is a whole copy here."""
        return {slot.step for slot in self._slots if slot.good()}

    def copy(self, step: int) -> SavedCopy:
        """The copy of `step`, which is one of the `stored_steps`."""
        return next(slot for slot in self._slots if slot.step == step)

    def pass_on(self, copy: SavedCopy) -> None:
        """Sends a rank's `copy` to who keeps it, and takes the one that is kept here. All ranks call it."""
        content = copy.content()
        size = torch.zeros(1, dtype=torch.int64)
        self._swap(torch.tensor([len(content)]), size)
        self._swap(content, min(self._slots, key=lambda slot: slot.step).content(int(size)))

    def _swap(self, going: Tensor, coming: Tensor) -> None:
        group = self._team.group
        for away, room in zip_longest(going.split(_PIECE), coming.split(_PIECE)):
            works: list[Any] = []
            if room is not None:
                works.append(dist.irecv(room, group=group, group_src=self.of))
            if away is not None:
                works.append(dist.isend(away, group=group, group_dst=self.keeps(self._team.rank)))
            for work in works:
                work.wait()

    def begin(self, step: int) -> None:
        """The run goes on from `step`: later copies are of an attempt that is given up."""
        for slot in self._slots:
            if slot.step > step:
                slot.clear()


def send(team: Coordinator, copy: SavedCopy, rank: int) -> None:
    """Sends a whole copy to `rank`, which calls `receive`."""
    whole = copy.content()
    _each(partial(dist.send, group=team.group, group_dst=rank), torch.tensor([len(whole)]), whole)


def receive(team: Coordinator, room: SavedCopy, rank: int) -> None:
    """Takes a copy from `rank` into `room`; whether it is whole, its hash tells."""
    take = partial(dist.recv, group=team.group, group_src=rank)
    size = torch.zeros(1, dtype=torch.int64)
    _each(take, size)
    _each(take, room.content(int(size)))


def _each(carry: Callable[[Tensor], Any], *tensors: Tensor) -> None:
    for tensor in tensors:
        for piece in tensor.split(_PIECE):
            carry(piece)
