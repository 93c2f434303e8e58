"""Attention over cut sequences, forward and backward: a double ring beside one ring, heads, and gathered keys.

    python bench/loongtrain.py [--quick] [--pairs N] [--json FILE] [--only CASES]

The cases are rings, between, grouped, documents, loopback and unequal: two nodes of four or two ranks with slow links
between them (bench/netlab.py; needs root), loopback, and ranks that get unequal parts of the cores (control groups;
needs root). Contestants are our own forms and, where the package axolotl-ringmaster is installed, its own: zigzag and
contiguous rings, its all-gather of keys and its Ulysses, on PyTorch's Gloo. All attend to the same causal sequence in
turn, in the same processes, and each output is compared with one device's.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from loongtrain_rank import Contestant, Outcome, Task
from netlab import Lab, Shape, first_said, ranked
from table import Row, arguments, compare, publish

LINKS = Shape(nodes=2, hosts=2, rate=100e6)
WIDE = Shape(nodes=2, hosts=4, rate=50e6)
WORLD = 4
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 5000
"""Microseconds in which a limited process gets its part of the cores."""
DOUBLE = Contestant("double ring", window=2)
SINGLE = Contestant("single ring", window=4)
HEADS = Contestant("heads", heads=4)
GRID = Contestant("heads 2 x context 2", heads=2)
GATHER = Contestant("all-gather of keys", kind="gather")
PEERS = tuple(Contestant(f"ringmaster {kind}", kind=kind) for kind in ("zigzag", "p2p", "all-gather", "ulysses"))


def peers() -> tuple[Contestant, ...]:
    """Those of axolotl-ringmaster where it is installed."""
    if importlib.util.find_spec("ringmaster") is None:
        print("axolotl-ringmaster is not installed: its rows are left out (pip install axolotl-ringmaster).")
        return ()
    return PEERS


def command(task: Task) -> list[str]:
    """What each rank runs."""
    return [sys.executable, str(Path(__file__).parent / "loongtrain_rank.py"), msgspec.json.encode(task).decode()]


def outcome_of(ranks: Sequence[subprocess.Popen[str]]) -> Outcome:
    """What was measured, shown as it comes."""
    found = msgspec.json.decode(first_said(ranks), type=Outcome)
    for name, seconds in found.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} turns"
        print(f"  {name:24} {statistics.median(seconds):8.3f} s ({spread}); {found.sent[name] / 2**20:7.2f} MiB")
    return found


def on_loopback(task: Task, started: Callable[[int, int], None] = lambda index, process: None) -> Outcome:
    """In plain processes of this machine, each of which `started` is told of."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ({**os.environ, **ranked(index, [0] * WORLD, "127.0.0.1", port)} for index in range(WORLD))
    ranks = [subprocess.Popen(command(task), env=env, stdout=subprocess.PIPE, text=True) for env in places]
    for index, rank in enumerate(ranks):
        started(index, rank.pid)
    return outcome_of(ranks)


def rows_of(case: str, found: Outcome, ours: str) -> list[Row]:
    """`ours` beside every other contestant."""
    return [
        compare(case, name, "s", list(zip(found.seconds[ours], theirs, strict=True)), higher_is_better=False)
        for name, theirs in found.seconds.items()
        if name != ours
    ]


def rings(length: int, rounds: int, note: str) -> list[Row]:
    """Four ranks behind each slow link: every step of a single ring crosses it, of a double ring one in four."""
    double, single = Contestant("double ring", window=4), Contestant("single ring", window=8)
    who = (double, single, Contestant("heads 4 x context 2", heads=4))
    case = f"{length} tokens, 8 heads, 2 nodes x 4, 50 Mbit/s{note}"
    print(f"{case}:")
    with Lab(WIDE) as lab:
        found = outcome_of(lab.start(command(Task(length, who, rounds))))
    return rows_of(f"{case}: double ring", found, double.name)


def between(length: int, rounds: int, note: str) -> list[Row]:
    """Slow links between the nodes, and as many key-value heads as heads."""
    return _between(8, length, rounds, note)


def grouped(length: int, rounds: int, note: str) -> list[Row]:
    """The same with a quarter of the key-value heads; the peer's Ulysses does not take fewer than ranks."""
    return _between(2, length, rounds, note)


def _between(kv_heads: int, length: int, rounds: int, note: str) -> list[Row]:
    who = (DOUBLE, SINGLE, GRID, HEADS, GATHER, *(one for one in peers() if kv_heads == 8 or one.kind != "ulysses"))
    case = f"{length} tokens, 8 heads, {kv_heads} key-value heads, 2 nodes x 2, 100 Mbit/s{note}"
    print(f"{case}:")
    with Lab(LINKS) as lab:
        found = outcome_of(lab.start(command(Task(length, who, rounds, kv_heads=kv_heads))))
    return rows_of(f"{case}: double ring", found, DOUBLE.name)


def lengths_like(files: int, length: int) -> tuple[int, ...]:
    """Lengths in the proportions of the standard library's first files, `length` together."""
    sizes = [path.stat().st_size for path in sorted(Path(os.__file__).parent.glob("*.py"))[:files]]
    ends = [length * sum(sizes[:count]) // sum(sizes) for count in range(files + 1)]
    return tuple(max(1, stop - start) for start, stop in itertools.pairwise(ends))


def documents(length: int, rounds: int, note: str) -> list[Row]:
    """Documents of unequal lengths packed into one sequence, and padded to the longest."""
    lengths = lengths_like(12, length)
    padded = Contestant("padded documents", kind="padded", window=2)
    who = (DOUBLE, SINGLE, padded, *(one for one in peers() if one.kind == "zigzag"))
    case = f"{length} tokens in {len(lengths)} documents, 2 nodes x 2, 100 Mbit/s{note}"
    print(f"{case}:")
    with Lab(LINKS) as lab:
        found = outcome_of(lab.start(command(Task(sum(lengths), who, rounds, lengths))))
    return rows_of(f"{case}: double ring", found, DOUBLE.name)


def loopback(length: int, rounds: int, note: str) -> list[Row]:
    """No slow link: what the code itself takes."""
    case = f"{length} tokens, 8 heads, 4 processes on loopback{note}"
    print(f"{case}:")
    found = on_loopback(Task(length, (SINGLE, DOUBLE, HEADS, GATHER, *peers()), rounds))
    return rows_of(f"{case}: single ring", found, SINGLE.name)


def unequal(length: int, rounds: int, note: str) -> list[Row]:
    """Ranks that get half a core or a quarter of one: tokens, or tokens and heads, in proportion, beside equal ones."""
    speeds = (2.0, 2.0, 1.0, 1.0)
    who = (
        Contestant("ring, by speed", window=4, speeds=speeds),
        Contestant("ring, equal", window=4),
        Contestant("heads, by speed", heads=4, speeds=speeds),
        Contestant("heads, equal", heads=4),
    )
    case = f"{length} tokens, 12 heads, 4 processes of speeds 2:2:1:1 on loopback{note}"
    print(f"{case}:")
    with limited([speed / 4 for speed in speeds]) as join:
        found = on_loopback(Task(length, who, rounds, heads=12, kv_heads=12), join)
    pairs = ((who[0], who[1]), (who[2], who[3]))
    return [
        compare(
            f"{case}: {ours.name}",
            theirs.name,
            "s",
            list(zip(found.seconds[ours.name], found.seconds[theirs.name], strict=True)),
            higher_is_better=False,
        )
        for ours, theirs in pairs
    ]


@contextmanager
def limited(cores: Sequence[float]) -> Iterator[Callable[[int, int], None]]:
    """(index, process) -> None: gives a process so many of the cores, by control groups (root)."""
    groups = [CPU_GROUPS / f"espalier-bench-{os.getpid()}-{index}" for index in range(len(cores))]
    for group, share in zip(groups, cores, strict=True):
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD * share)))
    try:
        yield lambda index, process: (groups[index] / "cgroup.procs").write_text(str(process)) and None
    finally:
        for group in groups:
            group.rmdir()


CASES = {
    "rings": rings,
    "between": between,
    "grouped": grouped,
    "documents": documents,
    "loopback": loopback,
    "unequal": unequal,
}


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(__doc__ or "", only={"default": ",".join(CASES), "help": "cases, with commas"})
    length, rounds, note = (1024, asked.pairs or 2, ", quick") if asked.quick else (2048, asked.pairs or 7, "")
    publish([row for name in asked.only.split(",") for row in CASES[name](length, rounds, note)], asked.json)


if __name__ == "__main__":
    main()
