"""Text columns: words of a table of nodes, hashed with a sign into a bounded number of columns.

After Weinberger et al., "Feature Hashing for Large Scale Multitask Learning" (ICML 2009): rows of log-damped counts of
length one, weighted by how few of the rows that train have a column (TF-IDF). A run knows its columns by their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from unicodedata import normalize

import numpy as np
import xxhash

from espalier.graph.data.array_file import DEGREE_COLUMNS, NO_FEATURE
from espalier.graph.data.column_scales import standardised
from espalier.graph.data.graph import Array, Graph
from espalier.graph.data.targets import MISSING, as_words
from espalier.recipe.foreign_files import printable, unused

_CHARACTERS = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(f"[{_CHARACTERS}]|[^\\W_{_CHARACTERS}]+")
"""Words; in Chinese and Japanese, which put no spaces between them, characters."""


def words_of(text: str) -> list[str]:
    """The words of a text, without case and marks."""
    return [] if text in MISSING else _WORD.findall(normalize("NFKC", text).casefold())


def hashed(column: Array, size: int) -> Array:
    """float32 [rows, size]: the words of each cell, the same in every process; a row without words is 0."""
    rows = np.zeros((len(column), size), np.float32)
    for row, text in zip(rows, as_words(column), strict=True):
        for word, count in Counter(words_of(text)).items():
            digest = xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass"))
            row[digest % size] += np.log1p(count) * (1 if digest >> 63 else -1)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def tells_rows_apart(column: Array) -> bool:
    """Whether a word is in several rows and not in all of them: an id has none."""
    texts = [set(words_of(text)) for text in as_words(column)]
    rows = Counter(word for words in texts for word in words)
    return any(1 < count < len(texts) for count in rows.values())


def with_text(graph: Graph, size: int, known: Collection[str] | None = None) -> Graph:
    """`graph` with its columns of words as features after the others, which notes say.

    Args:
        graph: as it was read; what it has in place of features gives way to them.
        size: columns that each may take; 0: they are left out.
        known: the columns of the run that is taken up again, which has the weights; None: those of a new run are
            chosen, and weighted by how few of the rows that train have them.
    """
    train = np.arange(graph.nodes) if graph.parts is None else graph.parts.train
    features = dict[str, Array]()
    notes = list(graph.notes)
    for column, cells in graph.texts.items():
        tells = bool(size) and (known is not None or tells_rows_apart(cells[train]))
        rows = hashed(cells, size) if tells else np.zeros((len(cells), 0))
        wanted = {f"{column} (words {at} of {size})": values for at, values in enumerate(rows.T)}
        for name, values in wanted.items():
            if values[train].any() if known is None else name in known:
                features[name] = values
        count = sum(name in features for name in wanted)
        why = "words, none of them in several rows, as of an id" if size and known is None else "words"
        note = f"words of {printable(column)!r}: {count} columns (graph.text)"
        notes.append(note if count else unused("column", column, why))
    if not features:
        return replace(graph, texts={}, notes=tuple(notes))
    rows = np.stack([*features.values()], 1)
    if graph.columns == DEGREE_COLUMNS:
        notes = [note for note in notes if not note.startswith(NO_FEATURE)]
        graph = replace(graph, columns=(), features=graph.features[:, :0])
    scales = graph.column_scales
    if known is None:
        weights = np.log((1 + len(train)) / (1 + np.count_nonzero(rows[train], 0))) + 1
        added = np.stack([0 * weights, 1 / weights, 0 * weights])
        rows = standardised(rows, added)
        plain = np.tile([[0.0], [1], [0]], len(graph.columns))
        scales = np.concatenate([plain if scales is None else scales, added], 1)
    return replace(
        graph,
        features=np.concatenate([graph.features, rows], 1),
        columns=(*graph.columns, *features),
        column_scales=scales,
        texts={},
        notes=tuple(notes),
    )
