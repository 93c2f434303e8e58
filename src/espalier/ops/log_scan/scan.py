"""Log scan: one pass over a log of any size keeps the lines that matter, their context, the tail and the losses.

After arXiv 2403.07648, section on diagnosis: routine lines are dropped first. A line matters when its *shape* (its
letters alone, without steps, times and figures) holds a keyword; that is decided for a whole block at once, at the same
speed whatever the text is. Only those lines are read one by one and grouped into templates (own code instead of the
library drain3: the scan asks for a template once per new shape). Lines are counted at line feeds, as editors do. Where
blocks end changes nothing; tests compare with a scan line by line.
"""

from __future__ import annotations

import gzip
import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import eq
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.ops.log_scan import keywords
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing

BLOCK = 1 << 20
"""Bytes read at a time."""
LONGEST = 1 << 20
"""Bytes of a line, not fewer than are read at a time; of a longer one only what stands at its ends is looked at."""
TAIL = 60
"""Last lines, kept whatever they say."""
FIRST = 8
"""Lines of a template kept from its beginning, and from the beginning of each of its later bursts."""
BURST = 200
"""Lines without a template after which it begins a new burst."""
LAST = 2000
"""Lines whose template is not looked for, the last ones, that are kept whatever their burst."""
AFTER = 2
"""Lines kept after one that matters."""
STACK = 40
"""Lines kept after the head of a traceback, or of a launcher's summary."""
WIDEST = 4096
"""Characters kept of a line."""
MINED = 20_000
"""Shapes whose template is looked for, and that while there are not too many templates; later ones share one."""
KEY = 1000
"""Letters of a shape beyond which two are one if they begin and end alike."""
MEMORY = 16 << 20
"""Bytes of lines kept before the oldest go."""
MOST = 10_000
"""Lines kept before the oldest go: more than the rules are asked about."""
LOSSES = 8 << 20
"""Bytes at the end of a log whose losses are read; of earlier ones only whether they are numbers."""
ALIKE = 0.5
"""Share of equal words from which two lines have one template: the middle of Drain's 0.4 to 0.6."""
TEMPLATES = 2500
"""Templates: a line of each and the three round it are as many as a scan keeps."""
COMPARED = 40
"""Words of a line that are compared."""
BRANCH = 32
"""Templates of one length and first word that are compared one by one."""

_OPENS = (b"traceback", b"rootcause", b"failuresother", b"stacktrace")

_NUMBER = rb"[-+]?(?:nan|NaN|NAN|inf|Inf|INF|\d[\d.]*(?:[eE][-+]?\d+)?)"
_IS = rb"['\"\]]?[ \t]{0,4}[:=|]?[ \t]{0,4}['\"]?"
_LOSS = re.compile(rb"oss(?:es)?" + _IS + rb"(?:tensor\()?(" + _NUMBER + rb")")
_GRADIENT_IS_NAN = re.compile(rb"grad_?norm" + _IS + rb"nan", re.I)
_OTHER_LOSS = re.compile(
    rb"(val|valid|validation|eval|evaluation|test|best|min|aux|balanc(e|ed|er|ing)|z|router)(idation)?loss"
)

_VARIABLE = re.compile(r"0x[0-9a-f]+|(?<![a-z])[-+]?\d[\w.:,+/-]*|(?:/[\w.@+-]+){2,}/?|[\w.-]*\d{2,}[\w.-]*", re.I)


@dataclass(frozen=True)
class Loss:
    """A training loss in a log: the number of its line, its value and the line's bytes."""

    number: int
    value: float
    line: bytes

    @property
    def text(self) -> str:
        """The line as text."""
        return text_of(self.line)


@dataclass(eq=False, slots=True)
class Template:
    """One form of line, after Drain (He et al., ICWS 2017). Has state: its words, `*` where they differ, the number of
    the last line that had it, and how many were kept of its last burst."""

    words: list[str]
    last: int = 0
    lines_kept: int = 0

    def __str__(self) -> str:
        return " ".join(self.words)


class Templates:
    """The forms seen so far, a tree: by the number of words, by the first word, then by the share of equal words. Has
    state."""

    def __init__(self) -> None:
        self._tree: dict[tuple[int, str], list[Template]] = {}
        self.entries: list[Template] = []

    @property
    def full(self) -> bool:
        """Whether there are so many forms that one more would tell nothing."""
        return len(self.entries) >= TEMPLATES

    def add(self, line: str) -> Template:
        """The template of `line`, which it may widen."""
        words = masked(line)
        first = words[0] if words and "*" not in words[0] else "*"
        branch = self._tree.setdefault((len(words), first), [])
        shared = [sum(map(eq, words_of_template.words, words)) for words_of_template in branch]
        most = max(shared, default=0)
        if branch and (len(branch) >= BRANCH or most >= ALIKE * len(words)):
            best = branch[shared.index(most)]
            best.words = [mine if mine == other else "*" for mine, other in zip(best.words, words, strict=True)]
            return best
        made = Template(words)
        branch.append(made)
        self.entries.append(made)
        return made


def masked(line: str) -> list[str]:
    """The first words of a line, with `*` for what varies: word by word, as no variable holds a space, and words of
    letters alone hold none."""
    return [word if word.isalpha() else _VARIABLE.sub("*", word) for word in line.split(None, COMPARED)[:COMPARED]]


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
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder, not a log.", do="name the logs in it")
    with parsing(path, "name a log that exists and may be read"), _opened(Path(path)) as file:
        while block := file.read(BLOCK):
            keeper.take(block)
    return keeper.result(str(path))


def scan_text(text: bytes) -> Scanned:
    """The same of a text that is no file."""
    keeper = _Keeper()
    for at in range(0, len(text), BLOCK):
        keeper.take(text[at : at + BLOCK])
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


class _Losses(NamedTuple):
    """Lines some of which tell losses: their text, lines before them, bytes of the log up to their end."""

    text: bytes
    before: int
    until: int


@dataclass(frozen=True)
class _LineBlock:
    """Whole lines that stand together.

    Attributes:
        text, shapes: the lines and their shapes, each ended by a line feed.
        ends, bounds: where those stand in `text` and in `shapes`.
        before: lines of the log before the first.
        until: bytes of the log up to the end of the last.
    """

    text: bytes
    shapes: bytes
    ends: memoryview
    bounds: memoryview
    before: int
    until: int

    def line(self, at: int) -> bytes:
        """Without its line feed."""
        return self.text[self.ends[at - 1] + 1 if at else 0 : self.ends[at]]

    def shape(self, at: int) -> bytes:
        """Of that line."""
        return self.shapes[self.bounds[at - 1] + 1 if at else 0 : self.bounds[at]]


@dataclass(eq=False)
class _Keeper:
    """Keeps what matters of the blocks it is given. Has state."""

    head: bytes = b""
    """How the line begins that has not ended yet, if it is too long to be kept."""
    rest: bytes = b""
    """What follows, or all of it."""
    number: int = 0
    size: int = 0
    mattered: int = 0
    known: dict[bytes, Template] = field(default_factory=dict)
    templates: Templates = field(default_factory=Templates)
    crowd: Template = field(default_factory=lambda: Template(["*"]))
    crowded: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=LAST))
    lines_kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    bytes_kept: int = 0
    until: int = 0
    """Lines up to this number are kept as context."""
    losses: deque[_Losses] = field(default_factory=deque)
    not_finite: Loss | None = None
    tail: list[bytes] = field(default_factory=list)

    def take(self, piece: bytes) -> None:
        """Looks at the lines that end within the next `piece` of the log."""
        self.size += len(piece)
        first = piece.find(b"\n")
        last = piece.rfind(b"\n") + 1
        if last:
            self._grow(piece[:first])
            self._look(self.head + self.rest + piece[first:last], self.size - len(piece) + last)
            self.head = self.rest = b""
        self._grow(piece[last:])

    def result(self, path: str) -> Scanned:
        """What was kept of the whole log."""
        if self.rest:
            self._look(self.head + self.rest + b"\n", self.size + 1)
        first = self.number - len(self.tail) + 1
        tail = {first + at: line for at, line in enumerate(self.tail)}
        lines_kept = dict(self.lines_kept) | dict(self.crowded) | tail
        lines = {number: text_of(lines_kept[number]) for number in sorted(lines_kept)}
        templates = tuple(self.templates.entries)
        losses = tuple(self._told())
        return Scanned(path, lines, self.number, self.size, self.mattered, losses, self.not_finite, templates)

    def _grow(self, piece: bytes) -> None:
        """Adds to the line that has not ended yet."""
        self.rest += piece
        if self.head or len(self.rest) > LONGEST:
            self.head = self.head or self.rest[:WIDEST]
            self.rest = self.rest[-WIDEST:]

    def _look(self, text: bytes, until: int) -> None:
        shapes = keywords.shapes(text)
        bounds, mattering = keywords.ends_and_matters(shapes)
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 10)  # line feeds
        block = _LineBlock(text, shapes, ends.data, bounds.data, self.number, until)
        self.mattered += len(mattering)
        wanted = [(0, self.until - self.number), *self._first(block, mattering)]
        self._keep(block, wanted)
        self._follow(block)
        self.number += len(ends)
        self.tail = (self.tail + [cut(block.line(at)) for at in range(max(0, len(ends) - TAIL), len(ends))])[-TAIL:]

    def _first(self, block: _LineBlock, mattering: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Of the lines that matter those that are first of a burst, with what stands round them: from, to."""
        places = mattering.tolist()
        for at, template in zip(places, self._templates(block, mattering), strict=True):
            number = block.before + at + 1
            if number - template.last > BURST:
                template.lines_kept = 0
            template.last = number
            if template.lines_kept < FIRST:
                template.lines_kept += 1
                yield at - 1, at + 1 + context(block.shape(at))

    def _templates(self, block: _LineBlock, mattering: NDArray[np.int64]) -> list[Template]:
        """Of each of the lines that matter."""
        known = self.known
        keys = list(map(shape_key, _picked(block.shapes, block.bounds, mattering)))
        templates = list(map(known.get, keys))
        crowded = [place for place, template in enumerate(templates) if template is None]
        if not self._full:
            for place in crowded:
                key = keys[place]
                if key not in known and not self._full:
                    known[key] = self.templates.add(text_of(block.line(int(mattering[place]))))
                templates[place] = known.get(key)
            crowded = [place for place in crowded if templates[place] is None]
        for place in crowded:
            templates[place] = self.crowd
        last = mattering[crowded[-LAST:]]
        lines = map(cut, _picked(block.text, block.ends, last))
        self.crowded.extend(zip((last + block.before + 1).tolist(), lines, strict=True))
        return templates  # type: ignore[return-value]

    @property
    def _full(self) -> bool:
        """Whether templates are looked for no more."""
        return len(self.known) >= MINED or self.templates.full

    def _keep(self, block: _LineBlock, wanted: list[tuple[int, int]]) -> None:
        """Keeps the lines `wanted`, from (-1: the last of the block before) and to, in order, some of which overlap."""
        done = 0
        for low, high in wanted:
            if low < 0 and block.before and (not self.lines_kept or self.lines_kept[-1][0] < block.before):
                self._hold(block.before, self.tail[-1])
            for at in range(max(low, done), min(high, len(block.ends))):
                self._hold(block.before + at + 1, cut(block.line(at)))
            done = max(done, high)
        self.until = max(self.until, block.before + done)
        while self.bytes_kept > MEMORY or len(self.lines_kept) > MOST:
            self.bytes_kept -= weight(self.lines_kept.popleft()[1])

    def _hold(self, number: int, line: bytes) -> None:
        self.lines_kept.append((number, line))
        self.bytes_kept += weight(line)

    def _follow(self, block: _LineBlock) -> None:
        """Follows whether the last loss is a number, from a block's end back to its last loss that is one."""
        odd = None
        place = block.shapes.rfind(b"loss")
        if place >= 0:
            self.losses.append(_Losses(block.text, block.before, block.until))
        while place >= 0:
            at = bisect_left(block.bounds, place)
            loss = loss_in(block.before + at + 1, block.line(at), block.shape(at))
            if loss is not None and math.isfinite(loss.value):
                self.not_finite = None
                break
            odd = loss or odd
            place = block.shapes.rfind(b"loss", 0, block.bounds[at - 1]) if at else -1
        self.not_finite = self.not_finite or odd
        while self.losses and self.losses[0].until <= self.size - LOSSES:
            self.losses.popleft()

    def _told(self) -> Iterator[Loss]:
        """The losses at the end of the log."""
        for text, before, until in self.losses:
            end = until - len(text) - 1
            both = zip(text.split(b"\n")[:-1], keywords.shapes(text).split(b"\n"), strict=False)
            for number, (line, shape) in enumerate(both, before + 1):
                end += len(line) + 1
                if end >= self.size - LOSSES and (loss := loss_in(number, line, shape)):
                    yield loss


def _picked(text: bytes, ends: memoryview, rows: NDArray[np.int64]) -> list[bytes]:
    """Some of the lines of a text that end there."""
    every = np.asarray(ends)
    starts = np.where(rows > 0, every[rows - 1] + 1, 0)
    return [text[start:end] for start, end in zip(starts.tolist(), every[rows].tolist(), strict=True)]


def shape_key(shape: bytes) -> bytes:
    """By what a shape is known: itself, or of one that is too long both ends."""
    return shape if len(shape) <= KEY else shape[: KEY // 2] + shape[-KEY // 2 :]


def context(shape: bytes) -> int:
    """Lines kept after one of this shape."""
    return STACK if any(map(shape.__contains__, _OPENS)) else AFTER


def weight(line: bytes) -> int:
    """Bytes of memory that a kept line takes: its own, and those of its number and place."""
    return len(line) + 64


def loss_in(number: int, line: bytes, shape: bytes) -> Loss | None:
    """The training loss that the line of this number and shape tells, if it does.

    Hugging Face's Trainer writes the mean of a whole run last, beside `train_runtime`, and 0 for a loss that is not
    finite (`logging_nan_inf_filter`): where the gradient is NaN too, the loss was.
    """
    if b"loss" not in shape or b"trainruntime" in shape:
        return None
    match = _LOSS.search(line)
    if match is None:
        return None
    if _others(shape):  # one of those, or in a line that is no routine
        near = keywords.shapes(line[max(0, match.start() - 16) : match.start() + 4])
        if _OTHER_LOSS.search(near) or not keywords.matters(shape):
            return None
    try:
        value = float(match[1])
    except ValueError:
        return None
    return Loss(number, value if value or not _GRADIENT_IS_NAN.search(line) else math.nan, cut(line))


@lru_cache(maxsize=256)
def _others(shape: bytes) -> bool:
    """Whether a line of this shape tells other losses than the training loss."""
    return _OTHER_LOSS.search(shape) is not None


def text_of(line: bytes) -> str:
    """A line as text. Of what a progress bar wrote over and over on one line, the words stand last."""
    line = line.rstrip(b"\r")
    if b"\r" in line:
        line = b"\r".join(line.split(b"\r")[-2:])
    return cut(line).decode("utf-8", "replace").replace("\x00", "")


def cut(line: bytes) -> bytes:
    """Both ends of a line that is too long: what failed stands at one of them."""
    return line if len(line) <= WIDEST else line[: WIDEST // 2] + b" ... " + line[-WIDEST // 2 :]
