"""What sharing the matrices of a decoder costs: bytes sent and seconds, of many settings in one call. NumPy; no torch.

Transfers of a layer as in Buff (arXiv 2401.09149, section on communication cost), with one difference: recomputation
stops where nothing is needed any more, so that of a layer's four exchanges it repeats three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.recipe.cost import Carried, Cost, Number, ring_bytes, uncoded

ACTIVATIONS = "activations"
CONTROL = "control"
GRADIENTS = "gradients"
Wire = Callable[[str, Number, Number, Number, str], Number]
"""(operation, bytes of the whole tensor, ranks, their distance, class of traffic) -> seconds."""


@dataclass(frozen=True)
class TensorLoad:
    """One micro-batch of a decoder whose matrices are shared, on one rank. Arrays allowed.

    Attributes:
        tokens: of the micro-batch, on the ranks that share matrices.
        width: of the residual stream; compute, whole: bytes of a value in products, and in the stream and the loss.
        layers: on this rank; ends: 1 where it has embedding, head and loss too, 0 where it has neither.
        ranks, stride: that share each matrix, and how far they are apart.
        again: recomputation repeats the layers' forward pass.
        regather: only shards are kept for backward (FSP); sharded: the stream is, between matrices.
    """

    tokens: Number
    width: int
    compute: int
    whole: int
    layers: Number
    ranks: Number
    ends: Number = 1
    stride: Number = 1
    again: Number = 0
    regather: Any = False
    sharded: Any = True


class Transfers(NamedTuple):
    """All-gathers, reduce-scatters and all-reduces of one tensor."""

    gathers: Number
    scatters: Number
    reductions: Number


def of_layer(again: Number, regather: Any, sharded: Any = True, repeated: int = 3) -> Transfers:
    """What one layer exchanges of its stream in a micro-batch. `repeated`: exchanges that recomputation repeats (4 in
    systems that compute to the layer's end)."""
    if not np.all(sharded):
        return Transfers(0.0 * again, 0.0 * again, 4 + (repeated - 2) * again)
    return Transfers(4 + 2 * again + 2 * regather, 4 + (repeated - 2) * again, 0.0 * again)


def cost(load: TensorLoad, wire: Wire | None = None, carried: Carried = uncoded) -> Cost:
    """Bytes that leave a rank in forward and backward, and their seconds on a wire, none of them hidden."""
    product, stream = (load.tokens * load.width * each for each in (load.compute, load.whole))
    layer = of_layer(load.again, load.regather, load.sharded)
    parts: list[tuple[str, Number, Number, int]] = [
        ("all_gather", product, load.layers * layer.gathers, load.compute),
        ("reduce_scatter", product, load.layers * layer.scatters, load.compute),
        ("all_reduce", product, load.layers * layer.reductions, load.compute),
        ("reduce_scatter", stream, load.ends, load.whole),  # the embedding
        ("all_gather", stream, load.ends, load.whole),
        ("all_gather", product, load.ends * (1 + load.regather), load.compute),  # the head
        ("reduce_scatter", product, load.ends, load.compute),
    ]
    # The largest logit; the sum of exponentials and the target's logit.
    losses = [(multiple * load.tokens * load.whole, load.ends) for multiple in (1, 2)]
    sent = {
        ACTIVATIONS: sum(
            times * carried(operation, size, load.ranks, load.stride, width) for operation, size, times, width in parts
        ),
        CONTROL: sum(times * ring_bytes("all_reduce", size, load.ranks) for size, times in losses),
    }
    if wire is None:
        return Cost(sent=sent)
    ranks = load.ranks, load.stride
    taken = sum(times * wire(operation, size, *ranks, ACTIVATIONS) for operation, size, times, _ in parts)
    taken = taken + sum(times * wire("all_reduce", size, *ranks, CONTROL) for size, times in losses)
    return Cost(seconds={"tensor": taken}, sent=sent)
