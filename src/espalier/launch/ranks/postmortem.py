"""Post-mortem of a failed attempt: root-cause rank, the error to show, log offsets, stack dumps."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.launch.ranks import rank_process as ranks
from espalier.launch.ranks.rank_process import Child
from espalier.recipe.errors import EspalierError, Interrupted, PeerLost
from espalier.train.failure import Failure, kind_of

if TYPE_CHECKING:
    from espalier.launch.resilience.restart_advice import Ruling

_STACKS_SECONDS = 0.2
"""How long ranks may take to write where they are before a hang is ended."""


@dataclass(frozen=True)
class Ended:
    """Why an attempt is over: for the policy, for people, and when it went wrong (seconds of `time.monotonic`)."""

    failure: Failure
    error: EspalierError
    at: float
    ruling: Ruling | None = None
    """The diagnosis, where it came before the ranks were released."""


def shown(failed: Sequence[EspalierError], interrupted: bool) -> EspalierError:
    """The error to show of several, of ranks or of hosts, the first to fail first: one's own before one that merely
    lost others. Who was stopped although nobody `interrupted` the run lost its launcher, and another knows why."""
    causes = [error for error in failed if not isinstance(error, PeerLost)]
    asked = [error for error in causes if isinstance(error, Interrupted) is interrupted]
    if interrupted and not causes:
        return Interrupted("Stopped before the state could be saved.", why=failed[0].what if failed else "")
    return (asked or causes or failed)[0]


def cause(first: Child, children: Sequence[Child]) -> Child | None:
    """The rank whose end is a cause, not a consequence: killed, or with an error of its own. None where each that
    ended only lost another."""
    ended = _ended(first, children)
    return next((child for child in ended if child.error is None), next(filter(_knows, ended), None))


def error(first: Child, children: Sequence[Child], interrupted: bool) -> EspalierError:
    """The error to show of ranks of which all have ended, some of them perhaps by their launcher."""
    ended = sorted(_ended(first, children), key=lambda child: (not _knows(child), child.error is None))
    return shown([child.error or ranks.died(child) for child in ended if child.error or not interrupted], interrupted)


def _ended(first: Child, children: Sequence[Child]) -> list[Child]:
    """Those that failed, `first` first."""
    return [child for child in (first, *(other for other in children if other is not first)) if child.failed]


def _knows(child: Child) -> bool:
    """Whether its end is no consequence of another's."""
    return not (isinstance(child.error, PeerLost) or (child.raised and kind_of(child.raised, 1) == "lost"))


def dumps(children: Sequence[Child]) -> dict[int, str]:
    """What each living rank writes of where its threads are."""
    before = {}
    for child in children:
        place = child.place
        file = place.log if place.stacks < 0 else Path(f"/proc/self/fd/{place.stacks}")
        if child.status is None and file is not None:
            before[place.rank] = (file, size(file))
            child.signal(ranks.STACKS)
    time.sleep(_STACKS_SECONDS)
    return {rank: _from(file, size) for rank, (file, size) in before.items()}


def write(stacks: Mapping[int, str]) -> None:
    """Writes where ranks were to this host's standard error, which the log of all hosts keeps."""
    for rank, text in stacks.items():
        sys.stderr.write(f"Rank {rank} was here:\n{text}\n")
    sys.stderr.flush()


def size(file: Path | None) -> int:
    """Bytes of `file`, 0 where there is none."""
    return file.stat().st_size if file is not None and file.exists() else 0


def _from(log: Path, position: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")
