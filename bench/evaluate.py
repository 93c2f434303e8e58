"""Evaluation beside training: what training feels of it, next to evaluation in the training loop.

1. A run of two ranks on all cores here is taken up again and trains on. All its held-out data is evaluated at every
   checkpoint: in the loop (validation), or beside it (`espalier eval --watch`, begun before, and no validation). The
   losses must be equal. "until trained": steps per second to the last step; "until evaluated": to the last figure, if
   that is later.
2. A run trains likewise, and in turns nothing, a watch, and the same watch at normal priority works beside it. Both
   have begun before, and are stopped (SIGSTOP) while it is not their turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from table import Row, arguments, compare, publish

EVERY, EVALUATIONS = 40, 4  # steps between two evaluations, and how many there are

RECIPE = """
[model]
depth = 2
width = 64
heads = 4
[data]
path = "corpus"
validation = 0.5
[train]
steps = 1000000
sequence = 128
batch_tokens = 2048
validate_every = 1000000
validate_tokens = 1000000
[checkpoint]
every = 50
[plan]
trial = false
[plan.pin]
ranks = 2
threads = 1
"""

PLAIN = """
import sys
from espalier.cli import main as cli
from espalier.evaluate import low_priority
low_priority.step_back = lambda *_: None
if __name__ == "__main__":  # the workers import this file too
    sys.exit(cli.main())
"""


@contextlib.contextmanager
def program(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program in `folder`, in a session of its own as in a terminal of its own, ended with the block."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a pipe that nobody reads would stop it
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # not SIGINT, which what a shell starts in the background does not hear
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(holds: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.05)


# --- in the loop, or beside it -----------------------------------------------------------------------------------


def logged(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def trained(folder: Path, name: str, beside: bool) -> tuple[float, float, dict[int, float]]:
    """(steps/s until trained, until evaluated, loss by step) of a run evaluated in the loop, or beside it by a watch
    that was ready when it was taken up again."""
    run, last = folder / "runs" / name, EVERY * EVALUATIONS
    log = run / "events.jsonl"
    kind, validate = ("eval", 10**6) if beside else ("validation", EVERY)
    command = ["-m", "espalier", "train", "recipe.toml", f"name={name}", f"train.steps={last}"]
    command += [f"train.validate_every={validate}", f"checkpoint.every={EVERY}", f"checkpoint.keep={EVALUATIONS + 1}"]

    def figures() -> dict[int, float]:
        found = [event for event in logged(log) if event["event"] == kind and event.get("metric", "loss") == "loss"]
        return {event["step"]: event.get("value", event.get("loss")) for event in found if event["step"] % EVERY == 0}

    with contextlib.ExitStack() as programs:
        with program(folder, *command):
            until(lambda: any(event["event"] == "checkpoint" for event in logged(log)), "the first checkpoint")
        if beside:
            programs.enter_context(program(folder, "-m", "espalier", "eval", str(run), "--watch"))
            until(lambda: bool(figures()), "the first evaluation")
        before = len(logged(log))
        training = programs.enter_context(program(folder, *command))
        until(lambda: training.poll() is not None, "the end of training")
        until(lambda: len(figures()) == EVALUATIONS, "the last evaluation")
    events = logged(log)[before:]
    times = [event["time"] for event in events if event["event"] == "step"]
    evaluated = max(event["time"] for event in events if event["event"] == kind)
    done = len(times) - 1
    return done / (times[-1] - times[0]), done / (max(times[-1], evaluated) - times[0]), figures()


def beside_or_within(folder: Path, pairs: int) -> list[Row]:
    measured = []
    for pair in range(pairs):
        mine, theirs = trained(folder, f"beside-{pair}", True), trained(folder, f"within-{pair}", False)
        assert mine[2].keys() == theirs[2].keys()
        assert all(abs(mine[2][step] - loss) < 1e-4 * loss for step, loss in theirs[2].items()), "other losses"
        measured.append((mine, theirs))
    case = f"training, all held-out data evaluated every {EVERY} steps, 2 ranks on all cores"
    return [
        compare(
            f"{case}, until {what}", "in the loop", "steps/s", [(mine[at], theirs[at]) for mine, theirs in measured]
        )
        for at, what in enumerate(("trained", "evaluated"))
    ]


# --- beside training ---------------------------------------------------------------------------------------------


def questions(path: Path, count: int, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    lines = []
    for a, b in draw.integers(0, 999, (count, 2)):
        right = int(a + b)
        choices = [str(right), str(right + 1), str(right - 10), f"it is {right + 100}"]
        lines.append(json.dumps({"question": f"What is the sum of {a} and {b}?", "choices": choices, "answer": 0}))
    path.write_text("\n".join(lines))
    return path


def signalled(process: subprocess.Popen[str], number: int) -> None:
    """Sends a signal to a program and all that it started."""
    top = psutil.Process(process.pid)
    for one in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def steps(log: Path, seconds: float) -> float:
    """Steps per second over the next `seconds`, from the log's own times."""
    since = time.time()
    time.sleep(seconds)
    events = [json.loads(line) for line in log.read_text().splitlines() if '"event":"step"' in line]
    fresh = [event["time"] for event in events if event["time"] >= since]
    return (len(fresh) - 1) / (fresh[-1] - fresh[0])


@contextlib.contextmanager
def frozen(folder: Path, run: str, plain: bool) -> Iterator[subprocess.Popen[str]]:
    """A watch of `run` that infers on both cores, stopped for now: beside training its start would take a minute."""
    command = ["plain.py"] if plain else ["-m", "espalier"]
    words = ["eval", run, "--watch", "--workers", "2", "--task", "sums=sums.jsonl"]
    with program(folder, *command, *words) as watch:
        until(lambda: bool(list((folder / run / "eval/held").glob("step-*"))), "the watch's first checkpoint")
        signalled(watch, signal.SIGSTOP)
        try:
            yield watch
        finally:
            signalled(watch, signal.SIGKILL)


def beside(log: Path, watch: subprocess.Popen[str], seconds: float) -> float:
    """Steps per second while a watch works."""
    signalled(watch, signal.SIGCONT)
    try:
        return steps(log, seconds)
    finally:
        signalled(watch, signal.SIGSTOP)


def beside_training(folder: Path, pairs: int, seconds: float) -> list[Row]:
    questions(folder / "sums.jsonl", 30_000, 0)  # more than the windows have time for: it is busy all through
    run, log, measured = folder / "runs/recipe", folder / "runs/recipe/events.jsonl", []
    with program(folder, "-m", "espalier", "train", "recipe.toml"):
        until(lambda: bool(list((run / "checkpoints").glob("step-????????"))), "the first checkpoint")
    shutil.copytree(run, folder / "runs/other")  # each watch has its own
    with (
        frozen(folder, "runs/recipe", plain=False) as low,
        frozen(folder, "runs/other", plain=True) as usual,
        program(folder, "-m", "espalier", "train", "recipe.toml", "checkpoint.every=1000000"),
    ):
        began = time.time()
        until(lambda: log.stat().st_mtime > began, "training going on")
        steps(log, seconds)
        for _ in range(pairs):
            alone = steps(log, seconds)
            measured.append((alone, beside(log, low, seconds), beside(log, usual, seconds)))
    case = "training beside a busy watch, 2 ranks on all cores"
    return [
        compare(case, "training alone", "steps/s", [(mine, alone) for alone, mine, _ in measured]),
        compare(case, "watch at normal priority", "steps/s", [(mine, plain) for _, mine, plain in measured]),
    ]


def prepare(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "plain.py").write_text(PLAIN)
    (folder / "corpus").mkdir()
    for number in range(20):
        sums = "".join(f"The sum of {number} and {other} is {number + other}.\n" for other in range(900))
        (folder / "corpus" / f"{number}.txt").write_text(sums)


def main() -> None:
    part = {"choices": ("loop", "training"), "help": "only this one of the two"}
    options = arguments(__doc__ or "", part=part)
    pairs = options.pairs or (3 if options.quick else 7)
    folder = Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    rows = []
    try:
        prepare(folder)
        if options.part in (None, "loop"):
            rows += beside_or_within(folder, pairs)
        if options.part in (None, "training"):
            rows += beside_training(folder, pairs, 4.0 if options.quick else 6.0)
    finally:
        shutil.rmtree(folder)
    publish(rows, options.json)


if __name__ == "__main__":
    main()
