"""The header of a GGUF file: its fields, and where its tensors lie. Every count is compared with the file's size.

After the format's specification (ggml, `docs/gguf.md`), versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from espalier.errors import UserError
from espalier.foreign_files import printable

AGAIN = "download it again"
_MAGIC = b"GGUF"
_TEXT, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Number of a type to its form in `struct`."""
_SMALLEST = {_TEXT: 8, _ARRAY: 12}
_DEEPEST = 4
"""Arrays in one another, at most."""
_DIMENSIONS = 4


class TensorPlace(NamedTuple):
    """A tensor of a file: its shape as numpy has it, the number of its type, and its first byte."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class Header(NamedTuple):
    """What a file says before its data, and all its bytes (mapped, uint8)."""

    fields: Mapping[str, Any]
    tensors: tuple[TensorPlace, ...]
    content: NDArray[np.uint8]


def read(file: Path) -> Header:
    """The header of `file`. Raises UserError where it is damaged, OSError where it cannot be opened."""
    if not file.stat().st_size:
        raise UserError(f"{printable(file)} is no GGUF file: it is empty.", do=AGAIN)
    content = np.memmap(file, np.uint8, "r")
    return _Cursor(file, content).header()


class _Cursor:
    """Reads one value after the other. Has state: the position."""

    def __init__(self, file: Path, content: NDArray[np.uint8]) -> None:
        self.file, self.content, self.at = file, content, 0

    def header(self) -> Header:
        """All of it."""
        if self.take(4) != _MAGIC:
            self.damaged("it does not begin with GGUF")
        version = int(self.scalar("I"))
        if version not in (2, 3):
            self.damaged(f"it has version {version}; versions 2 and 3 are read, little endian")
        tensors, fields = self.count(24), self.count(13)
        known: dict[str, Any] = {}
        for _ in range(fields):
            name = self.text()
            if name in known:
                self.damaged(f"it says {printable(name)} twice")
            known[name] = self.value(int(self.scalar("I")))
        infos = [self.tensor() for _ in range(tensors)]
        alignment = known.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            self.damaged(f"general.alignment is {printable(alignment)}")
        begin = -(-self.at // alignment) * alignment
        if len({info.name for info in infos}) < len(infos):
            self.damaged("it has two tensors of one name")
        return Header(known, tuple(info._replace(start=begin + info.start) for info in infos), self.content)

    def tensor(self) -> TensorPlace:
        """The place of a tensor, from the first byte of the data."""
        name, dimensions = self.text(), int(self.scalar("I"))
        if not 0 < dimensions <= _DIMENSIONS:
            self.damaged(f"{printable(name)} has {dimensions} dimensions")
        shape = tuple(int(self.scalar("Q")) for _ in range(dimensions))[::-1]
        if not 0 < math.prod(shape) < 1 << 48:
            self.damaged(f"{printable(name)} has the shape {shape}")
        return TensorPlace(name, shape, int(self.scalar("I")), int(self.scalar("Q")))

    def value(self, kind: int, depth: int = 0) -> Any:
        """A number, a text, or a list."""
        if kind == _TEXT:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            self.damaged(f"it has a field of type {kind}")
        if depth == _DEEPEST:
            self.damaged("its arrays are nested too deeply")
        inner = int(self.scalar("I"))
        if inner not in _SCALARS:
            size = self.count(_SMALLEST.get(inner, 1))
            return [self.value(inner, depth + 1) for _ in range(size)]
        form = _SCALARS[inner]
        size = self.count(struct.calcsize(form))
        return list(struct.unpack(f"<{size}{form}", self.take(size * struct.calcsize(form))))

    def count(self, smallest: int) -> int:
        """How many things of at least `smallest` bytes follow."""
        number = int(self.scalar("Q"))
        if number * smallest > len(self.content) - self.at:
            self.damaged(f"it names {number} entries at byte {self.at}, which are more than it can hold")
        return number

    def scalar(self, form: str) -> Any:
        """A number of the `form` of `struct`."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        """A text with its length before it."""
        start = self.at
        try:
            return self.take(self.count(1)).decode()
        except UnicodeDecodeError:
            self.damaged(f"the text at byte {start} is not UTF-8")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self.content) - self.at:
            self.damaged("it is cut off")
        self.at += size
        return self.content[self.at - size : self.at].tobytes()

    def damaged(self, reason: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{printable(self.file)} is no GGUF file: {reason}.", do=AGAIN)


class Said:
    """The fields of a file of one architecture, by names without it, each checked when it is asked for."""

    def __init__(self, file: Path, fields: Mapping[str, Any], architecture: str) -> None:
        self.file, self.fields, self.prefix = file, fields, f"{architecture}."
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self.fields

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to 2**31. Raises UserError, as the others do."""
        return int(self._checked(key, default, f"a whole number from {least} to 2**31", self._is_whole(least)))

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        positive = "a positive number"
        return float(self._checked(key, default, positive, lambda value: _number(value) and 0 < value < math.inf))

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        return str(self._checked(key, default, "a text", lambda value: isinstance(value, str)))

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """A list of texts."""
        return list(self._checked(key, default, "a list of texts", lambda value: _all(value, str)))

    def wholes(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return list(self._checked(key, None, "a list of whole numbers", lambda value: _all(value, int)))

    def flag(self, key: str, default: bool) -> bool:
        """Yes or no."""
        return bool(self._checked(key, default, "true or false", lambda value: isinstance(value, bool)))

    def _is_whole(self, least: int) -> Any:
        return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= 1 << 31

    def _checked(self, key: str, default: Any, wanted: str, good: Any) -> Any:
        name = self.prefix + key
        self.used.add(name)
        if name not in self.fields and default is None:
            raise UserError(f"{printable(self.file)} does not say {key!r}.", do=AGAIN)
        value = self.fields.get(name, default)
        if not good(value):
            raise UserError(
                f"{printable(self.file)} says {name} = {printable(value)}; it has to be {wanted}.", do=AGAIN
            )
        return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(part, kind) for part in value)
