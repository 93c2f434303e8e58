"""What each of the twenty systems is for, costs, obeys, and whether it works, and what the words of a plan mean:
`espalier explain`, docs/systems.md.

A system carries its record beside its code, in a file named `record.toml`, or `record_NAME.toml` where the folder holds
more than the system: explaining a system imports neither it nor torch. What was measured and tried stands in
docs/measured/NAME.md.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Struct

from espalier.recipe.errors import UserError, nearest

_PACKAGE = Path(__file__).parents[1]
WIDTH = 100
"""Columns of an explanation."""


class Record(Struct, frozen=True, order=True, forbid_unknown_fields=True, kw_only=True):
    """One system.

    Attributes:
        name, title, aliases: the file's name, the name people use with what it is, and other spellings.
        paper: authors or venue where known, and the arXiv id.
        files: where it lives, below `src/espalier/`: its folder, then what it needs elsewhere.
        chosen: when the planner picks it.
        cost: the formula, in words and symbols.
        law: the equality it must obey; `law_test` is the test that shows it (`tests/path.py::test_name`).
        bench: the script that measures it beside its peers.
        headline: what the script measured, in a line; numbers with two decimals are ratios in its tables.
        state: `works` (code, law and bench are there), or `partly: ` and what is missing.
        limits: one line.
        runs_on: what it was really run on, by date.
    """

    name: str
    title: str
    paper: str
    files: tuple[str, ...]
    chosen: str
    cost: str
    law: str
    state: Annotated[str, msgspec.Meta(pattern="^(works|partly: .+)$")]
    aliases: tuple[str, ...] = ()
    law_test: str = ""
    bench: str = ""
    headline: str = ""
    limits: str = ""
    runs_on: str = ""


class Word(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A word of plans: its other spellings, what it means, the `option` that sets it and the `page` that says more."""

    name: str
    meaning: str
    aliases: tuple[str, ...] = ()
    option: str = ""
    page: str = ""


Entry = TypeVar("Entry", bound=Record | Word)


@cache
def words() -> tuple[Word, ...]:
    """The words of plans."""
    table = tomllib.loads((Path(__file__).with_name("plan_words.toml")).read_text(encoding="utf-8"))
    return tuple(msgspec.convert({"name": name, **entry}, Word) for name, entry in table.items())


def word(name: str) -> Word | None:
    """The word of plans with this name in any of its spellings; None: there is none."""
    return _by_spelling(words()).get(_plain(name))


def read(package: Path) -> tuple[Record, ...]:
    """All records of the package in folder `package`, in the order of their names."""
    return tuple(sorted(msgspec.toml.decode(path.read_bytes(), type=Record) for path in package.rglob("record*.toml")))


@cache
def all_records() -> tuple[Record, ...]:
    """The records of this package."""
    return read(_PACKAGE)


def get(name: str) -> Record:
    """The record of `name` in any of its spellings. Raises UserError naming the nearest."""
    systems = _by_spelling(all_records())
    record = systems.get(_plain(name))
    if record is None:
        known: dict[str, Record | Word] = {**_by_spelling(words()), **systems}
        near = nearest(_plain(name), known)
        raise UserError(
            f"No system and no word of a plan is called {name!r}.",
            why=f"systems are {', '.join(system.name for system in all_records())}; words are those that a plan prints",
            do=f"espalier explain {known[near].name}" if near else "espalier explain survey",
        )
    return record


def explain(name: str) -> str:
    """The record of `name` as lines of at most 100 columns."""
    record = get(name)
    wrap = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    paragraphs = [wrap(text, initial_indent=f"  {key:9} ", subsequent_indent=12 * " ") for key, text in lines(record)]
    return "\n".join([wrap(record.title), *paragraphs])


def as_dict(record: Record | Word) -> dict[str, Any]:
    """`record` as plain values, for `--json`."""
    return dict(msgspec.json.decode(msgspec.json.encode(record)))


def lines(record: Record) -> list[tuple[str, str]]:
    """What people read of a record below its title: (heading, text)."""
    return [
        ("paper", record.paper),
        ("code", "src/espalier/: " + ", ".join(record.files)),
        ("chosen", record.chosen),
        ("cost", record.cost),
        ("law", f"{record.law} ({record.law_test.partition('::')[0]})"),
        ("measured", f"{record.headline} ({record.bench}, docs/measured/{record.name}.md)"),
        ("state", record.state),
        ("limits", record.limits),
        ("runs on", record.runs_on),
    ]


def _by_spelling(entries: Iterable[Entry]) -> dict[str, Entry]:
    return {_plain(spelling): entry for entry in entries for spelling in (*entry.aliases, entry.name)}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold().replace("+", "p") if letter.isalnum())
