"""Answer table: `espalier predict RUN --out FILE`, rows of answers as CSV, JSON lines or Parquet. Imports no torch."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import UserError, missing_extra

ENDINGS = (".csv", ".jsonl", ".parquet")


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


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Writes a table of `rows`, whole or not at all, and returns the names of its columns. Raises UserError where there
    are no rows, and where the file cannot be written."""
    given = iter(rows)
    first = next(given, None)
    if first is None:
        raise UserError(f"--out {path}: there are no answers.", do="an input that names some")
    unfinished = path.with_stem(f"{path.stem}.unfinished")
    with writing(path, "another folder: --out FOLDER/answers.csv"):
        (_parquet if path.suffix.lower() == ".parquet" else _text)(unfinished, list(first), chain([first], given))
        unfinished.replace(path)
    return list(first)


def _parquet(path: Path, names: list[str], rows: Iterator[Mapping[str, Any]]) -> None:
    arrow, parquet = _pyarrow(str(path))
    parquet.write_table(arrow.Table.from_pylist(list(rows)), path)


def _text(path: Path, names: list[str], rows: Iterator[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as text:
        if path.suffix.lower() == ".csv":
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
