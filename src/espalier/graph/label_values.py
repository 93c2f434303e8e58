"""What labels mean: classes by number or by word, or a matrix of tasks."""

from __future__ import annotations

import numpy as np

from espalier.errors import UserError
from espalier.graph.data import IGNORED, Array
from espalier.graph.table_columns import WHOLE, as_words

_MISSING = ("", "-1", "nan", "NaN", "None", "null")


def column_labels(column: Array | None) -> tuple[Array | None, tuple[str, ...]]:
    """Classes by number; words become classes in their order, and what says that there is none is no label."""
    if column is None:
        return None, ()
    if column.dtype.kind in "fiu":
        return whole_labels(column), ()
    words = as_words(column)
    distinct = {word for word in words if word not in _MISSING}
    numbers = all(map(WHOLE.fullmatch, distinct))
    classes = sorted(distinct, key=lambda word: (int(word) if numbers else 0, word))
    known = {word: at for at, word in enumerate(classes)}
    return np.array([known.get(word, IGNORED) for word in words], np.int64), tuple(classes)


def array_labels(labels: Array | None) -> tuple[Array | None, tuple[str, ...]]:
    """Labels of an array: classes by number or by word, or a matrix of tasks."""
    if labels is None or (labels.ndim == 2 and labels.dtype.kind == "f"):
        return labels, ()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.dtype.kind in "iub":
        return matrix_labels(labels), ()
    if labels.ndim != 1:
        raise UserError(f"The labels have the shape {list(labels.shape)}.", do="one class, or a row of tasks, for each")
    if labels.dtype.kind == "b":
        return labels.astype(np.int64), ()
    return column_labels(labels.astype(str) if labels.dtype.kind == "S" else labels)


def whole_labels(values: Array) -> Array:
    """int64 classes of numbers; NaN is no label. Raises UserError for what is not whole."""
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), IGNORED, values)
        if not np.array_equal(values, np.round(values)) or np.isinf(values).any():
            raise UserError(
                "The labels are not whole numbers.", why="regression is not supported", do="classes 0, 1, …"
            )
    return values.astype(np.int64)


def matrix_labels(values: Array) -> Array:
    """float32 [nodes, tasks] of a matrix of labels; in whole numbers it must hold 0, 1 and -1 for none."""
    if values.dtype.kind not in "iu":
        return values.astype(np.float32)
    strange = values[~np.isin(values, (0, 1, IGNORED))]
    if len(strange):
        raise UserError(
            f"The labels are a matrix of {values.shape[1]} columns that holds {strange[0]}.",
            why="each column is a question answered by 0 or 1, -1 where there is no answer",
            do="one column of classes, or columns of 0 and 1",
        )
    return np.where(values == IGNORED, np.nan, values).astype(np.float32)
