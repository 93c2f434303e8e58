"""Evaluation apart from training: the makespan of many tasks beside FIFO, and what training feels of it.

1. Simulated, since nobody here has 32 GPUs: 63 datasets (Acme's number) on one and four nodes of eight workers. Acme
   gives the stages of one trial (30 % load and preparation, a half inference, 19 % metric), not how datasets differ,
   so their lengths are drawn from four shapes; the load is that of the median dataset's trial, the same for all, since
   all load one checkpoint. "fifo" is a job for each dataset that loads, infers and scores on its worker; "fifo,
   decoupled" has our single load and our metric workers, so that what is left is order and cut; "longest first, uncut"
   has our order too. "lower bound" is what no schedule can beat, both without the load: 0.87 would be 1.15 times it.
2. Real: one checkpoint of a small decoder, four multiple-choice tasks, two workers.
3. Real: a run trains with two ranks on all cores here, and in turns nothing, a watch, and the same watch at normal
   priority works beside it. Both have begun before, and are stopped (SIGSTOP) while it is not their turn.
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent))
from espalier.checkpoint.sharded import Checkpoints
from espalier.config import Gpt
from espalier.language import gpt
from espalier.language.tokenizer import open_tokenizer
from espalier.resilience.acme import background
from espalier.resilience.acme.background import Process
from espalier.resilience.acme.evaluate import packing, shared
from espalier.resilience.acme.evaluate.choices import MultipleChoice
from espalier.resilience.acme.evaluate.crew import Crew, Setup
from espalier.resilience.acme.evaluate.evaluator import Evaluation, joined
from espalier.resilience.acme.evaluate.packing import Pool, Times
from espalier.resilience.acme.evaluate.priors import Prior, Priors
from espalier.resilience.acme.evaluate.trials import Piece, cut, times
from table import Row, arguments, compare, publish

DATASETS = 63
RECORDS = 500  # per dataset: how finely it can be cut
SEEDS = 25
SHAPES = ("uniform", "exponential", "lognormal", "two kinds")
QUESTIONS = (60, 90, 420, 180)  # of the four tasks, in the order in which they are given
OPTIONS = Gpt(depth=2, width=64, heads=4, kv_heads=4, feed_forward=176, vocabulary=257, context=128, tied=True)

# --- simulated ---------------------------------------------------------------------------------------------------


def drawn(shape: str, seed: int) -> list[Times]:
    """Seconds of inference and metric of each dataset, 19 metric to 50 inference on average."""
    draw = np.random.default_rng(seed)
    whole = {
        "uniform": draw.uniform(10, 600, DATASETS),
        "exponential": draw.exponential(300, DATASETS),
        "lognormal": draw.lognormal(5.0, 1.0, DATASETS),
        "two kinds": np.where(draw.random(DATASETS) < 0.1, 900.0, 60.0),
    }[shape]
    share = draw.beta(2, 2 * 50 / 19, DATASETS)  # mean 19 / (19 + 50)
    return [Times(float(all_ * (1 - part)), float(all_ * part)) for all_, part in zip(whole, share, strict=True)]


def simulated(shape: str, nodes: int, seed: int, off: float = 1.0) -> dict[str, float]:
    """Makespans in seconds. `off`: priors are wrong by up to this factor, and nothing is shared or cut anew for it."""
    whole, pool = drawn(shape, seed), Pool(8 * nodes, 4 * nodes)
    load = 30 / 50 * float(np.median([one.inference for one in whole]))
    jobs = [Times(load + one.inference, one.metric) for one in whole]
    truth = {str(at): Prior(one.inference / RECORDS, one.metric / RECORDS, 1) for at, one in enumerate(whole)}
    wrong = off ** np.random.default_rng([seed, 1]).uniform(-1, 1, DATASETS)
    priors = {
        task: Prior(one.inference * factor, one.metric * factor, 1)
        for (task, one), factor in zip(truth.items(), wrong, strict=True)
    }
    made = cut([Piece(task, 0, RECORDS) for task in priors], priors, pool.inference)
    trials = [times(trial, truth) for trial in made]
    taken = packing.order([times(trial, priors) for trial in made], pool)
    return {
        "ours": load + packing.makespan(trials, taken, pool),
        "fifo": packing.coupled_makespan(jobs, packing.first_come(jobs), pool.inference),
        "fifo, decoupled": load + packing.makespan(whole, packing.first_come(whole), pool, longest=False),
        "longest first, uncut": load + packing.makespan(whole, packing.order(whole, pool), pool),
        "load": load,
        "lower bound": packing.lower_bound(trials, pool),
    }


def bare(runs: list[dict[str, float]]) -> list[tuple[float, float]]:
    """(ours, lower bound) without the load."""
    return [(one["ours"] - one["load"], one["lower bound"]) for one in runs]


def simulations() -> list[Row]:
    rows = []
    for nodes in (1, 4):
        for shape in SHAPES:
            runs = [simulated(shape, nodes, seed) for seed in range(SEEDS)]
            case = f"simulated, {DATASETS} {shape} datasets, {nodes} × 8 workers"
            for peer in ("fifo", "fifo, decoupled", "longest first, uncut"):
                rows.append(compare(case, peer, "s", [(one["ours"], one[peer]) for one in runs], False))
            rows.append(compare(case, "lower bound", "s", bare(runs), False))
            runs = [simulated(shape, nodes, seed, off=2.0) for seed in range(SEEDS)]
            case += ", priors off by up to 2×"
            rows.append(compare(case, "fifo", "s", [(one["ours"], one["fifo"]) for one in runs], False))
            rows.append(compare(case, "lower bound", "s", bare(runs), False))
    return rows


# --- one checkpoint, really --------------------------------------------------------------------------------------


def build() -> gpt.GPT:
    model = gpt.GPT(OPTIONS)
    gpt.initialise(model, 1)
    return model


def questions(path: Path, count: int, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    lines = []
    for a, b in draw.integers(0, 999, (count, 2)):
        right = int(a + b)
        choices = [str(right), str(right + 1), str(right - 10), f"it is {right + 100}"]
        lines.append(json.dumps({"question": f"What is the sum of {a} and {b}?", "choices": choices, "answer": 0}))
    path.write_text("\n".join(lines))
    return path


def asked(folder: Path, counts: tuple[int, ...]) -> dict[str, MultipleChoice]:
    names = [f"sums-{at}" for at in range(len(counts))]
    tokenizer = open_tokenizer("bytes")
    return {
        name: MultipleChoice(name, questions(folder / f"{name}.jsonl", count, at), tokenizer)
        for at, (name, count) in enumerate(zip(names, counts, strict=True))
    }


def job(task: MultipleChoice, target: Path, pipe: Connection) -> None:
    """A task as a job of its own: loads the checkpoint, infers, scores."""
    torch.set_num_threads(1)
    model = build()
    Checkpoints(target).load({"model": model})
    with torch.no_grad():
        sums = [task.score(task.infer(model.eval(), record)) for record in range(task.records)]
    pipe.send(joined(sums))


def fifo(tasks: dict[str, MultipleChoice], target: Path, workers: int) -> tuple[float, dict[str, Any]]:
    """(seconds, figures) when each of `workers` takes the next task and keeps it to its end."""
    began, waiting, running, found = time.perf_counter(), list(tasks.values()), {}, {}
    while waiting or running:
        while waiting and len(running) < workers:
            task = waiting.pop(0)
            running[task.name] = Process(partial(job, task, target))
        for name, process in list(running.items()):
            if process.pipe.poll(0.002):
                found[name] = process.pipe.recv()
                running.pop(name).end()
    return time.perf_counter() - began, found


def ours(crew: Crew, target: Path, priors: Priors) -> tuple[float, dict[str, Any]]:
    """The same from the checkpoint on the disk to the last figure; workers stand ready, as in a watch."""
    began = time.perf_counter()
    model = shared.load(Checkpoints(target), 1, torch.float32)
    evaluation = Evaluation(crew, model, list(crew.setup.tasks), priors)
    found = {result.task: dict(result.figures) for result in evaluation.run() if result is not None}
    took = time.perf_counter() - began
    model.close()
    return took, found


def one_checkpoint(folder: Path, pairs: int) -> Row:
    target = folder / "checkpoints"
    Checkpoints(target).save(1, {"model": build()}, {"step": 1}, wait=True)
    tasks = asked(folder, QUESTIONS)
    (folder / "raw").mkdir()
    setup = Setup(tasks, build, Pool(2, 1), [torch.device("cpu")], folder / "raw")
    priors, measured = Priors(folder / "priors.json"), []
    background.step_back = background._lower_session = lambda *_: (
        None
    )  # as FIFO's workers: this is not about priorities
    with Crew(setup) as crew:
        ours(crew, target, priors)  # the first evaluation of a watch has no priors yet
        for _ in range(pairs):
            mine, theirs = ours(crew, target, priors), fifo(tasks, target, 2)
            assert mine[1] == theirs[1], "the same questions have other answers"
            measured.append((mine[0], theirs[0]))
    return compare(f"one checkpoint, {QUESTIONS} questions, 2 workers", "fifo", "s", measured, False)


# --- beside training ---------------------------------------------------------------------------------------------

RECIPE = """
[model]
depth = 2
width = 64
heads = 4
[data]
path = "corpus"
[train]
steps = 1000000
sequence = 128
batch_tokens = 2048
validate_every = 1000000
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
from espalier import cli
from espalier.resilience.acme import background
background.step_back = background._lower_session = lambda *_: None
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


def until(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.05)


@contextlib.contextmanager
def frozen(folder: Path, run: str, plain: bool) -> Iterator[subprocess.Popen[str]]:
    """A watch of `run` that infers on both cores, stopped for now: beside training its start would take a minute."""
    command = ["-c", PLAIN] if plain else ["-m", "espalier"]
    words = ["eval", run, "--watch", "--workers", "2", "--task", "sums=sums.jsonl"]
    with program(folder, *command, *words) as watch:
        until(lambda: bool(list((folder / run / "eval/raw").glob("*"))), "the watch's first inference")
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
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "corpus").mkdir()
    for number in range(20):
        sums = "".join(f"The sum of {number} and {other} is {number + other}.\n" for other in range(900))
        (folder / "corpus" / f"{number}.txt").write_text(sums)
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


def main() -> None:
    part = {"choices": ("schedule", "checkpoint", "training"), "help": "only this one of the three"}
    options = arguments(__doc__ or "", part=part)
    torch.set_num_threads(1)
    pairs = options.pairs or (3 if options.quick else 7)
    rows = simulations() if options.part in (None, "schedule") else []
    folder = Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        if options.part in (None, "checkpoint"):
            rows.append(one_checkpoint(folder, pairs))
        if options.part in (None, "training"):
            rows += beside_training(folder, pairs, 4.0 if options.quick else 6.0)
    finally:
        shutil.rmtree(folder)
    publish(rows, options.json)


if __name__ == "__main__":
    main()
