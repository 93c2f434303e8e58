"""What a model shows people of what it does: a text, an image or a table. `Workload.sample` gives them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Artifact(Protocol):
    """One thing to show. `fields` are those of its `sample` event."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """`kind`, and what belongs to it."""


@dataclass(frozen=True)
class Text:
    """Words as they are."""

    text: str

    @property
    def fields(self) -> Mapping[str, Any]:
        return {"kind": "text", "text": self.text}


@dataclass(frozen=True)
class Image:
    """Pixels: uint8 [height, width, 3], or [height, width] in grey. `text` stands where no image can be shown."""

    pixels: Tensor
    text: str = ""

    @property
    def fields(self) -> Mapping[str, Any]:
        """See `Artifact.fields`: the image is a PNG in a data URI."""
        height, width = self.pixels.shape[:2]
        words = f"{self.text or 'an image'} ({width} × {height})"
        png = base64.b64encode(encode(self.pixels.detach().cpu().numpy())).decode()
        return {"kind": "image", "text": words, "image": f"data:image/png;base64,{png}"}


@dataclass(frozen=True)
class Table:
    """Rows of words or numbers under `columns`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]

    @property
    def fields(self) -> Mapping[str, Any]:
        """See `Artifact.fields`: `rows` begin with the columns' names; `text` is the table in letters."""
        rows = [
            list(self.columns),
            *([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in self.rows),
        ]
        widths = [max(len(row[place]) for row in rows) for place in range(len(self.columns))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return {"kind": "table", "text": "\n".join(line.rstrip() for line in lines), "rows": rows}


@dataclass(frozen=True)
class Curve:
    """Lines over what is not steps: each of `rows` begins with x, ascending, and has a value for each of `names`; None
    where a line has none. `along` is what x counts."""

    title: str
    along: str
    names: Sequence[str]
    rows: Sequence[Sequence[float | None]]

    @property
    def fields(self) -> Mapping[str, Any]:
        rows = [[self.along, *self.names], *([*row] for row in self.rows)]
        return {"kind": "curve", "text": self.title, "rows": rows}


def encode(pixels: NDArray[np.uint8]) -> bytes:
    """PNG of `pixels`: uint8 [height, width] in grey, or [height, width, 3] in red, green and blue."""
    grey = pixels.ndim == 2
    assert pixels.dtype == np.uint8, pixels.dtype
    assert grey or (pixels.ndim == 3 and pixels.shape[2] == 3), pixels.shape
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if grey else 2, 0, 0, 0)
    data = zlib.compress(unfiltered.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
