"""Process statistics: CPU time, bytes read and written, and whether any thread runs, waits for a disk or is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from espalier.launch.resilience.hang_detector import Vital

_HERTZ = os.sysconf("SC_CLK_TCK")
_BUSY: tuple[Literal["R"], Literal["D"]] = ("R", "D")
GONE = Vital(0.0, "S")


def vital(pid: int) -> Vital:
    """Of the process `pid` now; of one that is gone: that it does nothing."""
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
        if fields[0] == "T":
            return Vital(_cpu(fields), "T")
        io = sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2])  # rchar, wchar
        states = {_stat(path / "stat")[0] for path in Path(f"/proc/{pid}/task").iterdir()}
    except (OSError, IndexError):  # it, or one of its threads, ended meanwhile
        return GONE
    return Vital(_cpu(fields), next((state for state in _BUSY if state in states), "S"), io)


def _stat(path: Path) -> list[str]:
    """The fields from the state on; the name before them may hold anything."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _cpu(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _HERTZ  # utime and stime
