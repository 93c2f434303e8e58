"""Files that other programs wrote: one way to open them, one error for whatever a parser raises, one list of what was
not used.

`read_text` and `read_table` skip a byte order mark. `parsing` turns every exception into a `UserError` that names the
file. `Fields` is the table of one format: fields that are read, fields that change the meaning of others and are
refused; `FieldUse` counts the rest and names them once. Each reader is a row of `tests/test_readers.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.recipe.errors import EspalierError, UserError
from espalier.recipe.units import plural

JsonObject = Mapping[str, Any]
"""The object that a JSON file holds, or one inside it."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_LONGEST = 200
"""Characters of somebody else's text in a message."""


@contextmanager
def parsing(path: str | Path, do: str) -> Iterator[None]:
    """Turns what is raised inside into one UserError: `path` or a file in it, the reason, and what to `do`."""
    try:
        yield
    except EspalierError as error:
        named = printable(Path(path).name) in str(error)
        if type(error) is not UserError or (named and error.do):
            raise
        what = error.what if named else f"{printable(path)}: {error.what}"
        raise UserError(what, why=error.why, do=error.do or do) from None
    except Exception as error:
        what = f"{printable(path)} cannot be read: {_reason(error).rstrip('.')}."
        if isinstance(error, PermissionError):
            do = f"chmod u+r {path}"
        elif isinstance(error, MemoryError):
            what = f"{printable(path)} does not fit into memory."
        elif isinstance(error, UnicodeDecodeError):
            what, do = f"{printable(path)} is not UTF-8 (byte {error.start}).", "save it as UTF-8"
        raise UserError(what, do=do) from None


def _reason(error: Exception) -> str:
    """Why a reader failed: parsers have no common base of their errors."""
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, OSError):
        return printable(error.strerror or error)
    return printable(error) or type(error).__name__


def printable(text: object, longest: int = _LONGEST) -> str:
    """`text` on one line, for messages and comments: control characters escaped, cut after `longest` characters."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text)[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[:longest]}…"


def decoded(content: bytes, path: str | Path) -> str:
    """The text of UTF-8 `content`, without a byte order mark. Raises UserError for other encodings."""
    encoding = _OTHER_MARKS.get(content[:2])
    if encoding is not None:
        raise UserError(f"{printable(path)} is {encoding}, not UTF-8.", do="save it as UTF-8")
    with parsing(path, "save it as UTF-8"):
        return content.removeprefix(BYTE_ORDER_MARK).decode()


def read_text(path: Path, do: str = "name another file") -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises UserError."""
    with parsing(path, do):
        return decoded(path.read_bytes(), path)


def read_table(path: Path, do: str = "give a JSON file") -> dict[str, Any]:
    """The object that a JSON file holds. Raises UserError, also for numbers of too many digits and for deep nesting."""
    text = read_text(path, do)
    with parsing(path, do):
        table = json.loads(text)
        if not isinstance(table, dict):
            raise UserError(f"{printable(path)} does not hold a table.")
        return table


@dataclass(frozen=True)
class Fields:
    """The fields of one format.

    Attributes:
        kind: what a field is called in messages: column, key, tensor, file.
        read: names that the reader uses.
        refused: names that change the meaning of the others and are not understood here, and what to do about each.
        unit: what holds the fields, for counts.
    """

    kind: str
    read: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    unit: str = "row"


class FieldUse:
    """Counts the fields of one input that are not used, while it is read. `count` is called for each row."""

    def __init__(self, fields: Fields, origin: str = "") -> None:
        self.fields, self.origin = fields, origin
        self.unused: Counter[str] = Counter()

    def count(self, names: Iterable[str], rows: int = 1) -> None:
        """Counts those of the fields `names` that are not read. Raises UserError for one that is refused."""
        for name in names:
            if name in self.fields.refused:
                raise self.refusal(name)
            if name not in self.fields.read:
                self.unused[name] += rows

    def refusal(self, name: str) -> UserError:
        """The error for a field that changes the meaning of others."""
        where = f"{printable(self.origin)} has " if self.origin else ""
        return UserError(
            f"{where}the {self.fields.kind} {printable(name)!r}, which is not understood.",
            why="it changes the meaning of the rest",
            do=self.fields.refused[name],
        )

    def notes(self) -> tuple[str, ...]:
        """One sentence for each field that was not used, the most frequent first."""
        rows = sorted(self.unused.items(), key=lambda row: (-row[1], row[0]))
        return tuple(unused(self.fields.kind, name, plural(count, self.fields.unit)) for name, count in rows)


def unused(kind: str, name: str, extent: str = "") -> str:
    """The sentence on something in a file that was not used: a `kind` (column, key, tensor, file) called `name`."""
    return f"not used: {kind} {printable(name)!r}{f' ({extent})' if extent else ''}"
