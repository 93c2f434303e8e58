"""What attention over cut sequences costs: bytes sent and exposed seconds, of many grids in one call. NumPy; no torch.

After LoongTrain (arXiv 2406.18485, section 5), with both placements of the grid on the ranks. Bytes are the ledger's
for lengths and heads that the degrees divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.recipe.cost import Carried, Cost, Number, uncoded

KEYS_VALUES = "keys_values"
ACTIVATIONS = "activations"
Wire = Callable[[str, Number, Number, Number, str], Number]
"""(operation, bytes, ranks, their distance, class of traffic) -> seconds: `all_to_all` of a whole tensor, and `ring`,
one step in which every rank sends so many bytes to the next."""
BACKWARD = 2.5
"""The work of attention backward, in forwards."""


def plainly(traffic: str) -> Carried:
    """No class is encoded."""
    return uncoded


@dataclass(frozen=True)
class SequenceGrid:
    """How the ranks of a sequence are laid out. Arrays allowed.

    Attributes:
        heads, context, window: ranks that share a slot, slots, and slots of an inner ring (hp, cp, w).
        head_first: the ranks of a row are neighbours; else those of a column are.
        stride: how far neighbours are apart (ranks of the axes that vary faster).
        apart: with `head_first` false, how far the ranks of an inner ring are apart: 2 where rings are interleaved.
    """

    heads: Number = 1
    context: Number = 1
    window: Number = 1
    head_first: Any = True
    stride: Number = 1
    apart: Number = 1

    @property
    def windows(self) -> Number:
        """Inner rings."""
        return self.context // self.window

    @property
    def strides(self) -> tuple[Number, Number, Number]:
        """Distances of neighbours in a row, in an inner ring and in an outer ring."""
        row = np.where(self.head_first, 1, self.context) * self.stride
        inner = np.where(self.head_first, self.heads, self.apart) * self.stride
        between = np.where(self.apart > 1, 2 * self.window - 1, self.window)
        return row, inner, np.where(self.head_first, self.heads * self.window, between) * self.stride


@dataclass(frozen=True)
class SequenceLoad:
    """One micro-batch of a decoder, as far as its attention is concerned. Arrays allowed.

    Attributes:
        tokens: of the whole sequences together (micro-batch x length).
        heads, kv_heads, head_size: of the model; layers: of one rank.
        element_bytes: of queries, keys and values; their gradients travel in 4 bytes at least.
        seconds: attention of one layer forward, on one rank of the grid.
        recompute: `none`, `selective` (heads are exchanged again, attention is not) or `block`.
    """

    tokens: Number
    heads: Number
    kv_heads: Number
    head_size: Number
    layers: Number = 1
    element_bytes: Number = 4
    seconds: Number = 0.0
    recompute: str = "none"


def cost(
    load: SequenceLoad, grid: SequenceGrid, wire: Wire | None = None, carried: Callable[[str], Carried] = plainly
) -> Cost:
    """What one micro-batch adds to a step of each rank. `carried`: class of traffic -> bytes that leave a rank.

    Returns:
        `sent`: `keys_values` and `activations` in the ledger's bytes. `memory_bytes`: `keys_values` on their way.
        `seconds`: `heads`, the all-to-alls, and `ring`, transfers that attention does not hide.
    """
    hp, cp, w, rings = grid.heads, grid.context, grid.window, grid.windows
    width = load.head_size * load.element_bytes
    local_tokens = load.tokens / (hp * cp)
    keys = np.maximum(load.kv_heads, hp)
    rounds = {"none": (1, 1, 2), "selective": (1, 2, 3), "block": (2, 2, 3)}[load.recompute]
    forwards, inward, exchanges = rounds
    queries = local_tokens * load.heads * width
    triples = local_tokens * (load.heads + 2 * keys) * width
    # Forward q, k, v in and out back; backward the same; what is computed again goes in again, and its result back.
    row, near, far = grid.strides
    block = 2 * local_tokens * keys * width
    wide = np.maximum(4, load.element_bytes)
    wider = wide / load.element_bytes

    def switched(size: Number) -> Number:
        return carried(ACTIVATIONS)("all_to_all", size, hp, row, load.element_bytes)

    def passed_on(ranks: Number, stride: Number) -> Number:
        """Bytes of a block and of its gradients, from one rank of a ring to the next."""
        ring = carried(KEYS_VALUES)
        values = ring("ring", block, ranks, stride, load.element_bytes)
        return (forwards + 1) * values + ring("ring", block * wider, ranks, stride, wide)

    whole = (inward + 1) * switched(triples) + exchanges * switched(queries)
    moved = rings * (w - 1) * passed_on(w, near) + (rings - 1) * passed_on(rings, far)
    sent = {KEYS_VALUES: load.layers * moved, ACTIVATIONS: load.layers * whole}
    memory_bytes = {KEYS_VALUES: np.where(cp > 1, block * (3 + 3 * wider), 0.0)}
    if wire is None:
        return Cost(sent=sent, memory_bytes=memory_bytes)

    def hidden(work: Number, size: Number) -> Number:
        """Seconds of one pass that attention does not hide."""
        step = work / cp
        within = np.where(w > 1, wire("ring", size, w, near, KEYS_VALUES), 0.0)
        between = np.where(rings > 1, wire("ring", size, rings, far, KEYS_VALUES), 0.0)
        busy = (w - 1) * np.maximum(step, within) + step
        return (rings - 1) * np.maximum(busy, between) + busy - work

    switch = wire("all_to_all", triples, hp, row, ACTIVATIONS) * (inward + 1)
    switch = switch + wire("all_to_all", queries, hp, row, ACTIVATIONS) * exchanges
    ring = forwards * hidden(load.seconds, block) + hidden(BACKWARD * load.seconds, block * (1 + wider))
    seconds = {"heads": load.layers * np.where(hp > 1, switch, 0.0), "ring": load.layers * np.maximum(0.0, ring)}
    return Cost(seconds=seconds, memory_bytes=memory_bytes, sent=sent)
