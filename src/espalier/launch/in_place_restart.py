"""In-place restart: replaces the failed ranks; the surviving ranks keep their processes and rejoin. No torch.

Where every rank holds the whole state, one that is left has lost nothing: it need not begin anew from a copy, and who
takes the place of the dead is sent what the others hold (`checkpoint.in_memory`). Replicas that agree by rounds go on
among themselves, and let the new one in at the end of a round. Elsewhere all ranks begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from espalier.launch import rank_process as ranks
from espalier.launch import rejoin_signal
from espalier.launch.base import Entrypoint, RankSpec
from espalier.launch.rank_process import Child
from espalier.launch.rejoin_signal import Call
from espalier.resilience.base import Failure
from espalier.resilience.heartbeat import Sign

PATIENCE = 3600.0
"""Seconds in which ranks that were left come to the end of a round."""
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


def replaced(
    task: Entrypoint, children: Sequence[Child], places: Sequence[RankSpec], gone: Sequence[int]
) -> list[Child]:
    """As `summoned`, on this machine: later, where all met before; or at once, at a store of their own, which the first
    of the new ranks serves."""
    if places[0].port:
        return summoned(task, children, places, gone, later=True)
    with ranks.listening() as listener:
        seats = [replace(place, host="127.0.0.1", port=listener.getsockname()[1]) for place in places]
        seats[gone[0]] = replace(seats[gone[0]], serves=True, listen_fd=listener.fileno())
        return summoned(task, children, seats, gone)


def summoned(
    task: Entrypoint, children: Sequence[Child], places: Sequence[RankSpec], gone: Sequence[int], later: bool = False
) -> list[Child]:
    """`children` with new ones at the `places` of the ranks that are `gone`, also elsewhere, and the others called to
    theirs, at once or `later`."""
    after = [replace(child, place=place) for child, place in zip(children, places, strict=True)]
    before = [child for child in after if child.place.rank in gone]
    for child in before:
        child.kill()
    for index, place in enumerate(places):
        if place.rank in gone:
            after[index] = ranks.fork(task, replace(place, patience=PATIENCE if later else 0.0))
    for child in after:
        if child.place.rank not in gone:
            place = child.place
            between = place.refuge.between_failures if place.refuge is not None else 0.0
            rejoin_signal.tell(child.calls, Call(place.attempt, place.host, place.port, tuple(gone), later, between))
    for child in before:
        child.close()  # last: one that waits for a disk is gone only when that has answered
    return after
