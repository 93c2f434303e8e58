"""In-place restart: replaces the failed ranks; the surviving ranks keep their processes and rejoin. No torch.

Where every rank holds the whole state, one that is left has lost nothing: it need not begin anew from a copy, and who
takes the place of the dead is sent what the others hold (`checkpoint.in_memory`). Replicas that agree by rounds go on
among themselves, and let the new one in at the end of a round. Elsewhere all ranks begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from espalier.launch.rank_process import Child
from espalier.resilience.base import Failure
from espalier.resilience.heartbeat import Sign

_OF_ONE = frozenset({"killed", "exit", "exception", "stopped", "hang"})
"""Kinds of failure that are one rank's, and leave the others as they were."""


def gone(failure: Failure, children: Sequence[Child], signs: Sequence[Sign]) -> list[int]:
    """Which ranks have to be replaced for the others to go on; none: these cannot. `children`, `signs`: by rank."""
    if failure.kind not in _OF_ONE or failure.rank < 0:
        return []
    found = sorted({failure.rank, *(child.place.rank for child in children if child.status is not None)})
    left = [child.place.rank for child in children if child.place.rank not in found]
    if not left or any(child.status is not None and not child.failed for child in children):
        return []  # what has done its part does not come back
    return found if all(_ready(signs[rank]) for rank in left) else []


def _ready(sign: Sign) -> bool:
    """Whether a rank can be called: it has made a step in this attempt, or waits for a call. Not while it still meets
    the others, for which it would wait in vain."""
    return sign.doing == "standing" or (sign.first > 0 and sign.doing not in ("starting", "leaving"))
