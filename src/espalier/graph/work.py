"""What a graph network's step asks of a device: dense products by layer, and bytes moved along edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.cost import Number, Product, Work
from espalier.graph.gnn import Attention, Isomorphism, Layer, Mean, Network

_BYTES = {"fp32": 4, "bf16": 4, "fp64": 8}
"""Of a value that is aggregated: autocast leaves aggregation in fp32."""


@dataclass(frozen=True)
class Reach:
    """What one layer passes over: rows it reads and writes, and edges; per sample where `each`, else in all."""

    sources: Number
    targets: Number
    edges: Number


def work(network: Network, reach: Sequence[Reach], micro_batch: Any, precision: str, each: bool) -> Work:
    """The work of a micro-batch of `micro_batch` targets (arrays allowed).

    Args:
        reach: of each layer of the network, the farthest from the targets first.
        each: `reach` is per target (sampled); False: the graph is passed over whole, whatever the micro-batch.
    """
    size = _BYTES[precision]
    times = micro_batch if each else micro_batch * 0 + 1.0
    products: list[Product] = []
    moved: Number = 0.0
    kept: Number = 0.0
    layers = [layer for layer in network.layers if isinstance(layer, Layer)]
    for at, (layer, one) in enumerate(zip(layers, reach, strict=True)):
        sources, targets, edges = one.sources * times, one.targets * times, one.edges * times
        if at == 0 and not each and network.aggregates_once:
            edges = edges * 0
        first = layer.inputs <= layer.outputs and not isinstance(layer, Attention)
        rows = targets if first else sources
        narrow = layer.inputs if first else layer.outputs
        products.append(Product(rows, layer.inputs, layer.outputs))
        if isinstance(layer, Mean | Isomorphism):
            products.append(Product(targets, layer.inputs, layer.outputs))
        if isinstance(layer, Isomorphism):
            products.append(Product(targets, layer.outputs, layer.outputs))
        moved = moved + size * (edges * narrow + targets * (2 * narrow + 4 * layer.outputs)) + 4 * edges
        kept = kept + size * (sources * layer.inputs + targets * (narrow + 3 * layer.outputs))
    return Work(
        products=tuple(products),
        attention=0.0,
        moved=moved,
        kept=kept,
        transient=0.0,
        again=0.0,
        samples=micro_batch,
        tokens=micro_batch,
    )
