"""Token chunks: what loss and feed-forward hold and take where some tokens are computed at a time. NumPy; no torch.

Chosen where all at once would take over a tenth of what a rank may hold. A chunk is a power of two of tokens that
takes a fortieth at most: large enough for fast products, small beside the rest.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from espalier.recipe.cost import Number, Product, Work

SHARE = 0.1
"""Of what a rank may hold: logits, or a layer's inner activations, that take more are computed by chunks."""
CHUNK = 0.025
"""Of what a rank may hold: what a chunk takes at most."""


def chunk_tokens(work: Work, room: float, allowed: Number = True) -> Number:
    """Tokens of a chunk, 0 for all at once, where a rank may hold `room` bytes."""
    chunks = work.chunks
    if chunks is None or room == inf:
        return 0
    fitting = 2.0 ** np.floor(np.log2(np.maximum(1.0, CHUNK * room / np.asarray(chunks.each))))
    needed = np.minimum(fitting, work.tokens) * chunks.each + chunks.sums
    pays = (np.asarray(chunks.size) > SHARE * room) & (needed < chunks.transient + chunks.saved)
    return np.where(pays & allowed, fitting, 0.0)


def by_chunks(work: Work, chunk: Number) -> Work:
    """`work` computed `chunk` tokens at a time; 0: all at once."""
    chunks = work.chunks
    used = np.asarray(chunk) > 0
    if chunks is None or not np.any(used):
        return work
    rows = np.where(used, np.minimum(np.maximum(1, chunk), work.tokens), work.tokens)
    times = work.tokens / rows
    added = rows * chunks.each + chunks.sums - chunks.transient
    return replace(
        work,
        products=tuple(_cut(product, rows) for product in work.products) if chunks.divides else work.products,
        moved=work.moved + used * times * chunks.moved,
        saved=work.saved - used * chunks.saved,
        transient=work.transient + used * added,
        again=np.where(used, chunks.again, work.again),
        chunks=None,
    )


def _cut(product: Product, rows: Number) -> Product:
    """The same product, so many `rows` at a time."""
    return replace(product, rows=rows, count=product.count * product.rows / rows)
