"""A layer of experts over ranks, forward and backward, and whole training steps, beside what trainers do.

    python bench/flashmoe.py [--quick] [--pairs N] [--json FILE] [--only CASES]

The cases are links, straggler, step and loopback: four ranks with 200 Mbit/s each (bench/netlab.py; needs root), the
same with one link four times as slow, whole training steps, and no slow link. Peers are written here after their
sources, on PyTorch's Gloo: all-to-all with grouped products (torchtitan's structure), an all-to-all of padded buffers
(Tutel's and DeepSpeed-MoE's; as large as no token is dropped), and all-gather with reduce-scatter. Experts are as
popular as Zipf's law has it. All contestants pass the same tokens in turn, in the same processes, and each output is
compared with the plain form's. About seven minutes.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from espalier.plan.axes.experts import placed
from flashmoe_rank import Outcome, Task
from netlab import Lab, Shape, first_said, ranked
from table import Row, arguments, compare, publish

WORLD = 4
RATE = 200e6
OURS, INT8, TITAN = "flashmoe", "flashmoe int8", "all-to-all + grouped mm"
PADDED, DROPPING, GATHER = "padded all-to-all", "padded all-to-all, factor 1.25", "all-gather + reduce-scatter"
PLAIN = "plain all-to-all"


def command(task: Task) -> list[str]:
    """What each rank runs."""
    return [sys.executable, str(Path(__file__).parent / "flashmoe_rank.py"), msgspec.json.encode(task).decode()]


def outcome_of(ranks: Sequence[subprocess.Popen[str]]) -> Outcome:
    """What was measured, shown as it comes."""
    found = msgspec.json.decode(first_said(ranks), type=Outcome)
    for name, seconds in found.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} turns"
        waited = ", ".join(f"{one:.2f}" for one in found.idle[name])
        said = f"{found.sent[name] / 2**20:7.2f} MiB; waited {waited} s"
        dropped = f"; {found.dropped[name]:.0%} dropped" if found.dropped[name] else ""
        print(f"  {name:32} {statistics.median(seconds):8.3f} s ({spread}); {said}{dropped}")
    return found


def over_links(task: Task, rates: tuple[float, ...] = ()) -> Outcome:
    """Four hosts with a link each."""
    with Lab(Shape(nodes=WORLD, hosts=1, rate=RATE, rates=rates)) as lab:
        return outcome_of(lab.start(command(task)))


def on_loopback(task: Task) -> Outcome:
    """In plain processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ({**os.environ, **ranked(index, [0] * WORLD, "127.0.0.1", port)} for index in range(WORLD))
    return outcome_of([subprocess.Popen(command(task), env=env, stdout=subprocess.PIPE, text=True) for env in places])


def rows_of(case: str, found: Outcome, ours: str = OURS, but: Sequence[str] = (DROPPING,)) -> list[Row]:
    """Seconds of `ours` beside those of every other contestant."""
    return [
        compare(case, name, "s", list(zip(found.seconds[ours], theirs, strict=True)), higher_is_better=False)
        for name, theirs in found.seconds.items()
        if name not in (ours, *but)
    ]


def bytes_of(case: str, found: Outcome, ours: str = OURS) -> list[Row]:
    """Bytes that all ranks sent; the same in every turn."""
    rows = []
    for name, theirs in found.sent.items():
        if name != ours:
            told = f" ({found.dropped[name]:.0%} of choices dropped)" if found.dropped[name] else ""
            mine, them = found.sent[ours] / 2**20, theirs / 2**20
            rows.append(Row(f"{case}: bytes", name + told, them, mine, them / mine, "MiB", "exact"))
    return rows


def links(task: Task, note: str) -> list[Row]:
    """Equal links: seconds and bytes."""
    case = f"layer of {task.experts} experts, {task.tokens} tokens a rank, 4 x 200 Mbit/s{note}"
    print(f"{case}:")
    found = over_links(msgspec.structs.replace(task, contestants=(OURS, INT8, PLAIN, TITAN, PADDED, DROPPING, GATHER)))
    return rows_of(case, found, but=(DROPPING, INT8)) + bytes_of(case, found) + _int8(case, found)


def _int8(case: str, found: Outcome) -> list[Row]:
    pairs = list(zip(found.seconds[INT8], found.seconds[OURS], strict=True))
    return [compare(f"{case}: int8 rows", OURS, "s", pairs, higher_is_better=False)]


def straggler(task: Task, note: str) -> list[Row]:
    """One link is four times as slow: seconds, and how long the other ranks wait; with the experts spread evenly, and
    as the planner places them by the links."""
    rates = (RATE, RATE, RATE, RATE / 4)
    case = f"layer, link of rank 3 at 50 Mbit/s{note}"
    print(f"{case}:")
    held = placed(rates, [1.0] * task.experts)
    names = (OURS, f"{OURS}, placed", TITAN, f"{TITAN}, placed")
    found = over_links(msgspec.structs.replace(task, contestants=names, held=held), rates)
    rows = []
    for ours in names[:2]:
        told = ": experts placed by links" if ours.endswith("placed") else ""
        rows += rows_of(case + told, found, ours, but=(OURS, f"{OURS}, placed"))
        mine = statistics.mean(found.idle[ours][: WORLD - 1])
        for theirs in names[2:]:
            waited = statistics.mean(found.idle[theirs][: WORLD - 1])
            spread = f"means (n={len(found.seconds[ours])})"
            rows.append(Row(f"{case}{told}: the others wait", theirs, waited, mine, waited / mine, "s", spread))
    return rows


def step(task: Task, note: str) -> list[Row]:
    """Whole training steps of a decoder, over slow links and without."""
    rows = []
    for told, run in (("4 x 200 Mbit/s", over_links), ("loopback", on_loopback)):
        case = f"training step of a decoder of 2 layers, {told}{note}"
        print(f"{case}:")
        asked = msgspec.structs.replace(task, contestants=(OURS, PLAIN), layers=2, tokens=256)
        rows += rows_of(case, run(asked))
    return rows


def loopback(task: Task, note: str) -> list[Row]:
    """No slow link: what the code itself takes."""
    case = f"layer of {task.experts} experts, {task.tokens} tokens a rank, loopback{note}"
    print(f"{case}:")
    found = on_loopback(msgspec.structs.replace(task, contestants=(OURS, PLAIN, TITAN, GATHER)))
    return rows_of(case, found)


CASES = {"links": links, "straggler": straggler, "step": step, "loopback": loopback}


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(__doc__ or "", only={"default": ",".join(CASES), "help": "cases, with commas"})
    rounds, note = (asked.pairs or 3, ", quick") if asked.quick else (asked.pairs or 15, "")
    task = Task((), rounds)
    publish([row for name in asked.only.split(",") for row in CASES[name](task, note)], asked.json)


if __name__ == "__main__":
    main()
