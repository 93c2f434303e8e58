"""Post-mortem of a failed attempt: root-cause rank, log offsets, stack dumps."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from espalier.errors import PeerLost
from espalier.launch import rank_process as ranks
from espalier.launch.base import RankSpec
from espalier.launch.rank_process import Child
from espalier.resilience.base import kind_of

_STACKS_SECONDS = 0.2
"""How long ranks may take to write where they are before a hang is ended."""


def cause(first: Child, children: Sequence[Child]) -> Child | None:
    """A rank whose end is a cause, not a consequence: killed, or with an error of its own."""
    ended = [first, *(child for child in children if child is not first and child.failed)]
    killed = [child for child in ended if child.error is None]
    own = [
        child
        for child in ended
        if child.error is not None
        and not isinstance(child.error, PeerLost)
        and (not child.raised or kind_of(child.raised, 1) != "lost")
    ]
    return next(iter(killed + own), None)


def dumps(children: Sequence[Child]) -> dict[int, str]:
    """What each living rank writes of where its threads are."""
    before = {}
    for child in children:
        file = _stacks_of(child.place)
        if child.status is None and file is not None:
            before[child.place.rank] = (file, size(file))
            os.kill(child.pid, ranks.STACKS)
    time.sleep(_STACKS_SECONDS)
    return {rank: _from(file, size) for rank, (file, size) in before.items()}


def _stacks_of(place: RankSpec) -> Path | None:
    return place.log if place.stacks < 0 else Path(f"/proc/self/fd/{place.stacks}")


def size(file: Path | None) -> int:
    """Bytes of `file`, 0 where there is none."""
    return file.stat().st_size if file is not None and file.exists() else 0


def _from(log: Path, position: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")
