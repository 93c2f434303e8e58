"""`python -O` leaves asserts out: none has an effect, and runs of every kind train without them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import espalier

SOURCE = Path(espalier.__file__).parent
PURE = {
    *("all", "any", "isinstance", "len", "list", "set", "sum", "tuple", "type"),
    *("get", "is_contiguous", "join", "numel", "values"),
}
"""What an assert may call. Each looks and changes nothing; a new one is added after a look at what it does."""
MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
TRAIN = '[train]\nsteps = 2\n[plan]\ntrial = false\ncluster = "machine.toml"\npin.ranks = 1\npin.threads = 1\n'
TEXT = '[data]\npath = "text.txt"\ntokenizer = "bytes"\n' + TRAIN.replace(
    "steps = 2", "steps = 2\nsequence = 32\nbatch_tokens = 64\nvalidate_tokens = 64"
)
RECIPES = {
    "gpt": '[model]\nkind = "gpt"\nwidth = 32\ndepth = 1\nheads = 2\n' + TEXT,
    "moe": '[model]\nkind = "moe"\nwidth = 32\ndepth = 1\nheads = 2\nexperts = 2\nactive = 1\n' + TEXT,
    "sage": '[model]\nkind = "sage"\nwidth = 8\n[data]\npath = "planted:nodes=60"\n' + TRAIN,
    "module": '[model]\nkind = "module"\nbuild = "mine:build"\n'
    + TRAIN.replace("steps = 2", "steps = 2\nbatch_tokens = 4"),
}
MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build():
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)

    def loss(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))

    return nn.Linear(4, 2), data, loss, data
"""
PROGRAM = """
import sys
from espalier.cli import main as cli

assert False, "python -O leaves this out"
for name in sys.argv[1:]:
    code = cli.main(["train", f"{name}.toml", "--run", f"runs/{name}"])
    print(f"{name} ended with {code}", flush=True)
"""


def asserts() -> Iterator[tuple[str, ast.Assert]]:
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert):
                yield f"{file.relative_to(SOURCE)}:{node.lineno}", node


def effects(condition: ast.expr) -> list[str]:
    """What a condition does besides looking, as far as its text says it."""
    binds = [ast.unparse(node) for node in ast.walk(condition) if isinstance(node, ast.NamedExpr | ast.Await)]
    calls = [node.func for node in ast.walk(condition) if isinstance(node, ast.Call)]
    names = [one.attr if isinstance(one, ast.Attribute) else ast.unparse(one) for one in calls]
    return [*binds, *(name for name in names if name not in PURE)]


def test_no_assert_has_an_effect():
    wrong = {where: found for where, node in asserts() if (found := effects(node.test))}
    assert not wrong


def test_an_assert_with_an_effect_is_noticed():
    for text in ("table.setdefault(name, one) == one", "(row := rows.pop())", "next(rows)", "names.add(name) is None"):
        assert effects(ast.parse(text, mode="eval").body)


@pytest.mark.slow
def test_all_kinds_of_runs_train_without_asserts(tmp_path):
    (tmp_path / "machine.toml").write_text(MACHINE)
    (tmp_path / "text.txt").write_text("".join(f"{n} foxes jump over {n * n} dogs\n" for n in range(400)))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "program.py").write_text(PROGRAM)
    for name, recipe in RECIPES.items():
        (tmp_path / f"{name}.toml").write_text(recipe)
    variables = {**os.environ, "PYTHONOPTIMIZE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "program.py", *RECIPES]
    ended = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=150, check=False
    )
    lines = [line for line in ended.stdout.splitlines() if " ended with " in line]
    assert lines == [f"{name} ended with 0" for name in RECIPES], ended.stdout + ended.stderr
