"""The logs of one run as one case: which files of a folder are logs, and which of them knows the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from espalier.errors import UserError
from espalier.resilience.acme.causes import STRENGTH, Cause

SUFFIXES = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".log.gz", ".out.gz", ".err.gz")
DEEP = 4
"""Folders below the named one that are looked into: torchrun's logs stand at run/attempt_0/3/stderr.log."""
MOST = 10_000
_RANK = re.compile(
    r"(?:rank|trainer|worker|task|proc(?:ess)?)[-_.]?(\d+)|(?:^|/)(\d+)/(?:stdout|stderr|std)|[-_.](\d+)\.(?:err|out|log)",
    re.I,
)


def logs_of(folder: Path) -> list[Path]:
    """The logs in a run's folder, in the order of their names; its event log among them.

    Raises UserError where there is none.
    """
    found = sorted(
        path
        for path in folder.rglob("*")
        if (path.name.endswith(SUFFIXES) or path.name == "events.jsonl")
        and len(path.relative_to(folder).parts) <= DEEP
        and path.is_file()
    )[:MOST]
    if not found:
        raise UserError(
            f"There is no log in the folder {folder}.",
            why=f"looked for files that end in {', '.join(SUFFIXES[:4])}, and for events.jsonl",
            do="name the logs themselves, whatever they are called",
        )
    return found


def rank_of(path: Path, folder: Path) -> int | None:
    """The rank that a file's name tells: rank3.log, trainer-3.log, attempt_0/3/stderr.log."""
    found = _RANK.search(str(path.relative_to(folder)))
    return int(next(group for group in found.groups() if group)) if found else None


def one_run(folder: Path, logs: Sequence[Path]) -> bool:
    """Whether the logs are those of one run: a run's folder, or file names that tell ranks."""
    if (folder / "events.jsonl").exists() or (folder / "run.toml").exists() or len(logs) == 1:
        return True
    return sum(rank_of(path, folder) is not None for path in logs) * 2 > len(logs)


def first_of(causes: Sequence[Cause | None]) -> int | None:
    """The number of the log whose cause came first: the strongest, of equals the earliest by clock, else as given."""
    there = [(at, one) for at, one in enumerate(causes) if one is not None]
    if not there:
        return None
    timed = all(one.root.line.time is not None for _, one in there)

    def order(entry: tuple[int, Cause]) -> tuple[float, ...]:
        at, one = entry
        clock = one.root.line.time if timed else None
        return (STRENGTH[one.named.rule.role], math.inf if clock is None else clock, at)

    return min(there, key=order)[0]
