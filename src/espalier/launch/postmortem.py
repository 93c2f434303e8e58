"""Post-mortem of a failed attempt: root-cause rank, the error to show, log offsets, stack dumps."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.errors import EspalierError, Interrupted, PeerLost
from espalier.launch import rank_process as ranks
from espalier.launch.base import RankSpec
from espalier.launch.rank_process import Child
from espalier.resilience.acme.restart_advice import Ruling
from espalier.resilience.base import Failure, kind_of

_STACKS_SECONDS = 0.2
"""How long ranks may take to write where they are before a hang is ended."""


@dataclass(frozen=True)
class Ended:
    """Why an attempt is over: for the policy, for people, and when it went wrong (seconds of `time.monotonic`)."""

    failure: Failure
    error: EspalierError
    at: float
    found: Ruling | None = None
    """The diagnosis, where it came before the ranks were released."""


def cause(first: Child, children: Sequence[Child]) -> Child | None:
    """The rank whose end is a cause, not a consequence: killed, or with an error of its own. None where each that
    ended only lost another."""
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


def error(first: Child, children: Sequence[Child], interrupted: bool) -> EspalierError:
    """The error to show: a rank's own before one that merely lost a peer."""
    killed = [child for child in children if child.status is not None and child.status < 0]
    raised = [child.error for child in (first, *children) if child.error is not None]
    own = [error for error in raised if not isinstance(error, PeerLost)]
    if own:
        return own[0]
    if interrupted:
        return Interrupted("Stopped before the state could be saved.")
    dead = first if first in killed or not killed else killed[0]
    if raised and dead.status is not None and dead.status >= 0:
        return raised[0]
    return ranks.died(dead)


def dumps(children: Sequence[Child]) -> dict[int, str]:
    """What each living rank writes of where its threads are."""
    before = {}
    for child in children:
        file = _stacks_of(child.place)
        if child.status is None and file is not None:
            before[child.place.rank] = (file, size(file))
            child.signal(ranks.STACKS)
    time.sleep(_STACKS_SECONDS)
    return {rank: _from(file, size) for rank, (file, size) in before.items()}


def write(stacks: Mapping[int, str]) -> None:
    """Writes where ranks were to this host's standard error, which the log of all hosts keeps."""
    for rank, text in stacks.items():
        sys.stderr.write(f"Rank {rank} was here:\n{text}\n")
    sys.stderr.flush()


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
