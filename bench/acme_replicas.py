"""What a replica feels of another's death: ours (`espalier.launch.resilience.guard`) beside torchft.

One part of bench/acme.py. Two replicas of a whole decoder train at every step together; one is killed, stopped, or its
code raises, at any moment; once the other trains alone, a new process takes its place and heals. The pause is the
longest time between two steps of the survivor from the fault until then; a step is lost where what the survivor
computed did not count. torchft trains as in its own train_ddp.py. Both are given the same: a heartbeat missed for 0.6 s
is death (torchft's default is 5 s, and 60 s for who has not joined); a message of torchft's has to come in 1 s, as it
finds a stopped peer by that alone; its quorum is looked for every 20 ms (100).
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from acme_replica import Task
from table import Row

SILENCE, MESSAGE, GOAL = 0.6, 1.0, 1.0
"""Seconds of silence that are death, on both sides; in which a message of torchft's has to come; and how long the
survivor may stand still at most."""
TOGETHER, APART, LIMIT = 10, 5, 60.0
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "exception": signal.SIGUSR1}


class Line(NamedTuple):
    """One step as a replica told it."""

    time: float
    step: int
    replicas: int
    counts: bool


class Felt(NamedTuple):
    """What the survivor felt of one fault: seconds between two steps, steps that did not count, seconds until the new
    process's first common step, its start and imports included; and the survivor's usual step."""

    what: str
    pause: float
    lost: int
    back: float
    usual: float


class Crew:
    """Two replicas and the server they meet at. Has state: their processes. A context manager, which ends them."""

    def __init__(self, kind: str, python: str, folder: Path) -> None:
        self.kind, self.python, self.folder, self.made = kind, python, folder, 0
        self.processes: list[subprocess.Popen[str]] = []
        self.files: dict[int, Path] = {}

    def __enter__(self) -> Crew:
        if self.kind == "guard":
            from torch.distributed import TCPStore

            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self.store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            self.server = str(port)
        else:
            found = self.start("lighthouse", Task("", "", 0, SILENCE, MESSAGE))
            assert found.stdout is not None
            self.server = found.stdout.readline().strip()
        self.members = {member: self.replica(member, returns=False) for member in (0, 1)}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def start(self, kind: str, task: Task) -> subprocess.Popen[str]:
        command = [self.python, str(Path(__file__).with_name("acme_replica.py")), kind]
        log = (self.folder / f"{kind}-{len(self.processes)}.log").open("w")
        process = subprocess.Popen(
            [*command, msgspec.json.encode(task).decode()], stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.processes.append(process)
        return process

    def replica(self, member: int, returns: bool) -> subprocess.Popen[str]:
        self.made += 1
        self.files[member] = self.folder / f"told-{member}-{self.made}"
        self.files[member].touch()
        return self.start(self.kind, Task(str(self.files[member]), self.server, member, SILENCE, MESSAGE, returns))

    def lines(self, member: int) -> list[Line]:
        """What the process that is `member` now has told."""
        told = [one.split() for one in self.files[member].read_text().splitlines()]
        return [Line(float(when), int(step), int(count), counts == "1") for when, step, count, counts in told]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not holds():
            if time.monotonic() > deadline:
                logs = "".join(path.read_text()[-1500:] for path in self.folder.glob("*.log"))
                raise SystemExit(f"{self.kind}: {what} did not happen in {LIMIT:.0f} s\n{logs}")
            time.sleep(0.05)

    def strike(self, what: str) -> Felt:
        """One fault, and a new replica in the place of the one that it met."""
        self.until(lambda: all(_ends(self.lines(member), 2, TOGETHER) for member in (0, 1)), "training together")
        usual = statistics.median(b.time - a.time for a, b in itertools.pairwise(self.lines(0)[-TOGETHER:]))
        victim, began = self.members[1], time.time()
        os.kill(victim.pid, FAULTS[what])
        self.until(lambda: _ends(self.lines(0), 1, APART), "going on alone")
        felt = [line for line in self.lines(0) if line.time > began - usual]
        counted = [line.time for line in self.lines(0) if line.counts]
        gaps = [b - a for a, b in itertools.pairwise(counted) if b > began]
        victim.kill()
        victim.wait()
        again = time.time()
        self.members[1] = self.replica(1, returns=True)
        self.until(lambda: _ends(self.lines(1), 2, 1), "coming back")
        back = next(line.time for line in self.lines(1) if line.replicas == 2 and line.counts) - again
        return Felt(what, max(gaps), sum(not line.counts for line in felt), back, usual)


def _ends(lines: list[Line], replicas: int, count: int) -> bool:
    """Whether the last `count` steps counted and were of so many replicas."""
    last = lines[-count:]
    return len(last) == count and all(line.counts and line.replicas == replicas for line in last)


def measure(kind: str, python: str, rounds: int) -> list[Felt]:
    """Every fault `rounds` times."""
    with tempfile.TemporaryDirectory(prefix="acme-replicas-") as name, Crew(kind, python, Path(name)) as crew:
        return [crew.strike(what) for _ in range(rounds) for what in FAULTS]


def rows(rounds: int, torchft: str | None) -> list[Row]:
    """The table: beside the goal, and beside torchft where there is an interpreter that has it."""
    kinds = {"ours": ("guard", sys.executable)} | ({"torchft": ("torchft", torchft)} if torchft else {})
    found: dict[str, list[Felt]] = {name: [] for name in kinds}
    for _ in range(rounds):  # in turns
        for name, (kind, python) in kinds.items():
            found[name] += measure(kind, python, 1)
    made = []
    for what in FAULTS:
        own = [one for one in found["ours"] if one.what == what]
        peer = [one for one in found.get("torchft", []) if one.what == what]
        case = f"{what}, 2 replicas: the survivor's pause"
        made.append(_row(case, "goal", [GOAL], [one.pause for one in own], "s"))
        if peer:
            made.append(_row(case, "torchft", [one.pause for one in peer], [one.pause for one in own], "s"))
            case = f"{what}, 2 replicas: a new process takes part"
            made.append(_row(case, "torchft", [one.back for one in peer], [one.back for one in own], "s"))
    lost = {name: [float(one.lost) for one in several] for name, several in found.items()}
    made.append(_row("2 replicas: steps lost, all faults", "goal", [0.0], lost["ours"], "steps"))
    if torchft:
        made.append(_row("2 replicas: steps lost, all faults", "torchft", lost["torchft"], lost["ours"], "steps"))
        usual = {name: [one.usual for one in several] for name, several in found.items()}
        made.append(_row("2 replicas: a step when nothing happens", "torchft", usual["torchft"], usual["ours"], "s"))
    return made


def _row(case: str, peer: str, theirs: list[float], own: list[float], unit: str) -> Row:
    """Medians, of other faults each; a ratio of counts is of one more than each, as there may be none."""
    middle, other = statistics.median(own), statistics.median(theirs)
    ratio = (1 + other) / (1 + middle) if unit == "steps" else other / middle
    said = f"ours {min(own):.2f}-{max(own):.2f}, {peer} {min(theirs):.2f}-{max(theirs):.2f} (n={len(own)})"
    return Row(case, peer, other, middle, ratio, unit, said)
