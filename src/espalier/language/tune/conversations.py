"""Conversations and preferences: rows of the ecosystem's chat formats, read from files, folders or the hub.

A row is one of `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `completion`, `instruction` and `output`
(Alpaca), or a preference: `chosen` and `rejected`, with or without a `prompt`. Which of them is seen from its keys;
see `row_formats`. `python:docstrings` are signatures and docstrings of the standard library; as preferences, the
docstring of a function is preferred to that of the next.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from espalier.language import row_files, text_sources
from espalier.language.row_files import NamedRows
from espalier.language.text_sources import Skipped
from espalier.language.tune import row_formats
from espalier.language.tune.row_formats import KNOWN, Conversation, Turn, Unusable, conversation
from espalier.recipe import Data
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import FieldUse, printable, unused
from espalier.recipe.units import plural

__all__ = ["DOCSTRINGS", "ChatReport", "Conversation", "Skipped", "Turn", "Unusable", "conversation", "conversations"]
DOCSTRINGS = "python:docstrings"
_SHORT, _LONG = 40, 2_000
"""Characters of a docstring that is a good answer."""
_FILES_NAMED = 3


class ChatReport:
    """What a source of conversations holds that is not used. Grows while it is read."""

    def __init__(self) -> None:
        self.columns = FieldUse(row_formats.COLUMNS)
        self.keys = FieldUse(row_formats.TURN_KEYS)
        self.files: list[str] = []
        self.stated: tuple[str, ...] = ()
        self.template_unused: FieldUse = FieldUse(row_formats.TEMPLATE_KEYS)

    def count(self, row: Conversation) -> None:
        """Counts what a row has and its format does not read."""
        self.columns.count(row.unused_columns)
        self.keys.count(row.unused_keys)

    def notes(self) -> list[str]:
        """A sentence for each column, key and file that is not used."""
        files = [unused("file", name) for name in self.files[:_FILES_NAMED]]
        more = len(self.files) - len(files)
        files += [f"not used: {plural(more, 'more file')} without rows"] if more else []
        uses = (self.columns, self.keys, self.template_unused)
        return [*self.stated, *files, *(note for use in uses for note in use.notes())]


def conversations(
    data: Data,
    skipped: Skipped,
    progress: Callable[[int, int], None] | None = None,
    pairs: bool = False,
    report: ChatReport | None = None,
) -> Iterator[Conversation]:
    """The conversations of `data`, in a fixed order. Rows that cannot be trained on are appended to `skipped` as
    (name, reason); what is not used of the others is counted in `report`. `pairs`: preferences are made of what has
    none (`python:docstrings`).

    Raises UserError for a file that cannot be read, a malformed row (file and line), or when no conversation is left.
    """
    report = report or ChatReport()
    some = False
    for name, row in _rows(data, progress or (lambda done, total: None), pairs, report):
        try:
            talk = conversation(name, row)
        except Unusable as reason:
            skipped.append((name, str(reason)))
            continue
        some = True
        report.count(talk)
        yield talk
    if not some:
        first = row_files.summary(skipped)
        raise UserError(
            f"data.path = {data.path!r} holds no conversation.",
            why=f"{len(skipped)} skipped ({first})" if skipped else "it is empty",
            do=f"rows with {KNOWN}, or data.path = {DOCSTRINGS!r}",
        )


# --- rows of files -----------------------------------------------------------------------------------------------


def _rows(data: Data, progress: Callable[[int, int], None], pairs: bool, report: ChatReport) -> NamedRows:
    if data.path == DOCSTRINGS:
        yield from _preferred(_docstrings(progress)) if pairs else _docstrings(progress)
        return
    if data.path.startswith("hf:"):
        name = data.path.removeprefix("hf:")
        yield from ((f"{name}:{number}", row) for number, row in enumerate(text_sources.hub_table(data), start=1))
        return
    listed = text_sources.listing(data)
    report.stated = listed.notes
    done = 0
    for entry in listed.entries:
        table = listed.tables.get(entry.name, {})
        form = row_files.look(entry, row_files.CHAT_KEYS | set(table.get("columns", {}).values()))
        if form in ("text", "document", "binary"):
            report.files.append(entry.name)
        else:
            rename = row_formats.renaming(entry.name, table) if table else dict
            yield from ((name, rename(row)) for name, row in row_files.rows(entry, form))
        done += entry.size
        progress(done, listed.bytes)
    if len(report.files) == len(listed.entries):
        keys = row_files.first_keys(row_files.head_of(listed.entries[0]))
        shown = printable(report.files[0]) + (f", with {printable(', '.join(map(str, keys)))}" if keys else "")
        raise UserError(
            f"data.path = {data.path!r} is no file of conversations.",
            why=f"[tune] reads {', '.join(row_files.ENDINGS)} with {KNOWN}; this is {shown}",
            do="one JSON object with messages in each line, or leave [tune] out to train on plain text",
        )


def _docstrings(progress: Callable[[int, int], None]) -> NamedRows:
    listed = text_sources.listing(Data(path="python:stdlib"))
    done = 0
    for entry in listed.entries:
        done += entry.size
        progress(done, listed.bytes)
        if "test" in entry.name:
            continue
        try:
            tree = ast.parse(Path(entry.path).read_bytes())
        except (SyntaxError, ValueError):  # files that are kept to test the compiler
            continue
        for number, (signature, answer) in enumerate(_documented(tree), start=1):
            asked = f"Write the docstring of this Python function.\n\n{signature}"
            yield f"{entry.name}:{number}", {"prompt": asked, "completion": answer}


def _preferred(rows: NamedRows) -> NamedRows:
    for (name, row), (_, following) in pairwise(rows):
        yield name, {"prompt": row["prompt"], "chosen": row["completion"], "rejected": following["completion"]}


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            answer = ast.get_docstring(node)
            if answer is not None and _SHORT <= len(answer) <= _LONG:
                yield f"def {node.name}({ast.unparse(node.args)}):", answer
