"""Targets: what nodes or graphs are trained to give. Classes, tasks (yes or no), or values of a regression.

One check for the labels of every source. Words, and whole numbers in one column, are classes; columns of 0 and 1, or of
probabilities, are tasks; other numbers are values. `graph.target` says which where that is not what is meant. Values
are trained standardised, by the mean and the deviation of those that train (`Scale`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import printable
from espalier.recipe.units import plural

Array = NDArray[Any]
Kind = Literal["classes", "tasks", "values"]

IGNORED = -1
"""The label of a node (or graph) that has none."""
MISSING = ("", "nan", "NaN", "None", "null", "NULL", "NA", "N/A", "#N/A", "<NA>")
"""Words that stand for no value: those of Python, SQL, R, Excel and pandas."""

_NUMBER = re.compile(r"[+-]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|Inf|infinity|Infinity)")
WHOLE = re.compile(r"-?[0-9]{1,18}")
_POINTLESS = re.compile(r"(-?[0-9]+)\.0*")
EXACT = 2**53
"""Below it a float64 holds every whole number, and from there on every float64 is one."""
_LARGEST = 1e150
"""Of a value: its square must be a float64."""
_FEW = 20
"""So few labels say nothing of what they are."""
_REGRESSION = 'graph.target = "values" trains a regression'


@dataclass(frozen=True, eq=False)
class Targets:
    """What `read` made of labels.

    Attributes:
        labels: int64 [items] (classes; -1: none), float32 [items, tasks] (0 to 1; NaN: none), or float64
            [items, columns] (values; NaN: none).
        classes: their names; empty where they are numbered.
        notes: what was decided, where that may not be what is meant.
    """

    labels: Array
    classes: tuple[str, ...]
    kind: Kind
    notes: tuple[str, ...] = ()


def read(values: Any, origin: str, kind: str | None = None) -> Targets:
    """The targets of all items.

    Args:
        values: [items] or [items, columns] of numbers or words. No label is NaN, a null, an empty cell, or -1 where
            labels are classes or tasks in whole numbers.
        origin: where they are from, for messages.
        kind: `graph.target`; None: what they look like.

    Raises:
        UserError: for another shape, for values that are not finite, and for those that are not of `kind`.
    """
    array = as_array(values)
    if array.ndim not in (1, 2) or 0 in array.shape[1:]:
        raise UserError(
            f"{origin}: the labels have the shape {list(array.shape)}.", do="one class, or a row of values, for each"
        )
    if array.dtype.kind in "OSUT":
        words = _words(array, origin)
        if kind in (None, "classes") and not _decimal(words):
            return _named(words, origin)
        array = _parsed(words, origin, str(kind))
    if array.dtype.kind not in "fiub":
        raise UserError(f"{origin}: the labels are {array.dtype}, not numbers or words.", do="give numbers or words")
    numbers = array.astype(np.int64 if np.can_cast(array.dtype, np.int64) else np.float64)
    _refuse_not_finite(numbers, origin)
    chosen = kind or _looks_like(numbers, origin)
    if chosen == "classes":
        return _classes(numbers, origin)
    matrix = numbers.reshape(len(numbers), -1).astype(np.float64)
    if chosen == "tasks":
        return _tasks(matrix, origin)
    return Targets(matrix, (), "values", (f"targets: {_columns(matrix)} of values, a regression",))


def as_array(values: Any) -> Array:
    """An array of what may be a tensor, also of a dtype that NumPy lacks."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return np.asarray(values.float() if str(values.dtype) == "torch.bfloat16" else values)
    return np.asarray(values)


def of_graphs(rows: Sequence[Any], nodes: Sequence[int], origin: str) -> Array:
    """[graphs, columns]: the labels that graphs of so many `nodes` bring, each a number or a row.

    Raises:
        UserError: for rows of different lengths, and for labels of nodes.
    """
    flat = [as_array(row) for row in rows]
    widths = [row.size for row in flat]
    odd = next((at for at, width in enumerate(widths) if width != widths[0]), 0)
    of_nodes = all(row.shape[:1] == (count,) for row, count in zip(flat, nodes, strict=True)) and max(nodes) > 1
    if odd or of_nodes:
        what = plural(widths[odd], "label")
        other = "one for each node" if of_nodes else f"and item 0 has {widths[0]}"
        raise UserError(
            f"{origin}, item {odd} has {what}, {other}.",
            why='graph.task = "graph" trains on one label, or one row of them, for each graph',
            do="give each graph y of the same shape, such as [1, columns]",
        )
    return np.concatenate([row.reshape(1, -1) for row in flat])


# --- words -------------------------------------------------------------------------------------------------------


def as_words(column: Array) -> list[str]:
    """A column as text: whole numbers without a point (39, not 39.0), nothing where a value is missing."""
    cells = (column.astype(str) if column.dtype.kind == "S" else column).tolist()
    missing = [cell is None or (isinstance(cell, float) and math.isnan(cell)) for cell in cells]
    words = ["" if gone else str(cell).strip() for cell, gone in zip(cells, missing, strict=True)]
    return [_POINTLESS.sub(r"\1", word) if _POINTLESS.fullmatch(word) else word for word in words]


def _words(array: Array, origin: str) -> list[str]:
    """A column as text, also without the words that stand for no value."""
    if array.ndim == 2 and array.shape[1] > 1:
        raise UserError(f"{origin}: the labels are {array.shape[1]} columns of words.", do="one column of classes")
    words = as_words(array.reshape(-1))
    return ["" if word in MISSING else word for word in words]


def _decimal(words: Sequence[str]) -> bool:
    """Whether all that are given are numbers, and some are not whole."""
    given = {word for word in words if word}
    return all(map(_NUMBER.fullmatch, given)) and not all(map(WHOLE.fullmatch, given))


def _parsed(words: Sequence[str], origin: str, kind: str) -> Array:
    strange = next((word for word in words if word and not _NUMBER.fullmatch(word)), None)
    if strange is not None:
        raise UserError(
            f"{origin}: a label is {printable(strange)!r}, which is no number.",
            why=f"graph.target = {kind!r}",
            do="leave graph.target out (words are classes), or give numbers",
        )
    return np.array([float(word) if word else math.nan for word in words])


def _named(words: Sequence[str], origin: str) -> Targets:
    """Words are classes in their order, those that are numbers in that of numbers."""
    none = ("", str(IGNORED))
    distinct = {word for word in words if word not in none}
    numbers = all(map(WHOLE.fullmatch, distinct))
    if numbers and distinct and (least := min(map(int, distinct))) < IGNORED:
        raise _below(least, origin)
    classes = sorted(distinct, key=lambda word: (int(word) if numbers else 0, word))
    place = {word: at for at, word in enumerate(classes)}
    labels = np.array([place.get(word, IGNORED) for word in words], np.int64)
    return Targets(labels, tuple(classes), "classes", _counts(labels) if numbers else ())


# --- numbers -----------------------------------------------------------------------------------------------------


def _refuse_not_finite(numbers: Array, origin: str) -> None:
    if numbers.dtype.kind != "f":
        return
    strange = numbers[np.abs(numbers) > _LARGEST]  # NaN is not
    if len(strange):
        raise UserError(
            f"{origin}: a label is {strange[0]:g}.",
            why="training would give nothing but NaN from there on",
            do="give finite numbers; NaN where there is none",
        )


def _known(numbers: Array) -> Array:
    return numbers[~np.isnan(numbers)] if numbers.dtype.kind == "f" else numbers.reshape(-1)


def _is_whole(known: Array) -> Array:
    return (known == np.round(known)) & (np.abs(known) < EXACT)


def _is_answer(known: Array) -> bool:
    return bool(np.isin(known, (0, 1, IGNORED)).all())


def _looks_like(numbers: Array, origin: str) -> Kind:
    known = _known(numbers)
    columns = 1 if numbers.ndim == 1 else numbers.shape[1]
    if numbers.dtype.kind != "f":
        if columns > 1 and not _is_answer(known):
            strange = known[~np.isin(known, (0, 1, IGNORED))][0]
            raise UserError(
                f"{origin}: the labels are a matrix of {columns} columns that holds {strange}.",
                why="columns of whole numbers are questions answered by 0 or 1, -1 where there is no answer",
                do=f"one column of classes, or columns of 0 and 1; {_REGRESSION}",
            )
        return "classes" if columns == 1 else "tasks"
    shares = columns > 1 and bool(((known >= 0) & (known <= 1)).all())
    if numbers.ndim == 2 and (_is_answer(known) or shares):
        return "tasks"
    return "classes" if columns == 1 and _is_whole(known).all() else "values"


def _classes(numbers: Array, origin: str) -> Targets:
    if numbers.ndim == 2 and numbers.shape[1] > 1:
        raise UserError(
            f'{origin}: graph.target = "classes" is not possible for a matrix of {numbers.shape[1]} columns.',
            do='one column of classes, or graph.target = "tasks" or "values"',
        )
    column = numbers.reshape(-1)
    strange = _known(column)[~_is_whole(_known(column))]
    if len(strange):
        raise UserError(
            f"{origin}: a label is {strange[0]}, which is no class.",
            why='graph.target = "classes", and classes are whole numbers below 2**53',
            do=f"number them 0, 1, …; {_REGRESSION}",
        )
    labels = np.where(np.isnan(column), IGNORED, column) if column.dtype.kind == "f" else column
    if (least := int(labels.min(initial=IGNORED))) < IGNORED:
        raise _below(least, origin)
    labels = labels.astype(np.int64)
    return Targets(labels, (), "classes", _counts(labels))


def _below(least: int, origin: str) -> UserError:
    return UserError(
        f"{origin}: a label is {least}.",
        why="whole numbers in one column are classes, numbered from 0; -1 is none",
        do=f"number the classes 0, 1, …; {_REGRESSION}",
    )


def _counts(labels: Array) -> tuple[str, ...]:
    """Says so where classes look like counts: hardly any label is given twice."""
    known = labels[labels >= 0]
    distinct = len(np.unique(known))
    if len(known) < _FEW or 2 * distinct <= len(known):
        return ()
    return (f"targets: {len(known):,} whole numbers, taken as {distinct:,} classes ({_REGRESSION})",)


def _tasks(matrix: Array, origin: str) -> Targets:
    known = _known(matrix)
    if _is_answer(known):
        matrix = np.where(matrix == IGNORED, np.nan, matrix)
        return Targets(matrix.astype(np.float32), (), "tasks")
    strange = known[(known < 0) | (known > 1)]
    if len(strange):
        raise UserError(
            f"{origin}: a label is {strange[0]:g}, which is no answer.",
            why='graph.target = "tasks", and tasks are answered by 0 or 1, or a probability',
            do=_REGRESSION,
        )
    note = f"targets: {_columns(matrix)} of probabilities, trained as yes-or-no tasks ({_REGRESSION})"
    return Targets(matrix.astype(np.float32), (), "tasks", (note,))


def _columns(matrix: Array) -> str:
    return "one column" if matrix.shape[1] == 1 else f"{matrix.shape[1]} columns"


# --- scale of a regression ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scale:
    """Mean and standard deviation of each column of values, float64 [columns]; the deviation of a constant is 1."""

    mean: Array
    deviation: Array

    @staticmethod
    def of(values: Array, ids: Array) -> Scale:
        """Of the rows `ids` of float64 [items, columns]; exact sums, so that their order does not matter."""
        columns = [column[~np.isnan(column)] for column in np.asarray(values[ids]).T]
        pairs = np.array([_moments(column) for column in columns]).reshape(-1, 2)
        return Scale(pairs[:, 0].copy(), pairs[:, 1].copy())

    @staticmethod
    def from_table(table: Mapping[str, Any] | None) -> Scale | None:
        """What `table` gave."""
        return None if table is None else Scale(np.array(table["mean"]), np.array(table["deviation"]))

    def table(self) -> dict[str, list[float]]:
        """For JSON, which keeps every bit."""
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    def standardised(self, values: Array) -> Array:
        """float64: `values` in deviations from the mean."""
        return (values - self.mean) / self.deviation

    def restored(self, scaled: Array) -> Array:
        """float64: what `standardised` was given."""
        return scaled.astype(np.float64) * self.deviation + self.mean


def _moments(column: Array) -> tuple[float, float]:
    if not len(column):
        return 0.0, 1.0
    mean = math.fsum(column.tolist()) / len(column)
    apart = column - mean
    if column.min() == column.max():
        return float(column[0]), 1.0
    largest = float(np.abs(apart).max())  # so that no square is below what a float64 holds
    return mean, largest * math.sqrt(math.fsum(((apart / largest) ** 2).tolist()) / len(column))
