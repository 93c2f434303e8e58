"""Goes on with the ranks that are left: those that failed are replaced, the others called to meet them. No torch.

Where every rank holds the whole state, one that is left has lost nothing: it need not begin anew from a copy, and who
takes the place of the dead is sent what the others hold (`checkpoint.memory`). Elsewhere all ranks begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from espalier.launch import child as ranks
from espalier.launch import recall
from espalier.launch.base import Place, Task
from espalier.launch.child import Child
from espalier.launch.recall import Call
from espalier.resilience.base import Failure
from espalier.resilience.pulse import Sign

_OF_ONE = frozenset({"killed", "exit", "exception", "stopped", "hang"})
"""Kinds of failure that are one rank's, and leave the others as they were."""


def gone(failure: Failure, children: Sequence[Child], signs: Sequence[Sign]) -> list[int]:
    """Which of `children` have to be replaced for the others to go on; none: they cannot."""
    found = [index for index, child in enumerate(children) if child.status is not None]
    culprit = next((index for index, child in enumerate(children) if child.place.rank == failure.rank), None)
    if failure.kind not in _OF_ONE or culprit is None:
        return []
    found = sorted({*found, culprit})
    left = [index for index in range(len(children)) if index not in found]
    if not left or any(child.status is not None and not child.failed for child in children):
        return []  # what has done its part does not come back
    return found if all(_ready(signs[index]) for index in left) else []


def _ready(sign: Sign) -> bool:
    """Whether a rank can be called: it has made a step in this attempt, or waits for a call. Not while it still meets
    the others, for which it would wait in vain."""
    return sign.doing == "standing" or (sign.first > 0 and sign.doing not in ("starting", "leaving"))


def replaced(task: Task, children: Sequence[Child], places: Sequence[Place], gone: Sequence[int]) -> list[Child]:
    """As `summoned`, on this machine: all meet at a store of their own, which the first of the new ranks serves."""
    with ranks.listening() as listener:
        seats = [replace(place, host="127.0.0.1", port=listener.getsockname()[1]) for place in places]
        seats[gone[0]] = replace(seats[gone[0]], serves=True, listen_fd=listener.fileno())
        return summoned(task, children, seats, gone)


def summoned(task: Task, children: Sequence[Child], places: Sequence[Place], gone: Sequence[int]) -> list[Child]:
    """`children` with new ones at the `places` of the `gone`, and the others called to theirs."""
    after = [replace(child, place=place) for child, place in zip(children, places, strict=True)]
    for index in gone:
        after[index].close()
        after[index] = ranks.fork(task, places[index])
    for index, child in enumerate(after):
        if index not in gone:
            recall.tell(child.calls, Call(child.place.attempt, child.place.host, child.place.port))
    return after
