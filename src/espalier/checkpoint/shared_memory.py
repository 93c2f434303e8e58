"""Shared memory that outlives a rank: anonymous files held by the process that starts the ranks. No torch.

Nothing of it is left when that process ends, however it ends: there is no name to remove.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.checkpoint.young_daly import ASSUMED
from espalier.machine import resource_limits

SLOTS = 2
"""Copies of each rank's state where there are others: while one is written, the other is whole, on all ranks."""
ALONE = 1
"""Copies of a rank that is the only one. Killed while it writes its copy, it goes on from the disk. Writing copies
takes a hundredth of the time at most (`young_daly.FREE`): so does one failure in a hundred. A second copy would double
the memory."""


@dataclass(frozen=True)
class SharedMemory:
    """What one rank may keep.

    Attributes:
        files: descriptors of its slots, inherited.
        bytes: for all of them together; None: what `allowed` finds once a step was done.
        ranks: how many share this machine's memory.
        between_failures: seconds, as known when the rank was started.
    """

    files: tuple[int, ...]
    bytes: int | None
    ranks: int = 1
    between_failures: float = ASSUMED

    def allowed(self) -> int:
        """Bytes that this rank may take now: what it was given, else its part of a quarter of what is free."""
        return resource_limits.free_memory() // 4 // self.ranks if self.bytes is None else self.bytes


def slots(ranks: int) -> int:
    """How many copies each of `ranks` on one machine keeps."""
    return SLOTS if ranks > 1 else ALONE


def build(ranks: int, bytes_: int | None, slots: int = SLOTS) -> list[SharedMemory]:
    """One for each of `ranks`, of `bytes_` together. Call it in the process that starts them.

    `slots`: twice `SLOTS` where a rank may also keep another's.
    """
    each = None if bytes_ is None else bytes_ // ranks
    return [
        SharedMemory(tuple(os.memfd_create(f"espalier-{rank}-{slot}") for slot in range(slots)), each, ranks)
        for rank in range(ranks)
    ]


def release(refuges: list[SharedMemory]) -> None:
    """Gives the memory back."""
    for refuge in refuges:
        for file in refuge.files:
            os.close(file)


def clear(refuges: Iterable[SharedMemory]) -> None:
    """There is no copy in them any more. Call it while no rank runs."""
    for refuge in refuges:
        for file in refuge.files:
            os.ftruncate(file, 0)
