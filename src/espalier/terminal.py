"""Text of others on a terminal: a name, a sample, a line of a log or an error may hold control characters.

A terminal obeys them (they move the cursor, hide lines, change the title), so what people read is printed here.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

# C0 but tab and newline, DEL, C1, what changes the direction of writing, line separators, and halves of a character.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""`text` with its control characters as escapes (`\x1b`); tabs and line ends stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: str = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Prints `text`, made `visible`, and a line end; to standard output unless `file` says otherwise."""
    out = file if file is not None else sys.stdout
    out.write(visible(text) + "\n")
    if flush:
        out.flush()
