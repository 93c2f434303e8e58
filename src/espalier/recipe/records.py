"""What each of the twenty systems is for, costs, obeys, and whether it works, and what the words of a plan mean:
`espalier explain`, docs/systems.md.

A system carries its record beside its code, as `RECORD = Record(...)` of plain literals. Records are read from the
source text, so that explaining a system imports neither it nor torch.
"""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from espalier.recipe.errors import UserError, nearest

_PACKAGE = Path(__file__).parents[1]
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


class Word(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A word of plans: its other spellings, what it means, the `option` that sets it and the `page` that says more."""

    name: str
    meaning: str
    aliases: tuple[str, ...] = ()
    option: str = ""
    page: str = ""


@cache
def words() -> tuple[Word, ...]:
    """The words of plans."""
    table = tomllib.loads((Path(__file__).with_name("plan_words.toml")).read_text(encoding="utf-8"))
    return tuple(msgspec.convert({"name": name, **entry}, Word) for name, entry in table.items())


def word(name: str) -> Word | None:
    """The word of plans with this name in any of its spellings; None: there is none."""
    spellings = {_plain(spelling): one for one in words() for spelling in (*one.aliases, one.name)}
    return spellings.get(_plain(name))


def read(package: Path) -> dict[str, Record]:
    """All records of the package in folder `package`, by name."""
    found = {}
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
        known = {_plain(spelling): one.name for one in words() for spelling in (*one.aliases, one.name)}
        known |= {spelling: one.name for spelling, one in spellings.items()}
        near = nearest(_plain(name), known)
        raise UserError(
            f"No system and no word of a plan is called {name!r}.",
            why=f"systems are {', '.join(one.name for one in all_records())}; words are those that a plan prints",
            do=f"espalier explain {known[near]}" if near else "espalier explain survey",
        )
    return record


def explain(name: str) -> str:
    """The record of `name` as lines for a terminal."""
    record = get(name)
    return "\n".join([record.title, *(f"  {key:9} {value}" for key, value in lines(record))])


def as_dict(record: Record | Word) -> dict[str, Any]:
    """`record` as plain values, for `--json`."""
    return dict(msgspec.json.decode(msgspec.json.encode(record)))


def lines(record: Record) -> list[tuple[str, str]]:
    """What people read of a record below its title: (heading, text)."""
    files = ", ".join(f"src/espalier/{file}" for file in record.files)
    return [
        ("paper", record.paper),
        ("question", f"{record.question} ({files})"),
        ("chosen", record.chosen),
        ("cost", record.cost),
        ("law", f"{record.law} ({record.law_test or 'no test yet'})"),
        ("bench", f"{record.bench}; its figures are in docs/systems.md" if record.bench else "none yet"),
        ("state", f"{record.state}: {record.remark}" if record.remark else record.state),
        ("GPU", record.gpu),
    ]


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
