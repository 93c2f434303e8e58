"""The header of a GGUF file: its fields, and where its tensors lie. Every count is compared with the file's size.

After the format's specification (ggml, `docs/gguf.md`), versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, parsing, printable

AGAIN = "download it again"
_TEXT = 8
_ARRAY = 9
_FORMS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Number of a type to its form in `struct`."""
_LARGEST = 1 << 48
"""Values of a tensor, at most."""


Array = NDArray[Any]


class TensorPlace(NamedTuple):
    """A tensor of a file: its shape as numpy has it, the number of its type, and its first byte."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class GgufHeader(NamedTuple):
    """What a file says before its data, and all its bytes (mapped, uint8)."""

    fields: JsonObject
    tensors: tuple[TensorPlace, ...]
    content: NDArray[np.uint8]


def read(file: Path) -> GgufHeader:
    """The header of `file`. Raises UserError."""
    with parsing(file, AGAIN):
        cursor = _Cursor(np.memmap(file, np.uint8, "r"))
        if cursor.take(4) != b"GGUF" or cursor.number("I") not in (2, 3):
            what = f"{printable(file)} is no GGUF file: it does not begin with GGUF and version 2 or 3, little endian."
            raise UserError(what, do=AGAIN)
        tensors = cursor.count()
        fields = cursor.count()
        pairs = [(cursor.text(), cursor.value(cursor.number("I"))) for _ in range(fields)]
        places = [cursor.place() for _ in range(tensors)]
        known = dict(pairs)
        if len(known) < fields or len({place.name for place in places}) < tensors:
            raise ValueError("it has a field or a tensor twice")
        alignment = msgspec.convert(known.get("general.alignment", 32), int)
        if not 0 < alignment < 1 << 20:
            raise ValueError(f"general.alignment is {alignment}")
        begin = -(-cursor.at // alignment) * alignment
        return GgufHeader(known, tuple(place._replace(start=begin + place.start) for place in places), cursor.content)


class _Cursor:
    """Reads one value after the other. Has state: the position. Raises ValueError."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self.content = content
        self.at = 0

    def place(self) -> TensorPlace:
        """The place of a tensor, from the first byte of the data."""
        name = self.text()
        dimensions = self.number("I")
        shape = tuple(self.number("Q") for _ in range(min(dimensions, 5)))[::-1]
        if not 0 < dimensions < 5 or not 0 < math.prod(shape) < _LARGEST:
            raise ValueError(f"{name} has the shape {shape}")
        return TensorPlace(name, shape, self.number("I"), self.number("Q"))

    def value(self, kind: int) -> Any:
        """A number, a text, or a list."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_FORMS[kind])
        inner = self.number("I")
        size = self.count()
        return [self.value(inner) for _ in range(size)]

    def text(self) -> str:
        """A text with its length before it."""
        return self.take(self.count()).decode()

    def count(self) -> int:
        """How many things, of at least a byte each, follow."""
        count = self.number("Q")
        if count > len(self.content) - self.at:
            raise ValueError(f"it names {count} entries at byte {self.at}, which are more than it can hold")
        return int(count)

    def number(self, form: str) -> Any:
        """A number of the `form` of `struct`."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self.content) - self.at:
            raise ValueError("it is cut off")
        self.at += size
        return self.content[self.at - size : self.at].tobytes()


class GgufFields:
    """The fields of a file of one architecture, by names without it. `used`: those that were asked for."""

    def __init__(self, file: Path, fields: JsonObject, architecture: str) -> None:
        self.file = file
        self.fields = fields
        self.prefix = f"{architecture}."
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self.fields

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """A field of the type `kind`. Raises UserError for another, and for one without a `default` that is missing."""
        name = self.prefix + key
        self.used.add(name)
        if name not in self.fields and default is None:
            raise UserError(f"{printable(self.file)} does not say {key!r}.", do=AGAIN)
        value = self.fields.get(name, default)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            what = f"{printable(self.file)} says {name} = {printable(value)}"
            raise UserError(f"{what}: {printable(error)}.", do=AGAIN) from None
