"""Costs of LuWu: what a worker pulls and pushes, what it holds, and how fast a node can serve it. NumPy only.

Traffic of a step on a worker's link, of a layer of S bytes (LuWu, arXiv 2409.00918): S pushed, 2S pulled, whatever the
number of workers and of micro-batches. The last piece of the model computes forward and backward at once, the table
needs no values for its gradient, and the layers before the last piece stay in the window: those are pulled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.recipe.cost import Number

STATE_BYTES = 14
"""Read and written per parameter by a node's step: fp32 parameter, two moments, and 2 bytes for all else."""
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
    def order(self) -> list[tuple[int, tuple[int, ...]]]:
        """Pieces of a step in order, forward and then backward, each with the layers that it needs."""
        last = len(self.uses) - 1
        back = [(piece, () if piece in self.lookups else self.uses[piece]) for piece in range(last - 1, -1, -1)]
        return [*enumerate(self.uses), *back]

    def staying(self, window: int) -> list[tuple[int, ...]]:
        """Of each turn of `order` the layers that stay until they are needed again: the last of forward are the first
        of backward, as far as a window of so many layers has room (`train.layer_window`)."""
        turns = self.order
        size = max(window, *(len(used) for _, used in turns))
        ahead = [layer for _, used in turns for layer in used]
        busy = list[int]()
        staying: list[tuple[int, ...]] = []
        for _, used in turns:
            for layer in used:
                if layer not in busy:
                    ahead.remove(layer)
                    busy.append(layer)
            stay = []
            for layer in used:
                others = [other for other in busy if other != layer]
                before = ahead[: ahead.index(layer)] if layer in ahead else []
                if layer in ahead and len({*before} - {*others}) + len(others) < size:
                    ahead.remove(layer)
                    stay.append(layer)
                else:
                    busy = others
                while ahead and ahead[0] not in busy and len(busy) < size:
                    busy.append(ahead.pop(0))
            staying.append(tuple(stay))
        return staying

    def pulls(self, window: int) -> Any:
        """How often each layer is pulled in a step: [layers]."""
        pulls = np.zeros(len(self.numel), dtype=np.int64)
        for (_, used), stay in zip(self.order, self.staying(window), strict=True):
            pulls[list(used)] += 1
            pulls[list(stay)] -= 1
        return pulls


@dataclass(frozen=True)
class Rates:
    """What a node's parts sustain: `link` bytes/s each way, `disk` bytes/s read and written, `adam` parameters/s; and
    `push`: bytes/s of what a worker pushes, where that differs from what it pulls (0: as `link`)."""

    link: float
    disk: float
    adam: float
    push: float = 0.0


@dataclass(frozen=True)
class Route:
    """Way of gradients to optimizer nodes, and of parameters back.

    Attributes:
        workers, per_machine: of the run, and of each machine.
        place: where aggregators are: on the `machine` of several workers, on a `host` of their own, or beside the
            optimizer `node`; empty: there are none.
        aggregators: how many, each for as many workers.
    """

    workers: int
    per_machine: int = 1
    place: str = ""
    aggregators: int = 0

    def links(self, pulled: float, pushed: float, summed: float) -> dict[str, tuple[float, float]]:
        """Payload bytes of a step on a link, in the direction of parameters and in that of gradients: of a `worker`'s
        machine, of an `aggregator` on a host of its own, and of all optimizer nodes together (`node`).

        Args:
            pulled, pushed: by a worker in a step; summed: by an aggregator in place of what its workers pushed.
        """
        machine, all_workers = ((count * pulled, count * pushed) for count in (self.per_machine, self.workers))
        if self.place not in ("machine", "host"):
            return {"worker": machine, "node": all_workers}
        links = {"worker": machine, "node": (self.aggregators * pulled, self.aggregators * summed)}
        if self.place == "machine":
            return {**links, "worker": (pulled, summed)}
        each = -(-self.workers // self.aggregators)
        return {**links, "aggregator": (each * pulled + summed, each * pushed + pulled)}


def window_bytes(layers: Layers, window: int) -> int:
    """The most bytes of parameters and gradients that a worker holds: `window` layers, and a gradient that is computed
    while two are sent."""
    sizes = sorted((4 * numel for numel in layers.numel), reverse=True)
    return sum(sizes[:window]) + sum(sizes[:3])


def seconds(layers: Layers, compute: Number, rates: Rates, wire: Sequence[float], readers: int = 1) -> Number:
    """Of a step, from its first pull until the node has moved all layers: only then the next step's pulls are answered.

    Pulls, computing and pushes each do one layer after the other, as soon as there is room in the window and the one
    before them has done that layer; a layer that did not stay is pulled again after its forward pass. The node moves
    all layers after the last push: clipping needs the norm of all gradients. (Steps that it takes ahead, where the norm
    did not exceed the limit, are shorter by that.) Of the computing of a piece a quarter is its forward pass.

    Args:
        compute: seconds of forward and backward (recomputation among them) on the slowest worker.
        rates: `link` is that of a worker's own link, while the node's is `readers` times as fast.
        wire: bytes of a value that is pulled, and of one that is pushed.
        readers: workers, or aggregators, for each of which the node reads its disk.
    """
    sizes = np.asarray(layers.numel, dtype=float)
    last = len(layers.uses) - 1
    node = min(rates.disk / STATE_BYTES, rates.adam)
    down = min(rates.link, rates.disk / readers)
    work = np.array([sum(sizes[[*used]]) * (piece not in layers.lookups) for piece, used in enumerate(layers.uses)])
    each = work * np.where(np.arange(last + 1) == last, 0.75, 1.0)
    share = each / max(each.sum(), 1.0)
    pulled = computed = pushed = 0.0 * compute
    released = [pulled] * WINDOW
    sent = [pushed] * PUSHES
    left = [pulled] * len(sizes)
    loaded: tuple[int, ...] = ()
    pulls = 0
    for turn, ((piece, used), stay) in enumerate(zip(layers.order, layers.staying(WINDOW), strict=True)):
        for layer in used:
            if layer not in loaded:
                began = np.maximum(np.maximum(pulled, released[pulls]), left[layer])
                pulled = began + wire[0] * sizes[layer] / down
                pulls += 1
        part = 1.0 if piece == last else 0.25 if turn < last else 0.75
        computed = np.maximum(computed, pulled) + compute * share[piece] * part
        loaded = (*(layer for layer in loaded if layer not in used), *stay)
        for layer in used:
            left[layer] = computed
            released += [computed] * (layer not in stay)
        for layer in layers.uses[piece] if turn >= last else ():
            if all(layer not in earlier for earlier in layers.uses[:piece]):
                computed = np.maximum(computed, sent[-PUSHES])
                pushed = np.maximum(pushed, computed) + wire[1] * sizes[layer] / (rates.push or rates.link)
                sent.append(pushed)
    return pushed + sizes.sum() / node
