"""Text of others on a terminal: a name, a sample, a line of a log or an error may hold control characters.

A terminal obeys them (they move the cursor, hide lines, change the title), so what people read is printed here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# C0 but tab and newline, DEL, C1, what changes the direction of writing, line separators, and halves of a character.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


_SPLIT: set[str] = set()
"""Names of the user's files that have a line end."""


def know_paths(words: Iterable[str]) -> None:
    """Line ends in the names of files and folders that are there, of those that `words` of a command name, are made
    `visible` from here on."""
    with suppress(FileNotFoundError):  # of who is in a folder that is gone
        words = [os.getcwd(), *words]
    for word in words:
        place = Path(word.partition("=")[2] or word)
        there = (path for path in (place, *place.parents) if "\n" in path.name and os.path.lexists(path))
        _SPLIT.update(path.name for path in there)


def visible(text: str) -> str:
    r"""`text` with its control characters as escapes (`\x1b`); tabs stay, and line ends that are in no known path."""
    for name in _SPLIT:
        whole = rf"(?<!\w){re.escape(name)}(?!\w)"  # no part of other text
        text = re.sub(whole, lambda match: match[0].replace("\n", "\\n"), text)
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def say(text: str = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Prints `text`, made `visible`, and a line end; to standard output unless `file` says otherwise."""
    out = file if file is not None else sys.stdout
    out.write(visible(text) + "\n")
    if flush:
        out.flush()


def say_progress(text: str) -> None:
    """A line of progress on standard error."""
    say(text, file=sys.stderr, flush=True)


def columns() -> int | None:
    """How wide the terminal is; None when the output goes elsewhere, where lines are left whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def line(text: str, hang: int = 4) -> None:
    """One line; on a terminal wrapped to its width, what follows the first line `hang` columns in, and what stands
    between ⟦ and ⟧ in green."""
    shown = "\n".join(wrapped(visible(text), columns(), hang))
    sys.stdout.write((green(shown) if sys.stdout.isatty() else shown) + "\n")


def green(text: str) -> str:
    """`text` that is `visible` already, with what stands between ⟦ and ⟧ in green."""
    return re.sub("⟦[^⟧]*⟧?", lambda match: f"\x1b[32m{match[0]}\x1b[0m", text)


def rows(head: Sequence[str], body: Sequence[Sequence[str]], cut: bool = False) -> None:
    """A table. On a terminal its last column is wrapped to the width, or with `cut` lines end there in an ellipsis."""
    width = columns()
    head, *body = ([visible(cell) for cell in row] for row in (head, *body))
    most = [max(len(row[i]) for row in (head, *body)) for i in range(len(head) - 1)]
    for row in (head, *body):
        before = "".join(f"{cell:<{size}}  " for cell, size in zip(row, most, strict=False))
        if not cut:
            line(before + row[-1], len(before))
        elif width is not None and len(before + row[-1]) > width:
            say((before + row[-1])[: width - 1].rstrip() + "…")
        else:
            say((before + row[-1]).rstrip())


def wrapped(text: str, width: int | None, hang: int) -> list[str]:
    """The lines of `text` within `width` columns, those after the first begun `hang` columns in."""
    if width is None or len(text) <= width:
        return [text.rstrip()]
    # A head that ends in aligned columns must keep its spaces, so only what stands right of `hang` is broken.
    room = max(20, width - hang)
    first = textwrap.wrap(text[hang:], room, break_long_words=False, break_on_hyphens=False)
    return [text[:hang] + first[0], *(" " * hang + more for more in first[1:])]
