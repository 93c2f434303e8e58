"""A run under constant fire: a random fault every 20 s, and what is left of its time (goodput), nobody helping.

One part of bench/acme.py. The faults are those of Acme's table (arXiv 2403.07648), drawn by the share of GPU time that
each reason cost there, as that is what long runs meet; script errors, which end a job in its first minutes and are not
started again, are left out. Each becomes what a process sees of it:

- its code raises: NVLink 30.25 %, CUDA 15.77, ECC 11.00, connection 3.44, storage 2.12, attribute 3.90, runtime 1.72,
  assertion 1.24, value 0.16, zero division 0.03;
- it is killed: half of the node failures (14.30 %), data loader killed 4.38, out of memory 3.28;
- it is stopped: the other half of the node failures;
- it hangs: network 4.53 %, NCCL timeout 0.50, NCCL remote 0.15.

`espalier train` with two ranks, everything as it is by default. The fault meets a random rank before its next step.
Should the run end by itself, it is started again, which is a manual step. Steps are lost when they have to be done
again; the time to recover is from the failure to the end of the next step of all ranks, as the run log tells both.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))
from accounts import account
from acme_rank import Task
from espalier.track import events
from table import Row

EVERY, GOAL, RANKS, SEED = 20.0, 0.70, 2, 1
MIX = {
    "raise": 30.25 + 15.77 + 11.00 + 3.44 + 2.12 + 3.90 + 1.72 + 1.24 + 0.16 + 0.03,
    "kill": 14.30 / 2 + 4.38 + 3.28,
    "stop": 14.30 / 2,
    "hang": 4.53 + 0.50 + 0.15,
}
"""Percent of the GPU time lost to failures, by what a process sees."""
KINDS = {"killed": "kill", "exception": "raise", "stopped": "stop", "hang": "hang"}
"""The run log's words for them."""
BEGIN = 600.0
"""Seconds in which the first step is to come, on a machine that is busy."""
MANUAL = 3
"""Starts by hand after which the run is given up."""


@dataclass(frozen=True)
class Soaked:
    """What a run under fire came to: the faults there were, starts by hand, and the events of its run log."""

    struck: tuple[str, ...]
    manual: int
    events: tuple[events.Event, ...]


def run(seconds: float, folder: Path, every: float = EVERY, cluster: str = "") -> Soaked:
    """Trains for so long under fire, a fault `every` so many seconds. `cluster`: see `Task`."""
    draw, manual = random.Random(SEED), 0
    process = _started(folder, cluster)
    try:
        _begun(process, folder)
        until, due = time.monotonic() + seconds, time.monotonic() + every
        while time.monotonic() < until:
            time.sleep(0.05)
            if process.poll() is not None:
                manual += 1
                if manual > MANUAL:
                    raise SystemExit(f"the run ended by itself again:\n{(folder / 'said').read_text()[-3000:]}")
                process = _started(folder, cluster)
            if time.monotonic() > due and time.monotonic() + every / 2 < until:
                due += every
                what = draw.choices(list(MIX), weights=list(MIX.values()))[0]
                (folder / "due.part").write_text(f"{what} {draw.randrange(RANKS)}")
                (folder / "due.part").rename(folder / "due")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()  # its ranks end with it
            process.wait()
    told = [line.split()[1] for line in (folder / "told").read_text().splitlines()]
    struck = tuple(what for what in told if what in MIX)
    return Soaked(struck, manual, tuple(events.read(folder / "run" / "events.jsonl")))


def _started(folder: Path, cluster: str) -> subprocess.Popen[bytes]:
    task = Task(str(folder), RANKS, 10_000_000, (), every=None, due=True, cluster=cluster)
    program = [str(Path(__file__).with_name("acme_rank.py")), "ours", msgspec.json.encode(task).decode()]
    with (folder / "said").open("a") as said:
        return subprocess.Popen([sys.executable, *program], stdout=said, stderr=said)


def _begun(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for the first step."""
    deadline = time.monotonic() + BEGIN
    while not (folder / "told").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not begin:\n{(folder / 'said').read_text()[-3000:]}")
        time.sleep(0.1)


def rows(minutes: float) -> list[Row]:
    """The table of one soak."""
    with tempfile.TemporaryDirectory(prefix="acme-soak-") as name:
        soaked = run(60 * minutes, Path(name))
    return table(f"{minutes:g} min, a fault every {EVERY:g} s, {RANKS} ranks, {os.cpu_count()} cores", soaked)


def table(case: str, soaked: Soaked) -> list[Row]:
    """Goodput, what the run got over, steps lost and manual steps, beside their goals; and by kind how long it took."""
    found = account(soaked.events)
    told = [event for event in soaked.events if event["event"] == "recovered"]
    faults, over = Counter(soaked.struck), Counter(map(_kind, told))
    lost = sum(one.steps for one in found.causes)
    steps = sum(event["event"] == "step" for event in soaked.events)
    made = [
        _row(f"{case}: goodput", GOAL, found.goodput, "share", f"{found.useful:.0f} of {found.wall:.0f} s"),
        _row(f"{case}: faults got over", faults.total(), (faults & over).total(), "faults", "-"),
        _row(f"{case}: failures that were no fault of ours", 0, found.failures - faults.total(), "failures", "-"),
        _row(f"{case}: steps lost", 0, lost, "steps", f"of {steps}"),
        _row(f"{case}: manual steps", 0, soaked.manual, "steps", "-"),
    ]
    for kind in sorted(faults | over):
        times = [float(event["seconds"]) for event in told if _kind(event) == kind]
        made.append(_row(f"{case}: {kind}, got over", faults[kind], len(times), "faults", "-"))
        if times:
            again = sum(one.steps for one in found.causes if KINDS.get(one.kind, one.kind) == kind)
            spread = f"{min(times):.2f}-{max(times):.2f} (n={len(times)})"
            middle = statistics.median(times)
            made.append(Row(f"{case}: {kind}, to the next step", "every", EVERY, middle, EVERY / middle, "s", spread))
            made.append(_row(f"{case}: {kind}, steps lost", 0, again, "steps", "-"))
    return made


def _kind(event: events.Event) -> str:
    """The fault behind a recovery, where the run log has a word for it; else that word."""
    told = str(event.get("kind"))
    return KINDS.get(told, told)


def _row(case: str, goal: float, own: float, unit: str, spread: str) -> Row:
    """Of a goal of none, and of what nobody wanted, the ratio is that of one more."""
    ratio = own / goal if goal else 1 / (1 + own)
    return Row(case, "goal", float(goal), float(own), ratio, unit, spread)
