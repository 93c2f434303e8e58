"""The work of a step on a graph, by what each layer passes over; arrays of micro-batches allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from espalier.graph.networks.gnn import Gnn, GraphAttention, Isomorphism, Mean
from espalier.recipe.cost import VALUE_BYTES, Number, Product, Work

ATTENDED = 128
"""What GAT's score, its exponential and its norm take for each edge and head, as bytes that could be moved meanwhile.
Fitted to steps on an AMD EPYC (bench/processors.py)."""
DRAWN = 80e-9
"""Seconds in which a neighbour is drawn and its row copied; the same."""


@dataclass(frozen=True)
class Reach:
    """What one layer passes over: rows it reads and writes, and edges; per sample where `each`, else in all."""

    sources: Number
    targets: Number
    edges: Number


def layer_work(network: Gnn, reach: Sequence[Reach], micro_batch: Any, precision: str, each: bool) -> Work:
    """The work of a micro-batch of `micro_batch` targets (arrays allowed).

    Args:
        reach: of each layer of the network, the farthest from the targets first.
        each: `reach` is per target (sampled); False: the graph is passed over whole, whatever the micro-batch.
    """
    size = max(4, VALUE_BYTES[precision])  # autocast leaves aggregation in fp32
    times = micro_batch if each else micro_batch * 0 + 1.0
    products = []
    moved = 0.0
    back = 0.0
    saved = 0.0
    drawn = 0.0
    for at, (layer, layer_reach) in enumerate(zip(network.layers, reach, strict=True)):
        sources = layer_reach.sources * times
        targets = layer_reach.targets * times
        edges = layer_reach.edges * times
        drawn += edges * each
        if at == 0 and not each and network.aggregates_once and not hasattr(layer, "quantizer"):
            edges = edges * 0
        attends = isinstance(layer, GraphAttention)
        first = layer.inputs <= layer.outputs and not attends
        rows = targets if first else sources
        narrow = layer.heads * layer.columns if isinstance(layer, GraphAttention) else min(layer.inputs, layer.outputs)
        products.append(Product(rows, layer.inputs, layer.outputs, leaf=at == 0))
        if isinstance(layer, Mean | Isomorphism):
            products.append(Product(targets, layer.inputs, layer.outputs, leaf=at == 0))
        if isinstance(layer, Isomorphism):
            products.append(Product(targets, layer.outputs, layer.outputs))
        scores = ATTENDED * layer.heads if isinstance(layer, GraphAttention) else 0
        forward = edges * (size * narrow + scores + 4) + size * targets * (2 * narrow + 2 * layer.outputs)
        moved += forward
        back += (2 if attends else 1) * forward  # a sum's gradient is a sum; of attention scores and rows have one
        saved += size * (sources * layer.inputs + targets * (narrow + 3 * layer.outputs))
        saved += 2 * size * layer.heads * edges if isinstance(layer, GraphAttention) else 0  # scores, shares
    return Work(
        products=tuple(products),
        attention=0.0,
        moved=moved,
        saved=saved,
        transient=0.0,
        again=0.0,
        samples=micro_batch,
        tokens=micro_batch,
        moved_back=back,
        reading=DRAWN * drawn,
    )


def foreign_work(model: nn.Module, reach: Reach, width: int, micro_batch: Any, times: Any) -> Work:
    """Two operations per parameter and node: what a foreign network does inside is not known."""
    rows = reach.sources * times
    parameters = sum(parameter.numel() for parameter in model.parameters())
    moved = 4.0 * width * (reach.edges * times + 2 * rows)
    return Work((Product(rows, parameters, 1),), 0.0, moved, moved, 0.0, 0.0, micro_batch, micro_batch)
