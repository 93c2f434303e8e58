"""What each of the twenty systems is for, costs, obeys, and whether it works: `espalier explain`, docs/systems.md.

A system that is built carries its record beside its code, as `RECORD = Record(...)` of plain literals; the others stand
in records.toml. Records are read from the source text, so that explaining a system imports neither it nor torch. What a
bench script wrote with `--json src/espalier/measured/NAME.json` (or `NAME-PART.json`) is shown with the system of that
name. `python -m espalier.records > docs/systems.md` writes the page.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from espalier.errors import UserError, nearest

_PACKAGE = Path(__file__).parent
_MARK = "RECORD = Record("


class Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One system.

    Attributes:
        name, title, aliases: the file's name, the name people use with what it is, and other spellings.
        paper: authors or venue where known, and the arXiv id.
        question: the folder's question that it answers.
        files: where it lives or will live, below `src/espalier/`.
        chosen: when the planner picks it.
        cost: the formula, in words and symbols.
        law: the equality it must obey; `law_test` is the test that shows it (`tests/path.py::test_name`).
        bench: the script that measures it beside its peers.
        state: `works` (code, law and bench are there), `partly` or `not yet`; `remark` says what is there or missing.
        gpu: when it last ran on a GPU, and on which.
    """

    name: str
    title: str
    paper: str
    question: str
    files: tuple[str, ...]
    chosen: str
    cost: str
    law: str
    aliases: tuple[str, ...] = ()
    law_test: str = ""
    bench: str = ""
    state: Literal["works", "partly", "not yet"] = "not yet"
    remark: str = ""
    gpu: str = "never"


class Comparison(Struct, frozen=True):
    """One row of a bench script's table.

    Attributes:
        case, peer: what was done, and beside what.
        peer_value, ours: medians, in `unit`; `ratio` of both, above 1 where ours is better, with its `spread`.
    """

    case: str
    peer: str
    peer_value: float
    ours: float
    ratio: float
    unit: str
    spread: str


class Measured(Struct, frozen=True):
    """What one run of a bench script printed: its rows, the command and the machine."""

    machine: str
    command: str
    rows: tuple[Comparison, ...]


_HEADINGS = ("case", "peer", "peer's value", "ours", "ratio", "unit", "spread of the ratio")
_SHOWN = 16  # rows of a table that fit on a terminal


def measured(name: str, package: Path = _PACKAGE) -> list[Measured]:
    """What was measured of the system called `name`: one entry for each file of the package's folder `measured`."""
    folder = package / "measured"
    paths = [*folder.glob(f"{name}.json"), *sorted(folder.glob(f"{name}-*.json"))]
    return [msgspec.json.decode(path.read_bytes(), type=Measured) for path in paths]


def read(package: Path) -> dict[str, Record]:
    """All records of the package in folder `package`, by name; the code's own win over those of records.toml."""
    table = tomllib.loads((package / "records.toml").read_text(encoding="utf-8"))
    found = {name: msgspec.convert({"name": name, **entry}, Record) for name, entry in table.items()}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.startswith(_MARK) or f"\n{_MARK}" in text:
            record = _record_in(text, path)
            found[record.name] = record
    return dict(sorted(found.items()))


@cache
def all_records() -> tuple[Record, ...]:
    """The records of this package, in the order of their names."""
    return tuple(read(_PACKAGE).values())


def get(name: str) -> Record:
    """The record of `name` in any of its spellings. Raises UserError naming the nearest."""
    spellings = {_plain(word): record for record in all_records() for word in (record.name, *record.aliases)}
    record = spellings.get(_plain(name))
    if record is None:
        near = nearest(_plain(name), spellings)
        raise UserError(
            f"No system is called {name!r}.",
            why=f"there are {', '.join(record.name for record in all_records())}",
            do=f"espalier explain {spellings[near].name}" if near else "espalier explain survey",
        )
    return record


def explain(name: str) -> str:
    """The record of `name` as lines for a terminal."""
    record = get(name)
    lines = [record.title, *(f"  {key:9} {value}" for key, value in _lines(record))]
    for run in measured(record.name):
        lines += ["", f"  {run.command}", f"  {run.machine}"]
        cells = [_HEADINGS, *map(_cells, run.rows[:_SHOWN])]
        wide = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
        lines += ["  " + "  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)) for row in cells]
        lines += [f"  and {len(run.rows) - _SHOWN} more in docs/systems.md"] if len(run.rows) > _SHOWN else []
    return "\n".join(line.rstrip() for line in lines)


def as_dict(record: Record) -> dict[str, Any]:
    """`record` as plain values, for `--json`."""
    table: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return {**table, "measured": msgspec.json.decode(msgspec.json.encode(measured(record.name)))}


def table_markdown() -> str:
    """docs/systems.md: one table of all systems, then a section for each."""
    records = all_records()
    lines = [
        "# The twenty systems",
        "",
        "Made from the code's own records by `python -m espalier.records > docs/systems.md`; a test compares the two.",
        "`espalier explain NAME` prints one of them.",
        "",
        "| system | question | file | state | law's test | bench | last GPU run |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        files = ", ".join(f"`{file}`" for file in record.files)
        test, bench = (f"`{text}`" if text else "none yet" for text in (record.law_test, record.bench))
        cells = (f"[{record.name}](#{record.name})", record.question, files, record.state, test, bench, record.gpu)
        lines.append(f"| {' | '.join(cells)} |")
    for record in records:
        lines += ["", f"## {record.name}", "", f"**{record.title}.**", ""]
        lines += [f"- {key}: {f'`{value}`' if key == 'cost' else value}" for key, value in _lines(record)]
        for run in measured(record.name):
            lines += ["", f"`{run.command}` on {run.machine}:", ""]
            lines += [f"| {' | '.join(row)} |" for row in (_HEADINGS, ["---"] * len(_HEADINGS), *map(_cells, run.rows))]
    return "\n".join(lines) + "\n"


def _lines(record: Record) -> list[tuple[str, str]]:
    files = ", ".join(f"src/espalier/{file}" for file in record.files)
    return [
        ("paper", record.paper),
        ("question", f"{record.question} ({files})"),
        ("chosen", record.chosen),
        ("cost", record.cost),
        ("law", f"{record.law} ({record.law_test or 'no test yet'})"),
        ("bench", record.bench or "none yet"),
        ("state", f"{record.state}: {record.remark}" if record.remark else record.state),
        ("GPU", record.gpu),
    ]


def _cells(row: Comparison) -> tuple[str, ...]:
    return (row.case, row.peer, f"{row.peer_value:.4g}", f"{row.ours:.4g}", f"{row.ratio:.2f}", row.unit, row.spread)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold().replace("+", "p") if letter.isalnum())


def _record_in(text: str, path: Path) -> Record:
    for node in ast.parse(text).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.targets[0]) == "RECORD"
        ):
            table = {str(word.arg): ast.literal_eval(word.value) for word in node.value.keywords}
            return msgspec.convert(table, Record)
    raise AssertionError(f"{path}: RECORD is not a module-level Record(...) of literals")


if __name__ == "__main__":
    sys.stdout.write(table_markdown())
