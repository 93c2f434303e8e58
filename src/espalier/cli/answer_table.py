"""Answer table: `espalier predict RUN --out FILE`, rows of answers as CSV, JSON lines or Parquet. Imports no torch."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import UserError, missing_extra

ENDINGS = (".csv", ".jsonl", ".parquet")
AT_ONCE = 1 << 16
"""Rows of a Parquet file that are in memory together."""


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError where no table can be written to `--out`."""
    out = arguments.out
    if out is None:
        return
    for name in ("chat", "serve", "turntable"):
        if getattr(arguments, name):
            raise UserError(f"--out and --{name} were both given.", do="give one of them")
    ending = Path(out).suffix.lower()
    if ending not in ENDINGS:
        raise UserError(f"--out {out} is no table that is known.", do=f"a name that ends in {', '.join(ENDINGS)}")
    if ending == ".parquet":
        _pyarrow(out)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Writes a table of `rows`, whole or not at all: how many there were, and the names of its columns. Raises
    UserError where there are none, and where the file cannot be written."""
    number = count()
    given = map(lambda row, _: row, rows, number)
    first = next(given, None)
    if first is None:
        raise UserError(f"--out {path}: there are no answers.", do="an input that names some")
    with writing(path, "another folder: --out FOLDER/answers.csv"):
        unfinished = path.with_stem(f"{path.stem}.unfinished")
        _write(unfinished, list(first), chain([first], given))
        unfinished.replace(path)
    return next(number), list(first)


def _write(path: Path, names: list[str], rows: Iterator[Mapping[str, Any]]) -> None:
    ending = path.suffix.lower()
    if ending == ".parquet":
        arrow, parquet = _pyarrow(str(path))
        tables = map(arrow.Table.from_pylist, iter(lambda: list(islice(rows, AT_ONCE)), []))
        first = next(tables)
        with parquet.ParquetWriter(path, first.schema) as file:
            for table in chain([first], tables):
                file.write_table(table)
        return
    with path.open("w", encoding="utf-8", newline="") as text:
        if ending == ".csv":
            writer = csv.DictWriter(text, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        else:
            text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _pyarrow(out: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("pyarrow", "graph", f"--out {out}") from None
    return pyarrow, parquet
