"""Stack dumps: finds the rank that the others wait for in what `faulthandler` wrote of every rank. Pure, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
_MAIN = re.compile(r'launch/ranks/rank_process\.py", line \d+ in _live')
_WAITING = re.compile(r"/espalier/comm/|/torch/distributed/")


class Culprit(NamedTuple):
    """A rank that waits for no other, and the innermost line of its main thread."""

    rank: int
    where: str


def culprit(dumps: Mapping[int, str]) -> Culprit | None:
    """The one rank that does not wait for others, by the stacks in `dumps` (rank to text); None when there is none, or
    several."""
    found = []
    for rank, text in dumps.items():
        main = next((block for block in re.split(r"\n\s*\n", text) if _MAIN.search(block)), None)
        if main is None:
            continue
        frames = list(_FRAME.finditer(main))
        if not any(_WAITING.search(frame["path"]) for frame in frames):
            found.append(Culprit(rank, f"{frames[0]['path']}, line {frames[0]['line']}, in {frames[0]['name']}"))
    return found[0] if len(found) == 1 else None
