"""Reads files of measured steps: a CSV of Megatron-LM runs, or JSON lines that describe each run in full. No torch.

A CSV's ten columns are a GPT as Megatron-LM trained it in 2021 on machines of 8 A100s (`_ASSUMED`); each further
column says otherwise (`MORE`). JSON lines are in `run_records`. Blank lines and lines that begin with # are left out.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from espalier.plan.calibration import Measurement
from espalier.plan.measurements import stack_words
from espalier.plan.measurements.model_words import LATENT
from espalier.plan.measurements.row_table import refuse_misspelled
from espalier.plan.measurements.run_records import Descriptions
from espalier.recipe import serialization
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.foreign_files import read_text

COLUMNS = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")
"""What a CSV must have: GPUs, sequences of a step and of a micro-batch, sizes of the model, and ranks of each axis."""
LARGEST = 10**9
"""No number of a row is larger."""
MEASURED = "iter_ms"
PREDICTED = "predicted_ms"
FORMATS = "a CSV with the columns " + ",".join((*COLUMNS, MEASURED)) + ", or JSON lines; docs/planner.md shows both"

RENAMED = {"width": "hidden", "mbs": "micro_batch", "gbs": "global_batch"}
"""Other names of columns."""
MORE: Mapping[str, tuple[str, ...]] = {
    "model": ("kv_heads", "head_size", "feed_forward", "gated", "vocabulary", "tied", "experts", "active", "shared",
              *LATENT),
    "cluster": ("device", "per_node", "between"),
    "layout": ("sp", "cp", "vp", "ep", "algorithm", "recompute", "stages", "schedule"),
    "train": ("precision", "compile", "optimizer", *stack_words.KEYS),
    "measured": ("peak_gib", "out_of_memory", "memory"),
    "row": ("stack",),
}  # fmt: skip
"""Columns that a CSV may have beside those, by the table of a JSON line whose words they are."""
_ASSUMED: Mapping[str, Any] = {
    "vocabulary": 51_200, "tied": True, "device": "A100-80GB", "per_node": 8, "between": "800Gbit/s",
    "recompute": "block", "precision": "fp16", "executor": "megatron-lm", "gradients": "fp16", "attention": "written",
    "sequence_parallel": False,
}  # fmt: skip
"""What the ten columns do not say. An executor that is named brings its own habits."""
_HABITS = ("gradients", "attention", "sequence_parallel")


@dataclass(frozen=True)
class MeasuredRow:
    """One line of a file: as it was given, what it means, with which rows its time may be compared (`group`), and which
    of its keys change no prediction."""

    line: int
    given: dict[str, Any]
    measurement: Measurement
    group: tuple[Hashable, ...]
    unpriced: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredTable:
    """A file of measurements. `notes`: what was assumed or not understood, for people."""

    path: str
    form: Literal["csv", "jsonl"]
    columns: tuple[str, ...]
    rows: tuple[MeasuredRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def measurements(self) -> list[Measurement]:
        """What each row measured."""
        return [row.measurement for row in self.rows]


def read(path: str | Path) -> MeasuredTable:
    """The measurements in a file. Raises UserError naming file, line and key."""
    lines = [(n, line) for n, line in enumerate(_text(path).split("\n"), 1) if line.strip() and line.lstrip()[0] != "#"]
    if not lines:
        raise UserError(f"{path} holds no measurement.", do=FORMATS)
    first = lines[0][1].lstrip()
    if first.startswith("["):
        raise UserError(f"{path} is a JSON array.", do="one JSON object per line, without brackets around them")
    if first.startswith("{"):
        return _json_lines(str(path), lines)
    return _csv(str(path), lines)


def _text(path: str | Path) -> str:
    return read_text(Path(path), FORMATS).replace("\r", "")


@contextmanager
def _at(path: str, line: int) -> Iterator[None]:
    """Errors within name the file and the line."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}, line {line}: {error.what}", why=error.why, do=error.do) from None


# --- JSON lines --------------------------------------------------------------------------------------------------


def _json_lines(path: str, lines: list[tuple[int, str]]) -> MeasuredTable:
    rows = []
    descriptions = Descriptions()
    for number, text in lines:
        with _at(path, number):
            try:
                given = serialization.from_json(text)
            except msgspec.DecodeError as error:
                raise UserError(f"not valid JSON: {error}.", do="one whole JSON object per line") from None
            if not isinstance(given, dict):
                raise UserError("not a JSON object.", do='{"model": …, "cluster": …, "layout": …, "train": …}')
            rows.append(MeasuredRow(number, given, *descriptions.measurement(given, f"line {number}")))
    return MeasuredTable(path, "jsonl", (), tuple(rows), tuple(sorted(descriptions.notes)))


# --- CSV ---------------------------------------------------------------------------------------------------------


class _Gpt(NamedTuple):
    """One row's numbers: a GPT with a feed-forward of 4 x hidden, fp16, every block recomputed, 1F1B."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    seq: int
    tp: int
    dp: int
    pp: int


def _csv(path: str, lines: list[tuple[int, str]]) -> MeasuredTable:
    (head, text), *body = lines
    with _at(path, head):
        columns = [name.strip() for name in next(csv.reader([text]))]
        _check_columns(columns, text)
    rows: list[MeasuredRow] = []
    descriptions = Descriptions()
    known = (*COLUMNS, *RENAMED, MEASURED, PREDICTED, *(key for keys in MORE.values() for key in keys))
    with _at(path, head):
        refuse_misspelled(dict.fromkeys(columns), known, "column", descriptions.notes)
    for number, line in body:
        with _at(path, number):
            given = _cells(columns, line)
            named = {RENAMED.get(name, name): value for name, value in given.items()}
            at = _Gpt(**{name: _whole(name, named[name]) for name in COLUMNS})
            record = _record(at, {name: _value(text) for name, text in named.items() if text.strip()})
            _check(at, record["layout"])
            rows.append(MeasuredRow(number, given, *descriptions.measurement(record, f"{path}, line {number}")))
    if not rows:
        raise UserError(f"{path} has columns but no rows.", do="one row per measured step")
    return MeasuredTable(path, "csv", tuple(columns), tuple(rows), tuple(sorted(descriptions.notes)))


def _record(at: _Gpt, given: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a JSON line says it."""
    assumed = {key: value for key, value in _ASSUMED.items() if "executor" not in given or key not in _HABITS}
    words = {**assumed, **given}
    record: dict[str, Any] = {table: {key: words[key] for key in keys if key in words} for table, keys in MORE.items()}
    place = record.pop("cluster")
    row = record.pop("row")
    each = int(words["per_node"])
    count, devices = (1, at.gpus) if at.gpus <= each else (-(-at.gpus // each), each)
    record["model"] = {"depth": at.layers, "width": at.hidden, "heads": at.heads, "feed_forward": 4 * at.hidden,
                      **record["model"]}  # fmt: skip
    record["layout"] |= {"dp": at.dp, "tp": at.tp, "pp": at.pp, "micro_batch": at.micro_batch}
    record["train"] |= {"sequence": at.seq, "batch_tokens": at.seq * at.global_batch}
    record["measured"] |= {"step_seconds": _seconds(str(words.get(MEASURED, "")))}
    links = {"between": place["between"]} if count > 1 else {}
    nodes = {"device": place["device"], "count": count, "devices": devices}
    return {**record, **row, "cluster": {"nodes": [nodes], "links": links}}


def _value(text: str) -> Any:
    """A cell as JSON has it: a number, true or false, or words."""
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not _is_number(text):
        return text
    return int(float(text)) if float(text) == int(float(text)) else float(text)


def _check_columns(columns: list[str], text: str) -> None:
    missing = [name for name in COLUMNS if name not in {RENAMED.get(column, column) for column in columns}]
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice and not all(_is_number(name) for name in columns):
        raise UserError(f"column {twice[0]!r} comes twice.", do="give each column a name of its own")
    if not missing:
        near = nearest(MEASURED, [name for name in columns if name not in COLUMNS]) if MEASURED not in columns else None
        if near and near != PREDICTED:
            why = "without it nothing is measured; it holds milliseconds"
            raise UserError(f"there is no column {MEASURED!r}.", why=why, do=f"rename {near!r}, or another name for it")
        return
    why = f"the columns are {', '.join(columns)}"
    do = "a first line of " + ",".join((*COLUMNS, MEASURED))
    near = nearest(missing[0], [name for name in columns if name not in COLUMNS])
    if len(columns) == 1 and any(mark in text for mark in ";\t|"):
        do = "separate the columns with commas"
    elif all(_is_number(name) for name in columns):
        why = "the first line holds numbers, not the names of columns"
    elif near:
        do = f"rename {near!r} to {missing[0]!r}"
    raise UserError(f"there is no column {' or '.join(repr(name) for name in missing)}.", why=why, do=do)


def _cells(columns: list[str], line: str) -> dict[str, str]:
    cells = next(csv.reader([line]))
    if len(cells) != len(columns):
        raise UserError(f"{len(cells)} values for {len(columns)} columns.", do="one value, or nothing, between commas")
    return dict(zip(columns, cells, strict=True))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _whole(name: str, text: str) -> int:
    if not _is_number(text) or float(text) != int(float(text)) or float(text) < 1:
        raise UserError(f"{name} = {text.strip() or 'nothing'!r} is not possible.", do="a whole number, 1 or more")
    if float(text) > LARGEST:
        raise UserError(f"{name} = {text.strip()} is more than any machine has.", do=f"{LARGEST:,} or less")
    return int(float(text))


def _seconds(text: str) -> float | None:
    """Seconds of a cell of milliseconds; None when it is empty."""
    if not text.strip():
        return None
    if not _is_number(text) or float(text) <= 0:
        raise UserError(f"{MEASURED} = {text.strip()!r} is not a time.", do="milliseconds above 0, or nothing")
    return float(text) / 1000


def _check(at: _Gpt, layout: Mapping[str, Any]) -> None:
    """Refuses numbers that contradict one another."""
    axes = {"tp": at.tp, "dp": at.dp, "pp": at.pp} | {name: layout[name] for name in ("sp", "cp") if name in layout}
    used = math.prod(axes.values())
    if used != at.gpus:
        why = f"{' x '.join(axes)} = {' x '.join(map(str, axes.values()))} = {used}"
        raise UserError(f"gpus = {at.gpus} does not fit the layout.", why=why, do=f"gpus = {used}")
    if at.pp > at.layers:
        raise UserError(f"pp = {at.pp} is more than layers = {at.layers}.", do="a layer or more for every stage")
    if at.dp > at.global_batch:
        raise UserError(f"dp = {at.dp} is more than global_batch = {at.global_batch}.", do="a sequence per replica")
