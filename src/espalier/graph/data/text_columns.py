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
    digests: dict[str, int] = {}
    for row, text in zip(rows, as_words(column), strict=True):
        for word, count in Counter(words_of(text)).items():
            digest = digests.get(word)
            if digest is None:
                digest = digests[word] = xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass"))
            row[digest % size] += np.log1p(count) * (1 if digest >> 63 else -1)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def useless(column: Array) -> str:
    """Why nothing can be learned from a column of words; empty: something can."""
    texts = [set(words_of(text)) for text in as_words(column)]
    rows = Counter(word for words in texts for word in words)
    if not rows:
        return "no values"
    if any(1 < count < len(texts) for count in rows.values()):
        return ""
    return "the same words in each row" if min(rows.values()) > 1 else "an id: no words are repeated"


def names_of(column: str, size: int) -> list[str]:
    """What the columns are called that a column is hashed into."""
    return [f"{column} (words {at} of {size})" for at in range(size)]


def with_text(graph: Graph, size: int, scaled: bool = False, known: Collection[str] | None = None) -> Graph:
    """`graph` with its columns of words as features after the others, which notes say.

    Args:
        graph: as it was read; what it has in place of features gives way to them.
        size: columns that each may take; 0: they are left out.
        scaled: whether they are weighted by how few of the rows that train have them, in `column_scales`.
        known: the columns of the run that is taken up again, which has the weights (None: a new run's are chosen).
    """
    train = np.arange(graph.nodes) if graph.parts is None else graph.parts.train
    features = dict[str, Array]()
    unread, taken = list[str](), list[str]()
    for column, cells in graph.texts.items():
        reason = "words: graph.text = 0" if not size else useless(cells[train]) if known is None else ""
        values = np.zeros((len(cells), 0), np.float32) if reason else hashed(cells, size)
        names = names_of(column, values.shape[1])
        wanted = values[train].any(0).tolist() if known is None else [name in known for name in names]
        features |= {name: values[:, at] for at, name in enumerate(names) if wanted[at]}
        if any(wanted):
            taken.append(f"{column} ({sum(wanted)})")
        else:
            unread.append(unused("column", column, reason or "words that the run did not read"))
    graph = replace(graph, texts={}, notes=(*graph.notes, *unread))
    if not features:
        return graph
    note = f"columns of words, hashed: {printable(', '.join(taken), 300)} (graph.text)"
    if graph.columns == DEGREE_COLUMNS:
        notes = tuple(note for note in graph.notes if not note.startswith(NO_FEATURE))
        graph = replace(graph, columns=(), features=graph.features[:, :0], notes=notes)
    return _appended(replace(graph, notes=(*graph.notes, note)), features, train if scaled else None)


def _appended(graph: Graph, features: dict[str, Array], train: Array | None) -> Graph:
    """`graph` with more columns of features, weighted by the rows that `train`, where these are given."""
    rows = np.stack([*features.values()], 1)
    scales = graph.column_scales
    if train is not None:
        weights = np.log((1 + len(train)) / (1 + np.count_nonzero(rows[train], 0))) + 1
        added = np.stack([0 * weights, 1 / weights, 0 * weights])
        rows = standardised(rows, added)
        plain = np.tile([[0.0], [1], [0]], len(graph.columns))
        scales = np.concatenate([plain if scales is None else scales, added], 1)
    columns = (*graph.columns, *features)
    return replace(graph, features=np.concatenate([graph.features, rows], 1), columns=columns, column_scales=scales)
