"""What every bench script shares: rows, medians with their spread, the machine's name, the printed table.

With `--json docs/measured/NAME.json` (or `NAME-PART.json`) the table is also shown in docs/measured/NAME.md.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

SETTLE = 0.02
"""Seconds."""
MEASURED = Path(__file__).parents[1] / "docs" / "measured"
HEADINGS = ("case", "peer", "peer's value", "ours", "ratio", "unit", "spread of the ratio")


class Row(Struct, frozen=True):
    """One comparison.

    Attributes:
        case, peer: what was done, and beside what.
        peer_value, ours: medians, in `unit`; `ratio` of both, above 1 where ours is better, with its `spread`.
    """

    case: str
    peer: str
    peer_value: float
    ours: float
    ratio: float
    unit: str
    spread: str


class Measured(Struct, frozen=True):
    """What one run of a bench script printed: its rows, the command and the machine."""

    machine: str
    command: str
    rows: tuple[Row, ...]


def files(name: str, folder: Path = MEASURED) -> list[Path]:
    """The files of what was measured of the system called `name`."""
    return [*folder.glob(f"{name}.json"), *sorted(folder.glob(f"{name}-*.json"))]


def measured(name: str, folder: Path = MEASURED) -> list[Measured]:
    """What was measured of the system called `name`: one entry for each of its files."""
    return [msgspec.json.decode(path.read_bytes(), type=Measured) for path in files(name, folder)]


def markdown(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table."""
    cells = [
        (row.case, row.peer, f"{row.peer_value:.4g}", f"{row.ours:.4g}", f"{row.ratio:.2f}", row.unit, row.spread)
        for row in rows
    ]
    return [f"| {' | '.join(row)} |" for row in (HEADINGS, ["---"] * len(HEADINGS), *cells)]


def compare(
    case: str, peer: str, unit: str, pairs: Sequence[tuple[float, float]], higher_is_better: bool = True
) -> Row:
    """A row from interleaved (ours, peer) pairs: medians of both, and the median of the paired ratios."""
    ratios = [(ours / theirs) if higher_is_better else (theirs / ours) for ours, theirs in pairs]
    low, high = interval(ratios)
    return Row(
        case,
        peer,
        statistics.median(theirs for _, theirs in pairs),
        statistics.median(ours for ours, _ in pairs),
        statistics.median(ratios),
        unit,
        f"{low:.3f}-{high:.3f} (n={len(ratios)})",
    )


def settle() -> None:
    """Waits until threads that a contestant left spinning have gone to sleep: OpenMP's spin for milliseconds, on a core
    that the next one's threads need and charged to its processor time."""
    time.sleep(SETTLE)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block once it has taken so long: a contestant that hangs is not waited for."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median by order statistics (binomial); the whole range for fewer than six values."""
    ordered = sorted(values)
    count = len(ordered)
    if count < 6:
        return ordered[0], ordered[-1]
    low = int(count / 2 - 1.96 * count**0.5 / 2)
    return ordered[max(0, low)], ordered[min(count - 1, count - 1 - low)]


def machine() -> str:
    """Processor, cores and versions, for the line under a table."""
    import torch

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {cores} cores, Linux {platform.release()}, {versions}"


def arguments(description: str, **more: dict[str, Any]) -> argparse.Namespace:
    """`--quick`, `--pairs N` and `--json FILE`, as every bench script takes them, and the script's own: name and what
    argparse is to know of it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="reduced sizes, at most five minutes; said in each row")
    parser.add_argument("--pairs", type=int, help="how often ours and each peer take turns")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    for name, known in more.items():
        parser.add_argument(f"--{name}", **known)
    # Asked to end (by `timeout`, say), a script still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a file shows each line as it is written, like a terminal
    return parser.parse_args()


def publish(rows: Sequence[Row], json_file: str | None) -> None:
    """Prints the Markdown table with the machine's name; writes the JSON if asked."""
    print("\n".join(markdown(rows)))
    print(f"\nMachine: {machine()}. Command: `{_command()}`.")
    if json_file:
        save(rows, json_file)


def save(rows: Sequence[Row], json_file: str) -> None:
    """Writes the JSON alone."""
    table = msgspec.json.encode(Measured(machine(), _command(), tuple(rows)))
    Path(json_file).write_bytes(msgspec.json.format(table, indent=1))


def _command() -> str:
    return " ".join(["python", *_told(sys.argv)])


def _told(arguments: Sequence[str]) -> list[str]:
    """The command line as anybody would give it: without the file to write, and without where this machine has what."""
    told: list[str] = []
    for word, before in zip(arguments, ["", *arguments[:-1]], strict=True):
        if word == "--json" or before == "--json":
            continue
        told.append(before[2:].upper() if before.startswith("--") and "/" in word else word)
    return told
