"""What a model shows people of what it does: a text, an image or a table. `Workload.sample` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from espalier.track import png


class Artifact(Protocol):
    """One thing to show. `fields` are those of its `sample` event."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """`kind`, and what belongs to it."""
        ...


@dataclass(frozen=True)
class Text:
    """Words as they are."""

    text: str

    @property
    def fields(self) -> Mapping[str, Any]:
        """See `Artifact.fields`."""
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
        return {"kind": "image", "text": words, "image": png.data_uri(self.pixels.detach().cpu().numpy())}


@dataclass(frozen=True)
class Table:
    """Rows of words or numbers under `columns`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]

    @property
    def fields(self) -> Mapping[str, Any]:
        """See `Artifact.fields`: `rows` begin with the columns' names; `text` is the table in letters."""
        rows = [list(self.columns), *([_shown(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(self.columns))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return {"kind": "table", "text": "\n".join(line.rstrip() for line in lines), "rows": rows}


def _shown(cell: str | int | float) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
