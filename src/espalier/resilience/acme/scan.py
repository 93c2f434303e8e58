"""One pass over a log of any size: the lines that could matter, what stands round them, the tail, and the losses.

After arXiv 2403.07648, section on diagnosis: routine lines are dropped before anything looks at the rest. What is
routine is decided once for each *shape* of a line (its letters alone: steps, times and figures do not change it), so
a line that repeats costs one look-up. Lines are counted at line feeds, as editors do.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from espalier.errors import UserError
from espalier.resilience.acme import words
from espalier.resilience.acme.templates import Template, Templates

BLOCK = 1 << 20
"""Bytes read at a time; also where a line without an end is cut."""
TAIL = 60
"""Last lines, kept whatever they say."""
FIRST = 8
"""Lines of a template kept from its beginning, and from the beginning of each of its later bursts."""
BURST = 200
"""Lines without a template after which it begins a new burst."""
BURSTS = 400
"""Lines of one template kept in all."""
AFTER = 2
"""Lines kept after one that matters."""
STACK = 40
"""Lines kept after the head of a traceback, or of a launcher's summary."""
WIDEST = 4096
"""Characters kept of a line."""
MINED = 20_000
"""Shapes whose template is looked for; later ones share one."""
SHAPES = 50_000
"""Shapes remembered."""
MEMORY = 16 << 20
"""Bytes of lines kept before the oldest go."""
LOSS_BLOCKS = 8
"""Last blocks whose losses are read; of earlier ones only whether they are numbers."""

_OPENS = (b"traceback", b"rootcause", b"failuresother", b"stacktrace")

_NUMBER = rb"[-+]?(?:nan|NaN|NAN|inf|Inf|INF|\d[\d.]*(?:[eE][-+]?\d+)?)"
_LOSS = re.compile(rb"oss(?:es)?['\"\]]?[ \t]{0,4}[:=|]?[ \t]{0,4}(?:tensor\()?(" + _NUMBER + rb")")
_OTHER_LOSS = re.compile(rb"(val|valid|validation|eval|evaluation|test|best|min|aux|balanc\w*|z|router)(idation)?loss")


@dataclass(frozen=True)
class Loss:
    """A training loss in a log: the number of its line, its value and the line's bytes."""

    number: int
    value: float
    line: bytes

    @property
    def text(self) -> str:
        """The line as text."""
        return _text(self.line)


@dataclass(frozen=True)
class Scanned:
    """What one pass over a log keeps.

    Attributes:
        file: its path.
        lines: texts of the lines kept, by number from 1, in order.
        total, size: lines and bytes of the log.
        mattered: lines that held a word that could matter.
        losses: the last training losses, in order.
        not_finite: the line where the losses stopped being numbers, if the last one is not.
        templates: forms of the lines that mattered.
    """

    file: str
    lines: dict[int, str]
    total: int
    size: int
    mattered: int
    losses: tuple[Loss, ...]
    not_finite: Loss | None
    templates: tuple[Template, ...]


def scan(path: str | Path) -> Scanned:
    """Reads the log at `path`, also one that is compressed with gzip.

    Raises:
        UserError: there is no such file, it cannot be read, or it holds no text.
    """
    keeper = _Keeper()
    try:
        with _opened(Path(path)) as file:
            while block := file.read(BLOCK):
                keeper.take(block)
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a log.", do="name the logs in it") from None
    except (OSError, EOFError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"The log {path} cannot be read: {said}.", do="name a file that exists and may be read"
        ) from None
    return keeper.result(str(path))


def scan_text(text: bytes) -> Scanned:
    """The same of a text that is no file."""
    keeper = _Keeper()
    keeper.take(text)
    return keeper.result("")


def _opened(path: Path) -> IO[bytes]:
    """The file, decompressed if need be. Raises UserError when its beginning is no text."""
    with path.open("rb") as file:
        head = file.read(1 << 16) if path.is_file() else b""
    if head.startswith(b"\x1f\x8b"):
        return gzip.open(path)  # type: ignore[return-value]
    packed = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
    kind = next((name for mark, name in packed.items() if head.startswith(mark)), None)
    if kind is not None:
        raise UserError(f"{path} is compressed with {kind}.", do="decompress it first (gzip is read as it is)")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16 text.", do=f"iconv -f UTF-16 -t UTF-8 {path} > log.txt")
    odd = len(head.translate(None, bytes(set(range(256)) - set(range(9)) - set(range(14, 27)) - set(range(28, 32)))))
    if odd > 0.3 * len(head) or (head.startswith(b"\x7fELF")):
        raise UserError(
            f"{path} is not a text file.",
            why=f"{odd / len(head):.0%} of its first bytes are control characters",
            do="name the log that the job wrote to its standard error",
        )
    return path.open("rb")


@dataclass(eq=False)
class _Shape:
    """What is known of lines of one shape that matter. Has state."""

    opens: bool
    template: Template | None = None


@dataclass(eq=False)
class _Keeper:
    """Keeps what matters of the blocks it is given. Has state."""

    known: dict[bytes, _Shape | bool] = field(default_factory=dict)
    templates: Templates = field(default_factory=Templates)
    kept: dict[int, bytes] = field(default_factory=dict)
    losses: deque[list[tuple[int, bytes]]] = field(default_factory=lambda: deque(maxlen=LOSS_BLOCKS))
    not_finite: Loss | None = None
    rest: bytes = b""
    number: int = 0
    size: int = 0
    held: int = 0
    mattered: int = 0
    mined: int = 0
    crowd: Template = field(default_factory=lambda: Template(["*"]))
    until: int = 0
    """Lines up to this number are kept as context."""
    tail: list[bytes] = field(default_factory=list)

    def take(self, block: bytes) -> None:
        """Looks at the lines that end within `block`."""
        self.size += len(block)
        block = self.rest + block
        end = block.rfind(b"\n")
        if end < 0 and len(block) < max(BLOCK, 2 * WIDEST):
            self.rest = block
            return
        if end < 0:  # a line longer than a block: what stands at its ends is enough
            self.rest = block[:WIDEST] + block[-WIDEST:]
            return
        self.rest = block[end + 1 :]
        self._look(block[:end].split(b"\n"), words.shapes(block[:end]).split(b"\n"))

    def result(self, path: str) -> Scanned:
        """What was kept of the whole log."""
        if self.rest:
            self._look([self.rest], [words.shapes(self.rest)])
        first = self.number - len(self.tail) + 1
        self.kept.update({first + at: _cut(line) for at, line in enumerate(self.tail)})
        lines = {number: _text(self.kept[number]) for number in sorted(self.kept)}
        losses = tuple(loss for block in self.losses for number, line in block if (loss := _loss(number, line)))
        found = tuple(self.templates.found)
        return Scanned(path, lines, self.number, self.size, self.mattered, losses, self.not_finite, found)

    def _look(self, lines: list[bytes], shapes: list[bytes]) -> None:
        found = list(map(self.known.get, shapes))
        if None in found:
            new = list({shape for one, shape in zip(found, shapes, strict=True) if one is None})
            judged = dict(zip(new, map(self._judge, new, words.which_matter(new)), strict=True))
            found = [judged[shape] if one is None else one for one, shape in zip(found, shapes, strict=True)]
        before = self.number
        self._context(before, lines)
        for at, shape in enumerate(found):
            if isinstance(shape, _Shape):
                self._matters(shape, before, at, lines)
        self._lost([(before + at + 1, lines[at]) for at, shape in enumerate(found) if shape])
        self.number += len(lines)
        self.tail = (self.tail + lines[-TAIL:])[-TAIL:]

    def _judge(self, shape: bytes, matters: bool) -> _Shape | bool:
        judged: _Shape | bool = b"loss" in shape and not _OTHER_LOSS.search(shape)
        if matters:
            judged = _Shape(any(map(shape.__contains__, _OPENS)))
        if len(self.known) < SHAPES and len(shape) < 1000:
            self.known[shape] = judged
        return judged

    def _lost(self, block: list[tuple[int, bytes]]) -> None:
        """Keeps the lines of a block that may tell a loss, and remembers where losses stopped being numbers."""
        self.losses.append(block)
        last = next((loss for number, line in reversed(block) if (loss := _loss(number, line))), None)
        if last is None:
            return
        if math.isfinite(last.value):
            self.not_finite = None
        elif self.not_finite is None:
            for number, line in block:
                loss = _loss(number, line)
                if loss is not None:
                    self.not_finite = None if math.isfinite(loss.value) else self.not_finite or loss

    def _matters(self, shape: _Shape, before: int, at: int, lines: list[bytes]) -> None:
        self.mattered += 1
        number = before + at + 1
        if shape.template is None:
            self.mined += 1
            shape.template = self.templates.add(_text(lines[at])) if self.mined <= MINED else self.crowd
        template = shape.template
        if number - template.last > BURST:
            template.kept = 0 if template.kept < BURSTS else template.kept
        template.last = number
        template.count += 1
        if template.kept % BURSTS >= FIRST and template.kept < BURSTS:
            return
        template.kept += 1
        after = STACK if shape.opens else AFTER
        for near in range(max(0, at - 1), min(at + after + 1, len(lines))):
            self._keep(before + near + 1, lines[near])
        self.until = max(self.until, number + after)

    def _context(self, before: int, lines: list[bytes]) -> None:
        for at in range(min(max(0, self.until - before), len(lines))):
            self._keep(before + at + 1, lines[at])

    def _keep(self, number: int, line: bytes) -> None:
        if number not in self.kept:
            self.kept[number] = line = _cut(line)
            self.held += len(line) + 64
            while self.held > MEMORY:
                oldest = next(iter(self.kept))
                self.held -= len(self.kept.pop(oldest)) + 64


def _loss(number: int, line: bytes) -> Loss | None:
    found = _LOSS.search(line)
    if found is None or _OTHER_LOSS.search(words.shapes(line[max(0, found.start() - 16) : found.start() + 4])):
        return None
    try:
        return Loss(number, float(found[1]), _cut(line))
    except ValueError:
        return None


def _text(line: bytes) -> str:
    """A line as text. Of what a progress bar wrote over and over on one line, the words stand last."""
    line = line.rstrip(b"\r")
    if b"\r" in line:
        line = b"\r".join(line.split(b"\r")[-2:])
    return _cut(line).decode("utf-8", "replace").replace("\x00", "")


def _cut(line: bytes) -> bytes:
    """Both ends of a line that is too long: what failed stands at one of them."""
    return line if len(line) <= WIDEST else line[: WIDEST // 2] + b" ... " + line[-WIDEST // 2 :]


def compression(scanned: Scanned) -> float:
    """Lines of the log over lines kept of it."""
    return scanned.total / max(1, len(scanned.lines))
