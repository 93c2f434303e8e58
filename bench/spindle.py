"""Spindle: three tasks of 6, 2 and 1 units of work in waves, beside one task after the other and fixed groups of ranks.

    python bench/spindle.py [--quick] [--pairs N] [--json FILE] [--only CASES]

In `waits` four hosts with 200 Mbit/s each (bench/netlab.py; needs root) run our executor with parts that wait instead
of computing, as if each host had a device of its own: four ranks on two cores have no idle time to fill. A part takes
a + b / n seconds on n ranks, a being 20 % of an average one on one rank. `computes` trains real towers on two hosts of
one core each: glyphs with names, source text, a package graph, whole steps with gradients and optimizer. All plans take
turns in the same processes. The peers are plans of the same executor, as no public system runs such tasks: all ranks
for one task after the other (data parallel), and the best partition of the ranks into fixed groups. Predictions are
those of the planner; of `computes` from the parts and the link measured at the start. `planning` and `estimator` start
no ranks. Seven minutes at most.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from espalier.mechanisms.task_waves.metaops import MetaOp, fit
from espalier.plan import waves
from espalier.recipe import recipe_file
from espalier.tasks.workload import MultitaskWorkload
from espalier.train import workload_registry
from netlab import Lab, Shape, first_said
from spindle_rank import TABLE, Outcome, Task
from table import Row, arguments, compare, publish

PEERS = {"sequential": "one task after the other", "static": "fixed groups of ranks", "greedy": "greedy wavefront"}
RATE = 200e6


def outcome_of(ranks: Sequence[subprocess.Popen[str]]) -> Outcome:
    """What was measured, shown as it comes."""
    found = msgspec.json.decode(first_said(ranks), type=Outcome)
    for name, seconds in found.seconds.items():
        told = f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} steps)"
        print(f"  {name:12} {told}; predicted {found.predicted[name]:.3f} s, {found.waves[name]} waves")
    return found


def rows_of(case: str, found: Outcome) -> list[Row]:
    """The linear program's waves beside the peers, and predictions beside measurements."""
    ours = found.seconds["program"]
    rows = [
        compare(case, PEERS[name], "s", list(zip(ours, theirs, strict=True)), higher_is_better=False)
        for name, theirs in found.seconds.items()
        if name in PEERS
    ]
    for name, seconds in found.seconds.items():
        took, said = statistics.median(seconds), found.predicted[name]
        spread = f"{min(seconds):.3f} to {max(seconds):.3f} (n={len(seconds)})"
        plan = PEERS.get(name, "waves")
        rows.append(
            Row(f"{case}: measured beside predicted, {plan}", "prediction", said, took, said / took, "s", spread)
        )
    return rows


def waits(rounds: int, note: str) -> list[Row]:
    """Parts that wait."""
    case = f"three tasks 6:2:1, parts that wait, 4 x 200 Mbit/s{note}"
    print(f"{case}:")
    with Lab(Shape(nodes=4, hosts=1, rate=RATE)) as lab:
        task = Task("waits", rounds, rate=RATE)
        return rows_of(case, outcome_of(lab.start(command(task))))


def computes(rounds: int, note: str) -> list[Row]:
    """Towers that compute."""
    case = f"three tasks on three towers, whole steps, 2 x 1 core, 200 Mbit/s{note}"
    print(f"{case}:")
    with Lab(Shape(nodes=2, hosts=1, rate=RATE)) as lab:
        task = Task("computes", rounds, rate=RATE)
        return rows_of(case, outcome_of(lab.start(command(task))))


def planning(rounds: int, note: str) -> list[Row]:
    """30 MetaOps on 64 devices, in milliseconds of processor time; the goal is 200."""
    r, metaops = random.Random(7), []
    for k in range(30):
        a, b = r.random() * 0.5, 0.2 + 4 * r.random()
        needs = (str(k - 10),) if k >= 10 else ()
        metaops.append(MetaOp(str(k), r.randint(1, 24), {2**n: a + b / 2**n for n in range(7)}, needs))
    taken = []
    for _ in range(max(5, rounds)):
        begun = time.process_time()
        waves(metaops, 64)
        taken.append(1e3 * (time.process_time() - begun))
    middle = statistics.median(taken)
    print(f"planning 30 MetaOps on 64 devices: {middle:.0f} ms")
    spread = f"{min(taken):.0f} to {max(taken):.0f} (n={len(taken)})"
    return [
        Row(
            f"planning 30 MetaOps on 64 devices, processor time{note}",
            "goal",
            200.0,
            middle,
            200.0 / middle,
            "ms",
            spread,
        )
    ]


def command(task: Task) -> list[str]:
    """What each rank runs."""
    return [sys.executable, str(Path(__file__).parent / "spindle_rank.py"), msgspec.json.encode(task).decode()]


def estimator(rounds: int, note: str) -> list[Row]:
    """The parts of the towers that compute, on 1, 2 and 4 ranks' shares of a batch: what those of 1 and 4 say of 2."""
    resolved = workload_registry.settle(recipe_file.from_table(TABLE), Path(__file__).parent)
    workload = workload_registry.open_workload(resolved)
    assert isinstance(workload, MultitaskWorkload)
    wrong: dict[str, float] = {}
    for one in workload.parts_of(True):
        if len(one.seconds) == 3:
            least, middle, most = sorted(one.seconds)
            a, b = fit({1 / rows: one.seconds[rows] for rows in (least, most)})
            wrong[one.key] = abs((a + b * middle) / one.seconds[middle] - 1)
    worst = max(wrong, key=lambda name: wrong[name])
    print("seconds of parts that were left out, wrong by", {name: f"{one:.1%}" for name, one in wrong.items()})
    case = f"seconds of a part on 2 ranks from those on 1 and 4, the worst of {len(wrong)} ({worst}){note}"
    return [Row(case, "goal", 8.0, 100 * wrong[worst], 8.0 / max(1e-9, 100 * wrong[worst]), "%", "n=1")]


CASES = {"waits": waits, "computes": computes, "planning": planning, "estimator": estimator}


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(__doc__ or "", only={"default": ",".join(CASES), "help": "cases, with commas"})
    rounds, note = (asked.pairs or 3, ", quick") if asked.quick else (asked.pairs or 15, "")
    publish([row for name in asked.only.split(",") for row in CASES[name](rounds, note)], asked.json)


if __name__ == "__main__":
    main()
