"""What a run executes before its first step, counted in the process of rank 0 and before it was forked.

Of the first run of a recipe, which builds the corpus and decides the plan by estimates, and of the same begun again.
The second finds shards and plan in the cache: of 651 functions `train` has 118, which put the model together and
join the ranks; `language` 92, which open the corpus and build the model; `recipe` and `cli` 149; `plan` 61; `comm` 53;
`mechanisms`, `parallel` and `optim` 61, which lay states, groups and the optimizer on the ranks. The first has
321 more: it cuts the corpus into shards, searches the layouts of all mechanisms, prices them (of those that share
sequences also shares by speed and when parameters are gathered) and says why one is the plan and what it is made of.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import known

PROGRAM = """
import inspect, json, sys, threading
from pathlib import Path

folder = Path(sys.argv[1])
codes = {}  # by id: hashing one reads all its constants, at each of millions of calls


def entered(frame, event, argument):
    if event == "call":
        codes.setdefault(id(frame.f_code), frame.f_code)


def seen():
    functions = set()
    for code in list(codes.values()):
        ours = "/src/espalier/" in code.co_filename and not code.co_name.startswith("<")
        if ours and code.co_flags & inspect.CO_OPTIMIZED:  # no bodies of classes
            functions.add((code.co_filename.rpartition("/src/espalier/")[2], code.co_qualname))
    return sorted(functions)


sys.setprofile(entered)
threading.setprofile(entered)

from espalier.train import trainer
from espalier.cli.main import main

plain = trainer.Trainer.train_step


def train_step(self, *arguments):
    if self.setting.place.rank == 0 and not (folder / "seen").exists():
        sys.setprofile(None)
        (folder / "seen").write_text(json.dumps(seen()))
        (folder / "modules").write_text(json.dumps(sorted(sys.modules)))
    return plain(self, *arguments)


trainer.Trainer.train_step = train_step
sys.exit(main(sys.argv[2:]))
"""
RECIPE = """
[model]
depth = 1
width = 32
heads = 2
feed_forward = 64
[data]
path = "corpus"
[train]
steps = 2
sequence = 32
batch_tokens = 256
validate_tokens = 256
[plan]
trial = false
[plan.pin]
ranks = 2
"""
FIRST, REPEATED, RESILIENCE = 978, 651, 4
"""Functions of the package before rank 0's first step, in a first run and in another of the same recipe; and of what is
there for failures."""


VERB = """
import json, sys
from espalier.cli.main import main

code = main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""
SLOW = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.tensor")
"""Modules of which each takes as long to import as a third of torch, or more; no verb of this run needs any."""


@pytest.fixture(scope="module")
def folder(corpus: Path, once: Any, machine: dict[str, Any]) -> Path:
    """With two runs that share a cache, and what they saw; this machine was measured before. Of all workers."""

    def made(folder: Path) -> str:
        known(folder, machine)
        shutil.copytree(corpus, folder / "corpus")
        (folder / "program.py").write_text(PROGRAM)
        (folder / "recipe.toml").write_text(RECIPE)
        for name in ("first", "repeated"):
            (folder / name).mkdir()
            program = (str(folder / "program.py"), str(folder / name))
            errors_of(folder, *program, "train", "recipe.toml", "--run", str(folder / name / "run"))
        return str(folder)

    return Path(once("before_the_first_step", made))


def errors_of(folder: Path, *words: str) -> str:
    """Standard error of a program of Python that ends well, with the cache in `folder`."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[list[list[str]]]:
    """Functions by file, of both runs."""
    return [json.loads((folder / name / "seen").read_text()) for name in ("first", "repeated")]


@pytest.mark.parametrize(("number", "limit"), [(0, FIRST), (1, REPEATED)])
def test_few_functions_run_before_the_first_step(seen: list[list[list[str]]], number: int, limit: int) -> None:
    run = seen[number]
    assert len(run) <= limit, f"{len(run)} in {len({path for path, _ in run})} files"
    assert len([name for path, name in run if path.startswith("launch/resilience/")]) <= RESILIENCE
    assert ["checkpoint/coordination.py", "Coordinator.agree"] not in run, (
        "a new run looks for no state, so its ranks need not agree"
    )


def test_a_repeated_run_searches_no_plan(seen: list[list[list[str]]]) -> None:
    first, repeated = seen
    assert ["plan/search.py", "search"] in first
    assert not [name for path, name in repeated if path in ("plan/search.py", "plan/step_time.py", "plan/explain.py")]


def test_ranks_import_nothing_slow_before_the_first_step(folder: Path) -> None:
    for name in ("first", "repeated"):
        modules = json.loads((folder / name / "modules").read_text())
        assert "torch" in modules
        assert not [module for module in SLOW if module in modules]


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("train recipe.toml --run first/run", ("torch", "numpy")),
        ("report first/run", ("torch",)),
        ("explain amsp", ("torch", "numpy")),
        ("plan recipe.toml", SLOW),
        ("predict first/run x --tokens 1", SLOW),
        ("eval first/run", SLOW),
    ],
)
def test_a_verb_imports_only_what_it_needs(folder: Path, words: str, absent: tuple[str, ...]) -> None:
    modules = json.loads(errors_of(folder, "-c", VERB, *words.split()).splitlines()[-1])
    assert not [module for module in absent if module in modules]
