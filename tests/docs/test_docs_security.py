"""docs/security.md promises nothing that no test shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if line.startswith("| **")]


def is_test(name: str) -> bool:
    """Whether `tests/path.py::test_name` exists."""
    file, _, function = name.partition("::")
    path = ROOT / file
    return path.is_file() and any(
        isinstance(node, ast.FunctionDef) and node.name == function for node in ast.parse(path.read_text()).body
    )


def test_every_promise_names_tests_that_exist() -> None:
    assert len(ROWS) > 10
    for row in ROWS:
        *_, tests, _ = row.split("|")
        names = re.findall(r"`([^`]+)`", tests)
        assert names, row
        assert all(map(is_test, names)), names


def test_the_search_finds_what_is_not_there() -> None:
    assert not is_test("tests/docs/test_docs_security.py::test_nothing")
    assert not is_test("tests/docs/no.py::test_nothing")


def test_how_to_report_points_to_the_page() -> None:
    assert "(docs/security.md)" in (ROOT / "SECURITY.md").read_text()
