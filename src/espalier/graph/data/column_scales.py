"""Column scales: columns of numbers in a table of nodes, standardised by the rows that train.

Columns of 0 and 1 stay as they are. Whole numbers from 0 on, the largest more than `TAIL` times their mean, are counts:
log(1 + x) comes first. A column that is constant where it trains is 0 everywhere, as nothing is learned of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from espalier.graph.data.array_file import DEGREE_COLUMNS
from espalier.graph.data.graph import Array, Graph
from espalier.graph.data.targets import Scale
from espalier.recipe.foreign_files import printable
from espalier.recipe.units import plural

TAIL = 10
SAID = "columns by"
"""How the note on them begins."""


def scales_of(rows: Array) -> Array:
    """float64 [3, columns] of the `rows` that train: mean, deviation (0: constant), 1 for counts."""
    columns = np.asarray(rows, np.float64)
    flags = np.isin(columns, (0, 1)).all(0)
    whole = ((columns >= 0) & (columns == np.round(columns))).all(0)
    counts = whole & ~flags & (columns.max(0) > TAIL * columns.mean(0))
    scale = Scale.of(_damped(columns, counts), np.arange(len(columns)))
    deviation = np.where((columns == columns[0]).all(0), 0, scale.deviation)
    return np.stack([np.where(flags, 0, scale.mean), np.where(flags, 1, deviation), counts])


def _damped(columns: Array, counts: Array) -> Array:
    return np.where(counts > 0, np.sign(columns) * np.log1p(np.abs(columns)), columns)


def standardised(features: Array, scales: Array) -> Array:
    """float32 [rows, columns]: `features` in deviations from the mean, as `scales_of` gave them."""
    mean, deviation, counts = scales
    apart = _damped(np.asarray(features, np.float64), counts) - mean
    return np.divide(apart, deviation, out=np.zeros_like(apart), where=deviation > 0).astype(np.float32)


def with_scales(graph: Graph) -> Graph:
    """`graph`, whose features are columns of a table, standardised by the nodes that train, all where links do, which a
    note says."""
    rows = np.arange(graph.nodes) if graph.parts is None else graph.parts.train
    if graph.columns in ((), DEGREE_COLUMNS) or not len(rows):
        return graph
    scales = scales_of(graph.features[rows])
    flags = (scales.T == (0, 1, 0)).all(1)
    kind = np.select([flags, scales[1] == 0, scales[2] > 0], [1, 2, 3])
    words = ("standardised", "0 or 1, as they are", "constant, now 0", "counts, log(1 + x) standardised")
    names = np.array(graph.columns)
    parts = [f"{word}: {', '.join(names[kind == at])}" for at, word in enumerate(words) if at in kind]
    note = f"{SAID} {plural(len(rows), 'node')} that train: {printable('; '.join(parts), 300)} (graph.standardise)"
    features = standardised(graph.features, scales)
    return replace(graph, features=features, column_scales=scales, notes=(*graph.notes, note))
