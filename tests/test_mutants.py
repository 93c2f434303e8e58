"""mutants.toml: three lines of each system's formula, each with a test that fails where the line is broken."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]
ROWS = mutants()
SYSTEMS = list(dict.fromkeys(row.system for row in ROWS))


def papers() -> set[str]:
    """The systems of docs/papers.md."""
    lines = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
    names = {line.split("|")[1].strip() for line in lines if line.startswith("|")}
    return {name for name in names if name != "system" and name.strip("-")}


def test_every_system_has_three_mutants() -> None:
    assert Counter(row.system for row in ROWS) == dict.fromkeys(papers(), 3)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.system}: {row.line}" for row in ROWS])
def test_a_line_stands_once_in_its_file_and_what_takes_its_place_is_python(row: Mutant) -> None:
    assert row.line != row.mutation
    ast.parse(row.text())


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.system}: {row.line}" for row in ROWS])
def test_the_test_of_a_row_is_there_and_runs_in_the_normal_suite(row: Mutant) -> None:
    file, _, name = row.test.partition("::")
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
    assert not [mark for mark in marks if mark in ("pytest.mark.slow", "pytest.mark.soak")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_tests_of_a_system_kill_its_mutants(system: str) -> None:
    command = [sys.executable, "tests/mutants.py", "--only", system, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
