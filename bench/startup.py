"""How long a command takes before it does its work: processor seconds (user and system, children counted) beside those
of `import torch` in a fresh process, in turns.

    python bench/startup.py [--quick] [--pairs N] [--json FILE]

The recipe is a small text model on this machine's Python sources. "first step": until rank 0 has made one, of a run
whose data and plan are in the cache ("cached"), and of one on a machine where nothing is ("cold": it measures the
machine, cuts the text and tries candidates). `--quick`: one turn, without the cold one.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from table import Row, arguments, compare, publish

RECIPE = """[model]
depth = 2
[data]
path = "python:stdlib"
[train]
steps = 1
sequence = 128
batch_tokens = 4096
validate_every = 1000
[checkpoint]
every = 1000
"""
ESPALIER = (sys.executable, "-m", "espalier")
VERBS = {
    "explain": ("explain", "amsp"),
    "report": ("report", "run"),
    "train, of a finished run": ("train", "recipe.toml", "--run", "run"),
    "plan, the machine known": ("plan", "recipe.toml"),
    "predict, 1 token": ("predict", "run", "def ", "--tokens", "1"),
}
FIRST_STEP = """
import json, os, resource, sys
from espalier.cli.main import main
from espalier.train import trainer

make = trainer.Trainer.train_step
parent = os.getpid()


def train_step(self, *arguments):
    result = make(self, *arguments)
    if self.setting.place.rank == 0 and self.setting.folder is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        open(sys.argv[1], "w").write(json.dumps([used.ru_utime + used.ru_stime, len(self.setting.plan.ranks)]))
        os.kill(os.getppid(), 2)
    return result


def forks():
    if os.getpid() != parent:
        return
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    open(sys.argv[1] + ".before", "w").write(json.dumps(sum(each.ru_utime + each.ru_stime for each in used)))


os.register_at_fork(before=forks)
trainer.Trainer.train_step = train_step
sys.exit(main(sys.argv[2:]))
"""


def seconds(command: Sequence[str], folder: Path, cache: Path) -> float:
    """Processor seconds of `command` and what it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step(folder: Path, cache: Path) -> float:
    """Processor seconds of a new run until each of its ranks has made a step."""
    run, marks = folder / "new", folder / "marks"
    shutil.rmtree(run, ignore_errors=True)
    command = (sys.executable, "-c", FIRST_STEP, str(marks), "train", "recipe.toml", "--run", str(run))
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
    of_rank, ranks = json.loads(marks.read_text())
    return json.loads(Path(f"{marks}.before").read_text()) + of_rank * ranks


def main() -> None:
    """Measures and prints; the ratio is torch's import over the command, as everywhere."""
    options = arguments("How long a command takes before it does its work.")
    turns = options.pairs or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name), Path(name, "cache")
        (folder / "recipe.toml").write_text(RECIPE)
        seconds((*ESPALIER, "train", "recipe.toml", "--run", "run"), folder, cache)
        pairs: dict[str, list[tuple[float, float]]] = {}
        for turn in range(turns):
            torch = seconds((sys.executable, "-c", "import torch"), folder, cache)
            for case, words in VERBS.items():
                pairs.setdefault(case, []).append((seconds((*ESPALIER, *words), folder, cache), torch))
            pairs.setdefault("train, first step, cached", []).append((first_step(folder, cache), torch))
            if not options.quick:
                cold = first_step(folder, folder / f"cold-{turn}")
                pairs.setdefault("train, first step, cold", []).append((cold, torch))
    rows: list[Row] = [compare(case, "import torch", "s", pair, higher_is_better=False) for case, pair in pairs.items()]
    publish(rows, options.json)
    print("\n".join(f"{row.case}: {row.ours / row.peer_value:.2f} times import torch" for row in rows))


if __name__ == "__main__":
    main()
