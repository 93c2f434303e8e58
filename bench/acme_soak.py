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
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from acme_rank import Task
from espalier.track import events
from espalier.track.ledger import Account, account
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
"""The ledger's words for them."""


def run(seconds: float, folder: Path) -> tuple[Account, list[str]]:
    """Trains for so long under fire; what the run log says of it, and the faults there were."""
    draw, struck = random.Random(SEED), []
    task = Task(str(folder), RANKS, 10_000_000, (), every=None, due=True)
    program = [str(Path(__file__).with_name("acme_rank.py")), "ours", msgspec.json.encode(task).decode()]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, *program], stdout=said, stderr=said)
        try:
            _begun(process, folder)
            until, due = time.monotonic() + seconds, time.monotonic() + EVERY
            while time.monotonic() < until:
                time.sleep(0.05)
                if process.poll() is not None:
                    raise SystemExit(f"the run ended by itself:\n{(folder / 'said').read_text()[-3000:]}")
                if time.monotonic() > due and time.monotonic() + EVERY / 2 < until:
                    due += EVERY
                    what = draw.choices(list(MIX), weights=list(MIX.values()))[0]
                    (folder / "due.part").write_text(f"{what} {draw.randrange(RANKS)}")
                    (folder / "due.part").rename(folder / "due")
                    struck.append(what)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()  # its ranks end with it
                process.wait()
    return account(events.read(folder / "run" / "events.jsonl")), struck


def _begun(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for the first step."""
    deadline = time.monotonic() + 120
    while not (folder / "told").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not begin:\n{(folder / 'said').read_text()[-3000:]}")
        time.sleep(0.1)


def rows(minutes: float) -> list[Row]:
    """Goodput beside its goal, and by cause how often and how long."""
    with tempfile.TemporaryDirectory(prefix="acme-soak-") as name:
        found, struck = run(60 * minutes, Path(name))
    case = f"{minutes:g} min, a fault every {EVERY:g} s, {RANKS} ranks, {os.cpu_count()} cores"
    count = f"{found.failures} failures of {len(struck)} faults"
    made = [
        Row(f"{case}: goodput", "goal", GOAL, found.goodput, found.goodput / GOAL, "share", count),
        _row(
            f"{case}: faults that the run got over", len(struck), sum(one.recovered for one in found.causes), "faults"
        ),
    ]
    for one in found.causes:
        what = f"{case}: {KINDS.get(one.kind, one.kind)}, {one.count} times"
        mean = one.down / max(1, one.recovered)
        made.append(
            Row(f"{what}, seconds to the next step", "every", EVERY, mean, EVERY / mean if mean else 0, "s", "-")
        )
        made.append(_row(f"{what}, steps done again", 0, one.steps, "steps"))
    return made


def _row(case: str, goal: int, own: int, unit: str) -> Row:
    ratio = own / goal if goal else 1 / (1 + own)
    return Row(case, "goal", float(goal), float(own), ratio, unit, "-")
