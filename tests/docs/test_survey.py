"""docs/survey.md: every capability that matters has an answer, and every answer points to something that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Sections of the paper in their order, and which rows answer each.
PAPER = {
    "3.1 AI accelerators": "A1 A2",
    "3.2 Network infrastructure": "A3 A4",
    "3.3 Storage": "A5 A6",
    "3.4 Scheduling": "A7 A8",
    "4.1 Hybrid parallelism": "B1 B2 B3 B4 B5 B6",
    "4.2 Auto parallelism": "B7",
    "4.3 Heterogeneous parallelism": "B8 B9",
    "5.1 Operator optimization": "C1 C2",
    "5.2 Mixed-precision training": "C3 C4 C5",
    "6.1 Activation recomputation": "D1",
    "6.2 Redundancy reduction": "D2",
    "6.3 Defragmentation": "D3",
    "6.4 Offloading": "D4 D5",
    "7.1 Collective communication": "E1 E2",
    "7.2 Communication scheduling": "E3",
    "7.3 In-network aggregation": "E6",
    "8.1 LLM failure analysis": "F1",
    "8.2 Anomaly detection": "F2 F3 F4",
    "8.3 Checkpoint-based recovery": "F5 F6 F7",
    "8.4 Checkpoint-free recovery": "F8 F9",
}
BEYOND = "B10 C6 E4 E5 F10 F11 F12 G1 G2 G3 G4"
"""Rows of systems in Espalier and of what a user sees that are in no section of the paper."""


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
MODULES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in (ROOT / "src").rglob("*.py")
}
HELPERS = {path.stem: path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")}


@cache
def imported(file: Path) -> frozenset[str]:
    """The modules, and what is taken from them, that a file imports, wherever the import stands."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(names)


def reached(file: Path) -> set[str]:
    """The modules that a test imports, itself or by its helpers, and those that these import."""
    helpers = [HELPERS[name.rpartition(".")[2]] for name in imported(file) if name.rpartition(".")[2] in HELPERS]
    near = set().union(*map(imported, (file, *helpers))) & MODULES.keys()
    return near.union(*(imported(MODULES[name]) for name in near))


def test_every_section_of_the_paper_is_answered_once() -> None:
    wanted = " ".join([*PAPER.values(), BEYOND]).split()
    assert sorted(row.name for row in ROWS) == sorted(wanted)


def test_the_page_lists_the_sections_of_the_paper_with_their_rows() -> None:
    page = (ROOT / "docs" / "survey.md").read_text(encoding="utf-8")
    sections = re.findall(r"^\| (\d\.\d [^|]+) \| ([A-G0-9 ]+) \|$", page, re.MULTILINE)
    assert sections == list(PAPER.items())
    assert re.findall(r"^\| in no section: [^|]+ \| ([A-G0-9 ]+) \|$", page, re.MULTILINE) == [BEYOND]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_an_answer_is_one_of_three_and_says_what_it_must(row: Row) -> None:
    assert len(row.capability) > 20
    if row.state == "yes":
        assert any(pointer.startswith("src/") for pointer in row.pointers)
        assert "::" in row.test
    elif row.state == "partly":
        assert any(pointer.startswith("src/") for pointer in row.pointers)
        assert "missing:" in row.where
        assert "::" in row.test
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


@pytest.mark.parametrize("row", [row for row in ROWS if row.state != "no"], ids=lambda row: row.name)
def test_a_test_of_the_row_imports_code_of_the_row(row: Row) -> None:
    modules = {
        ".".join(Path(file).relative_to("src").with_suffix("").parts) for file in row.pointers if file[:4] == "src/"
    }
    files = {ROOT / pointer.partition("::")[0] for pointer in row.pointers if "::" in pointer}
    assert modules & set().union(*map(reached, files))
