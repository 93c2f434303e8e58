"""Attention over cut sequences, forward and backward: a double ring beside one ring, heads, and gathered keys.

    python bench/loongtrain.py [--quick] [--pairs N] [--json FILE] [--only rings,between,grouped,documents,loopback]

Two nodes of four or two ranks with slow links between them (bench/netlab.py; needs root), and loopback. Contestants are
our own forms and, where the package axolotl-ringmaster is installed, its own: its zigzag and contiguous
rings, its all-gather of keys and its Ulysses, on PyTorch's Gloo. All attend to the same causal sequence in turn, in the
same processes, and each output is compared with one device's.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from loongtrain_rank import Contestant, Outcome, Task
from netlab import Lab, Shape, first_said, ranked
from table import Row, arguments, compare, publish

LINKS = Shape(nodes=2, hosts=2, rate=100e6)
WIDE = Shape(nodes=2, hosts=4, rate=50e6)
WORLD = 4
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


def on_loopback(task: Task) -> Outcome:
    """In plain processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ({**os.environ, **ranked(index, [0] * WORLD, "127.0.0.1", port)} for index in range(WORLD))
    return outcome_of([subprocess.Popen(command(task), env=env, stdout=subprocess.PIPE, text=True) for env in places])


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


CASES = {"rings": rings, "between": between, "grouped": grouped, "documents": documents, "loopback": loopback}


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(__doc__ or "", only={"default": ",".join(CASES), "help": "cases, with commas"})
    length, rounds, note = (1024, asked.pairs or 2, ", quick") if asked.quick else (2048, asked.pairs or 7, "")
    publish([row for name in asked.only.split(",") for row in CASES[name](length, rounds, note)], asked.json)


if __name__ == "__main__":
    main()
