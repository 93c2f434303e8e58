"""What is done to the files of others: each mutation as a change of bytes, by the syntax of the file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

EXTRA = "unheard_of"
"""The name of a column or key that no format has."""
HALF = "\ud83d"
"""Half a surrogate pair, as a string cut in the middle has it."""

Change = Callable[[bytes, str], bytes]
"""(content, name of a field that holds text) -> content."""


def marked(content: bytes, field: str) -> bytes:
    return b"\xef\xbb\xbf" + content


def with_returns(content: bytes, field: str) -> bytes:
    return content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


@dataclass(frozen=True)
class Syntax:
    """How a file is taken apart into rows (objects of text) and put together again."""

    loads: Callable[[bytes], Any]
    dumps: Callable[[Any], bytes]
    rows: Callable[[Any], list[dict[str, Any]]]
    """The rows themselves: what is changed in them is changed in the document."""


# --- the syntaxes ------------------------------------------------------------------------------------------------


def _lines(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def _dump_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _table(separator: str) -> Syntax:
    def loads(content: bytes) -> list[dict[str, Any]]:
        return list(csv.DictReader(io.StringIO(content.decode()), delimiter=separator))

    def dumps(rows: list[dict[str, Any]]) -> bytes:
        out = io.StringIO()
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(out, names, delimiter=separator, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)
        return out.getvalue().encode("utf-8", "surrogatepass")

    return Syntax(loads, dumps, lambda rows: rows)


def _document(rows: Callable[[Any], list[dict[str, Any]]]) -> Syntax:
    return Syntax(json.loads, lambda value: json.dumps(value).encode(), rows)


LINES = Syntax(_lines, _dump_lines, lambda rows: rows)
LIST = _document(lambda rows: rows)
OBJECT = _document(lambda table: [table])
FRAMES = _document(lambda table: table["frames"])
COMMAS, TABS, SEMICOLONS = _table(","), _table("\t"), _table(";")


# --- changes of rows ---------------------------------------------------------------------------------------------


def _changed(syntax: Syntax, change: Callable[[list[dict[str, Any]], str], None]) -> Change:
    def changed(content: bytes, field: str) -> bytes:
        document = syntax.loads(content)
        change(syntax.rows(document), field)
        return syntax.dumps(document)

    return changed


def _extra(rows: list[dict[str, Any]], field: str) -> None:
    for row in rows:
        row[EXTRA] = "x"


def _renamed(rows: list[dict[str, Any]], field: str) -> None:
    for row in rows:
        row[EXTRA] = row.pop(field)


def _set(value: Any) -> Callable[[list[dict[str, Any]], str], None]:
    def change(rows: list[dict[str, Any]], field: str) -> None:
        rows[-1][field] = value

    return change


def _empty(rows: list[dict[str, Any]], field: str) -> None:
    rows.append(dict.fromkeys(rows[0], None) if isinstance(next(iter(rows[0].values())), str) else {})


def of_rows(syntax: Syntax) -> Mapping[str, Change]:
    """The changes of the rows of a file, by name."""
    table = {
        "an unknown extra field": _extra,
        "a renamed field": _renamed,
        "an empty row": _empty,
        "a null": _set(None),
        "a number where text is meant": _set(12.5),
        "half a surrogate pair": _set(f"cut {HALF}"),
    }
    return {name: _changed(syntax, change) for name, change in table.items()}


HARMLESS: Mapping[str, Change] = {"a byte order mark": marked, "carriage returns": with_returns}
"""Changes after which a text file says what it said before."""
