"""Failures, and what is done against them: how long they last, what is lost, and what saving costs.

    python bench/acme.py [--part PART] [--quick] [--pairs N] [--json FILE] [--minutes N]

PART is `recovery` (what follows here, and the default), `save` (acme_save.py) or `soak` (acme_soak.py, for
N minutes).

Recovery is our supervisor beside torchrun: from a failure of one rank to the next step, and steps done again. The same
decoder, batch and checkpoints every 5 steps; 2 ranks, Gloo, a thread each. torchrun (`--max-restarts`,
`--monitor-interval 0.1`) starts a plain DDP loop whose process group has a timeout of 10 s (the default is 30 minutes)
and a prefix of its own for each attempt, without which it does not recover over Gloo at all. Each fault strikes the
last rank before its forward pass. SIGSTOP is measured once, as torchrun takes most of a minute over it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
import acme_save
import acme_soak
from acme_rank import Task
from table import Row, arguments, interval, publish

PEER = "torchrun with a prefix per attempt"
RANKS, APART, LIMIT = 2, 12, 280.0
NAMES = {"kill": "SIGKILL", "raise": "exception", "hang": "sleeps for ever", "stop": "SIGSTOP"}


class Cost(NamedTuple):
    """Of one fault: seconds from it to the end of the next step, and steps done again."""

    what: str
    seconds: float
    steps: int


def script(rounds: int) -> tuple[tuple[str, int], ...]:
    """(what, step): the first three kinds `rounds` times each, and SIGSTOP once."""
    order = [*("kill", "raise", "hang") * rounds, "stop"]
    return tuple((what, 8 + APART * index) for index, what in enumerate(order))


def costs(folder: Path) -> list[Cost]:
    """From the lines (time, what, step) that the program told."""
    lines = [line.split() for line in (folder / "told").read_text().splitlines()]
    told = sorted((float(when), what, int(step)) for when, what, step in lines)
    found = []
    for index, (when, what, _) in enumerate(told):
        if what not in NAMES:
            continue
        reached = max((step for _, kind, step in told[: index + 1] if kind == "step"), default=0)
        again = next(place for place in range(index, len(told)) if told[place][1] == "run")
        reached = max([reached, *(step for _, kind, step in told[index:again] if kind == "step")])
        resumed = told[again][2]
        stepped = next(at for at, kind, _ in told[again:] if kind == "step")
        found.append(Cost(what, stepped - when, reached - resumed))
    return found


def measure(kind: str, rounds: int) -> list[Cost]:
    with tempfile.TemporaryDirectory(prefix="acme-") as folder:
        faults = script(rounds)
        task = Task(folder, RANKS, faults[-1][1] + APART, faults)
        program = [str(Path(__file__).parent / "acme_rank.py"), kind, msgspec.json.encode(task).decode()]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        torchrun += [f"--max-restarts={len(faults) + 1}", "--monitor-interval=0.1"]
        command = [sys.executable, *(torchrun if kind == "ddp" else ()), *program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise SystemExit(f"{kind} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return costs(Path(folder))


def importing() -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - begun


def row(case: str, theirs: Sequence[float], own: Sequence[float], unit: str) -> Row:
    """Medians; the spread is that of ours, as the peer's are other faults of another run."""
    low, high = interval(own)
    middle, peers = statistics.median(own), statistics.median(theirs)
    ratio = peers / middle if middle else float(peers + 1)
    said = f"ours {low:.2f}-{high:.2f}, peer {min(theirs):.2f}-{max(theirs):.2f} (n={len(own)}, {len(theirs)})"
    return Row(case, PEER, peers, middle, ratio, unit, said)


def recovery(rounds: int) -> list[Row]:
    mine, theirs = measure("ours", rounds), measure("ddp", rounds)
    imports = [importing() for _ in range(3)]
    rows = []
    for what, name in NAMES.items():
        own, peer = ([one for one in side if one.what == what] for side in (mine, theirs))
        rows.append(row(f"{name}: to the next step", [c.seconds for c in peer], [c.seconds for c in own], "s"))
    lost = [[float(one.steps) for one in side] for side in (theirs, mine)]
    rows.append(row("steps done again, all faults", *lost, "steps"))
    kills = [one.seconds for one in mine if one.what == "kill"]
    low, high = interval(kills)
    middle, usual = statistics.median(kills), statistics.median(imports)
    rows.append(
        Row(
            "SIGKILL beside importing torch",
            "import torch",
            usual,
            middle,
            usual / middle,
            "s",
            f"{low:.2f}-{high:.2f}",
        )
    )
    return rows


def main() -> None:
    options = arguments(
        __doc__ or "",
        part={"choices": ("recovery", "save", "soak"), "default": "recovery"},
        minutes={"type": float, "default": 30.0, "help": "of the soak"},
    )
    quick, pairs = options.quick, options.pairs
    if options.part == "save":
        rows = acme_save.rows(pairs or (3 if quick else 15), quick)
    elif options.part == "soak":
        rows = acme_soak.rows(min(options.minutes, 3.0) if quick else options.minutes)
    else:
        rows = recovery(pairs or (1 if quick else 2))
    publish(rows, options.json)


if __name__ == "__main__":
    main()
