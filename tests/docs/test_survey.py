"""docs/survey.md: every capability that matters has an answer, and every answer points to something that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# What a training system cannot be without.
MUST = {
    "A1",
    "A2",
    "A3",
    "A5",
    "A6",
    "B1",
    "B2",
    "B3",
    "B4",
    "B5",
    "B7",
    "B8",
    "B10",
    "C1",
    "C3",
    "C5",
    "D1",
    "D2",
    "D4",
    "D5",
}
MUST |= {"E1", "E3", "E4", "E5", "F1", "F2", "F3", "F5", "F6", "F7", "F10", "F11", "F12", "G1", "G2", "G3"}


class Row(NamedTuple):
    name: str
    capability: str
    state: str
    where: str
    test: str

    @property
    def pointers(self) -> list[str]:
        """Files and tests named in backticks."""
        return re.findall(r"`([^`]+)`", f"{self.where} {self.test}")


def rows() -> list[Row]:
    page = (ROOT / "docs" / "survey.md").read_text(encoding="utf-8")
    found = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in page.splitlines() if "|" in line]
    return [Row(*cells) for cells in found if re.fullmatch(r"[A-G]\d+", cells[0])]


ROWS = rows()


def test_every_must_row_is_answered_once() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert set(names) >= MUST


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_an_answer_is_one_of_four_and_says_what_it_must(row: Row) -> None:
    assert len(row.capability) > 20
    if row.state == "yes":
        assert any(pointer.startswith("src/") for pointer in row.pointers)
        assert "::" in row.test
    elif row.state == "partly":
        assert any(pointer.startswith("src/") for pointer in row.pointers)
        assert "missing:" in row.where
    elif row.state == "not yet":
        assert not row.where
        assert not row.test
    else:
        assert row.state == "no"
        assert row.where.startswith("because ")


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_pointer_leads_somewhere(row: Row) -> None:
    for pointer in row.pointers:
        file, _, name = pointer.partition("::")
        path = ROOT / file
        assert path.exists(), pointer
        if name:
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, pointer
