"""Separated text: CSV, TSV and edge lists of words or numbers, also compressed by gzip.

What separates cells is found once, from the first rows, by their equal number of cells. Lines at the beginning that
start with `#` or `%` are comments. Each column becomes float64 where all of its cells are numbers that it holds
exactly, without leading zeros, else text.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from espalier.graph.data.graph import Array
from espalier.graph.data.targets import EXACT, MISSING
from espalier.machine.resource_limits import refuse_large
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing, printable
from espalier.recipe.units import plural

ENDINGS = (".csv", ".tsv", ".txt", ".edges", ".edgelist", ".el")
"""Of separated text, each also with `.gz` after it, in any case."""
NUMBER = re.compile(r"[-+]?(\d+(?:\.\d*)?(e[-+]?\d+)?|\.\d+(e[-+]?\d+)?|nan|inf(inity)?)", re.IGNORECASE | re.ASCII)
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars", "": "white space"}
_DECIMAL = re.compile(r"[-+]?\d+,\d+")
_PADDED = re.compile(r"\s*[-+]?0\d")
"""How a number with leading zeros begins: `007` may be a name, and is not `7`."""
_SAMPLE = 100
_LONGEST_LINE = 1 << 24
_PIECE = 1 << 12
_LONGEST = 131_072
_DO = "UTF-8 text, as many cells in every line"


@dataclass(frozen=True)
class Layout:
    """How a file separates its cells.

    Attributes:
        separator: between cells; empty: white space.
        rows: the first rows, each with the number of its last line.
        comment: cells of the last comment line before them.
        notes: what was found that is not usual.
    """

    path: Path
    separator: str
    rows: tuple[tuple[int, list[str]], ...]
    comment: list[str]
    notes: tuple[str, ...]
    skipped: int

    @property
    def cells(self) -> list[list[str]]:
        """Of the first rows."""
        return [row for _, row in self.rows]


def ending(path: Path) -> str:
    """The ending of a file's name in lower case, that of what is compressed for `.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def opened(path: Path) -> IO[str]:
    """The text of a file, also of a compressed one, without a byte order mark."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, newline="", encoding="utf-8-sig")


def is_number(cell: str) -> bool:
    """Whether a cell is a decimal number."""
    return NUMBER.fullmatch(cell.strip()) is not None


def layout(path: Path) -> Layout:
    """How the file at `path` is laid out. Raises UserError for an empty file, or rows that can be read in two ways."""
    with parsing(path, _DO), opened(path) as file:
        lines = list(_first_lines(file, path))
    check_size(path)
    hint = re.fullmatch(r"sep=(.)\s*", lines[0]) if lines else None  # Excel's first line
    skipped = 1 if hint else 0
    while skipped < len(lines) and (not lines[skipped].strip() or lines[skipped].lstrip()[0] in "#%"):
        skipped += 1
    comments = [line for line in lines[:skipped] if line.strip() and not hint]
    sample = lines[skipped:]
    if not sample:
        raise UserError(f"{printable(path)} is empty.", do="a line per edge: source,target")
    separator = hint[1] if hint else _separator(sample, path)
    rows = [(number, row) for number, row in _rows(sample, separator, path, skipped) if row]
    rows = rows[:-1] if len(lines) > _SAMPLE and len(rows) > 2 else rows  # the last one may be cut
    notes = [] if separator == "," else [f"{path.name} is separated by {_SEPARATORS.get(separator, separator)}"]
    if comments:
        first = printable(comments[0].strip(), 40)
        notes.append(f"{plural(len(comments), 'comment line')} of {path.name} skipped: {first!r}")
    comment = comments[-1].lstrip("#% ") if comments else ""
    named = [cell for _, row in _rows([comment], separator, path, 0) for cell in row]
    return Layout(path, separator, tuple(rows), named, tuple(notes), skipped)


def _first_lines(file: IO[str], path: Path) -> Iterator[str]:
    """The comment lines at the beginning and the first rows: as many as show how cells are separated."""
    size = 0
    rows = 0
    while size < _LONGEST_LINE and rows <= _SAMPLE and (line := file.readline(_LONGEST_LINE)):
        size += len(line)
        rows += not line.startswith(("#", "%"))
        yield line
    if size >= _LONGEST_LINE and rows <= 1:
        raise UserError(f"{printable(path)} has a line of {size:,} characters or more.", do=_DO)


def check_size(path: Path) -> None:
    """Refuses a table that takes more memory than is free; a compressed one is read through once."""
    do = "save it as .npz or .parquet, or give it a machine with more memory"
    refuse_large(printable(path), 2 * path.stat().st_size, do)
    if path.suffix.lower() == ".gz":
        with parsing(path, _DO), gzip.open(path) as file:
            size = 0
            while piece := file.read(_LONGEST_LINE):
                size += len(piece)
                refuse_large(printable(path), 2 * size, do)


def _rows(lines: Iterable[str], separator: str, path: Path, before: int) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row and the number of its last line, of which `before` come before `lines`."""
    rows = _cells(lines, separator)
    try:
        for row in rows:
            yield before + rows.line_num, row
    except csv.Error as error:
        raise UserError(f"{printable(path)}, line {before + rows.line_num}: {error}.", do=_DO) from None


def _cells(lines: Iterable[str], separator: str) -> Any:
    """The cells of each row; one of more than `_LONGEST` characters raises csv.Error."""
    csv.field_size_limit(_LONGEST)  # of the process: tables of text set another
    lines = lines if separator else (" ".join(line.split()) for line in lines)
    return csv.reader(lines, delimiter=separator or " ", skipinitialspace=True)


def _separator(sample: list[str], path: Path) -> str:
    """What separates the cells of all rows of `sample` into one number of cells."""
    tables = {each: [row for _, row in _rows(sample, each, path, 0) if row] for each in _SEPARATORS}
    fits = [each for each, rows in tables.items() if len(rows[0]) > 1 and len({len(row) for row in rows}) == 1]
    fits = [each for each in fits if each] or fits
    if not fits:  # rows of one cell, or of several numbers of cells, which is an error later
        return max(tables, key=lambda each: len(tables[each][0]) if each else 0)
    whole = [each for each in fits if not any(_divisible(row, fits, each) for row in tables[each])]
    if len(fits) > 1 and len(whole) != 1:
        raise UserError(
            f"{printable(path)} can be read with {' and with '.join(_SEPARATORS[each] for each in fits)}.",
            why=f"all rows then have as many cells, the first one {tables[fits[0]][0]} or {tables[fits[1]][0]}",
            do="put a line of column names first, or write it with commas",
        )
    return whole[0] if len(fits) > 1 else fits[0]


def _divisible(row: list[str], fits: list[str], separator: str) -> bool:
    """Whether another separator that `fits` is inside a cell, where it is no decimal comma."""
    others = [each for each in fits if each != separator]
    return any(other in cell for other in others for cell in row if not (other == "," and _DECIMAL.fullmatch(cell)))


# --- columns ---------------------------------------------------------------------------------------------------------


def columns(table: Layout, header: bool) -> list[Array]:
    """The columns below the header: float64 where all cells are numbers that it holds exactly, else text."""
    rows = table.rows[int(header) :]
    width = len(table.rows[0][1])
    if not rows:
        return [np.zeros(0, np.int64)] * width
    if width > 1 and all(is_number(cell) and not _PADDED.match(cell) for _, row in rows for cell in row):
        skipped = table.rows[0][0] if header else table.skipped
        numbers = _numbers(table, skipped)
        if numbers is not None:
            return list(numbers.T)
    return [_as_numbers(column) for column in _words(table, header, width)]


def _numbers(table: Layout, skipped: int) -> Array | None:
    """float64 [rows, columns]; None where a cell is no number, or too large."""
    how: Any = {"delimiter": table.separator or None, "skiprows": skipped, "ndmin": 2, "comments": None}
    try:
        cells = np.loadtxt(table.path, np.float64, quotechar='"', encoding="utf-8-sig", **how)
    except ValueError:  # a word further down; what is worse is met again where cells are text
        return None
    exact = cells.shape[1] == len(table.rows[0][1]) and not (np.abs(cells) >= EXACT).any()
    return cells if exact else None


def _words(table: Layout, header: bool, width: int) -> list[Array]:
    """The cells of each column as text."""
    pieces = []
    with parsing(table.path, _DO), opened(table.path) as file:
        lines = islice(file, table.skipped, None)
        rows = islice(_cells(lines, table.separator), int(header), None)
        try:
            while piece := list(islice(rows, _PIECE)):
                if set(map(len, piece)) != {width}:
                    _refuse_uneven(table, width)
                    piece = [row for row in piece if row]
                pieces.append([_text(column) for column in zip(*piece, strict=True)])
        except csv.Error:
            _refuse_uneven(table, width)
    pieces = [piece for piece in pieces if piece]
    if not pieces:
        return [np.zeros(0, np.int64)] * width
    return [np.concatenate(column) for column in zip(*pieces, strict=True)]


def _refuse_uneven(table: Layout, width: int) -> None:
    """Refuses a row that has not `width` cells, with its line. One without cells is left out, unless more follow in a
    table of one column."""
    empty = 0
    with opened(table.path) as file:
        lines = islice(file, table.skipped, None)
        for number, row in _rows(lines, table.separator, table.path, table.skipped):
            if row and (len(row) != width or (empty and width == 1)):
                why = f"line {empty} is empty" if len(row) == width else f"the first row has {width}"
                what = f"{printable(table.path)} is not a table: line {number} has {plural(len(row), 'cell')}."
                raise UserError(what, why=why, do=_DO)
            empty = empty if row or empty else number


def _text(cells: tuple[str, ...]) -> Array:
    """Cells as an array: of objects where a long one would make all of them long."""
    return np.array(cells, object if max(map(len, cells)) > 100 else str)


def _as_numbers(cells: Array) -> Array:
    """float64 where all cells are numbers, NaN where one is empty; else the cells."""
    if cells[0] not in MISSING and not is_number(cells[0]):
        return cells
    values = cells
    missing = np.isin(cells.astype(str), MISSING) if cells.dtype.kind == "U" else np.zeros(len(cells), bool)
    if missing.all():
        return cells
    if missing.any():
        values = np.where(missing, "nan", cells)
    try:
        numbers = values.astype(np.float64)
    except ValueError:
        return cells
    if (np.abs(numbers) >= EXACT).any() or any("_" in cell or _PADDED.match(cell) for cell in cells.tolist()):
        return cells  # Python reads 1_000 as a number
    return numbers


def named(table: Layout, names: list[str], header: bool) -> Mapping[str, Array]:
    """The columns by their `names`. Raises UserError where two are called the same."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"{printable(table.path)} has two columns {printable(twice[0])!r}.", do="rename one of them")
    return dict(zip(names, columns(table, header), strict=True))
