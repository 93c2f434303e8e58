"""Costs of LuWu: what a worker pulls and pushes, what it holds, and how fast a node can serve it. NumPy only.

Traffic of a step on a worker's link, of a layer of S bytes (LuWu, arXiv 2409.00918): S pushed, 2S pulled, whatever the
number of workers and of micro-batches. The last piece of the model computes forward and backward at once, and the table
needs no values for its gradient: those two are pulled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.cost import Cost, Number

STATE_BYTES = 14
"""Read and written per parameter by a node's step: fp32 parameter, two moments, and the bf16 copy that is pulled."""
OPERATIONS = 17
"""Of Adam, per parameter."""
WINDOW = 3
"""Layers that a worker holds at once: one computed, one pulled, one pushed."""
PUSHES = 2
"""Gradients of a worker on their way at once: one is sent while the next is computed."""


@dataclass(frozen=True)
class Layers:
    """The layers of a model as nodes hold them.

    Attributes:
        numel: numbers of each.
        uses: of each piece of the model, the layers that it uses.
        lookups: pieces whose backward needs no parameters (tables).
    """

    numel: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    lookups: frozenset[int] = frozenset({0})

    @property
    def pulls(self) -> Any:
        """How often each layer is pulled in a step: [layers]."""
        found = np.zeros(len(self.numel), dtype=np.int64)
        last = len(self.uses) - 1
        for piece, own in enumerate(self.uses):
            found[list(own)] += 1 if piece == last or piece in self.lookups else 2
        return found


@dataclass(frozen=True)
class Rates:
    """What a node's parts sustain: `link` bytes/s each way, `disk` bytes/s read and written, `adam` parameters/s."""

    link: float
    disk: float
    adam: float

    @property
    def parameters(self) -> Any:
        """Parameters/s that a node keeps up with in backward, by gradients of two bytes: the least of the three."""
        return np.minimum(np.minimum(self.link / 2, self.disk / STATE_BYTES), self.adam)


def pulled_bytes(layers: Layers, value_bytes: float = 4) -> Any:
    """That a worker receives in a step."""
    return float((np.asarray(layers.numel) * layers.pulls).sum()) * value_bytes


def pushed_bytes(layers: Layers, value_bytes: float = 4) -> Any:
    """That a worker sends in a step, whatever the number of micro-batches."""
    return float(sum(layers.numel)) * value_bytes


def sharded_bytes(layers: Layers, ranks: Any, value_bytes: float = 4) -> Any:
    """That a rank sends, and receives, with fully sharded states instead: two all-gathers and a reduce-scatter."""
    ranks = np.asarray(ranks)
    return 3 * (ranks - 1) / ranks * float(sum(layers.numel)) * value_bytes


def window_bytes(layers: Layers, window: int) -> int:
    """The most bytes of parameters and gradients that a worker holds: `window` layers, and a gradient that is computed
    while two are sent."""
    sizes = sorted((4 * numel for numel in layers.numel), reverse=True)
    return sum(sizes[:window]) + sum(sizes[:3])


def cost(layers: Layers, compute: Number, rates: Rates, workers: int, wire: Sequence[float] = (4, 4)) -> Cost:
    """Of a step beside `compute` seconds of forward and backward (recomputation among them) on the slowest worker.

    `wire`: bytes of a value that is pulled, and of one that is pushed; `rates.link`: of a worker's own link, while the
    node's is `workers` times as fast or has an aggregator before it.
    """
    up = pushed_bytes(layers, wire[1])
    held = {"params": float(window_bytes(layers, WINDOW))}
    exposed = {"pull and push": seconds(layers, compute, rates, wire) - compute}
    return Cost(seconds=exposed, held=held, sent={"gradients": up})


def seconds(layers: Layers, compute: Number, rates: Rates, wire: Sequence[float]) -> Number:
    """Of a step, from its first pull until the node has moved all layers: only then the next step's pulls are answered.

    Pulls, computing and pushes each do one layer after the other, as soon as there is room in the window and the one
    before them has done that layer; a layer is pulled again after its forward pass. The node moves all layers after the
    last push: clipping needs the norm of all gradients. (Steps that it takes ahead, where the norm did not exceed the
    limit, are shorter by that.) Of the computing of a piece a quarter is its forward pass.
    """
    sizes, last = np.asarray(layers.numel, dtype=float), len(layers.uses) - 1
    node = min(rates.disk / STATE_BYTES, rates.adam)
    work = np.array([sum(sizes[[*own]]) * (piece not in layers.lookups) for piece, own in enumerate(layers.uses)])
    each = work * np.where(np.arange(last + 1) == last, 0.75, 1.0)
    share = each / max(each.sum(), 1.0)
    pulled = computed = pushed = 0.0 * compute
    released, sent, left = [pulled] * WINDOW, [pushed] * PUSHES, [pulled] * len(sizes)
    for turn, piece in enumerate([*range(last + 1), *range(last - 1, -1, -1)]):
        own = layers.uses[piece] if turn <= last or piece not in layers.lookups else ()
        for layer in own:
            began = np.maximum(np.maximum(pulled, released[-WINDOW]), left[layer])
            pulled = began + wire[0] * sizes[layer] / rates.link
        part = 1.0 if piece == last else 0.25 if turn < last else 0.75
        computed = np.maximum(computed, pulled) + compute * share[piece] * part
        released += [computed] * len(own)
        for layer in own:
            left[layer] = computed
        for layer in layers.uses[piece] if turn >= last else ():
            if all(layer not in earlier for earlier in layers.uses[:piece]):
                computed = np.maximum(computed, sent[-PUSHES])
                pushed = np.maximum(pushed, computed) + wire[1] * sizes[layer] / rates.link
                sent.append(pushed)
    return pushed + sizes.sum() / node
