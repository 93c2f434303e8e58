"""Energy of an inference of a graph network: operations, bytes and joules by part, and what accelerators would take.

Operations are counted from the shapes of the layers and the values that are not 0; bytes are those of the rows, the
edges and the matrices as they are stored, each read or written once a layer. Both are models, not measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from espalier.errors import UserError
from espalier.graph import quantization
from espalier.graph.gnn import Gnn, GraphAttention, Isomorphism, Layer, Mean
from espalier.graph.node_classification import NodeTask
from espalier.graph.packed_run import packed_input
from espalier.graph.subgraphs import infer
from espalier.kernels.counts import Counts, low_bit

if TYPE_CHECKING:
    from espalier.graph.workload import GraphWorkload
    from espalier.quant.mega.simulator import LayerShape, Network, Result

INDEX = 4
"""Bytes of an edge's source."""


class RowStats(NamedTuple):
    """Of the rows that a layer reads: values of each that are not 0, their bits, and bytes of all as stored; of the
    rows inside GIN's perceptron, which stay fp32, the values that are not 0."""

    nonzeros: np.ndarray
    bits: np.ndarray
    size: float
    hidden: np.ndarray | None = None


def row_stats(workload: GraphWorkload, model: Gnn) -> list[RowStats]:
    """Of each layer, from an inference of all nodes. Raises UserError: another task, or features on disk."""
    if not isinstance(workload.task, NodeTask) or workload.stored is not None:
        raise UserError(
            "The energy of this run is not counted.",
            why="it is of networks that predict nodes of a graph in memory",
            do='a recipe with graph.task = "node" and no [store]',
        )
    found = quantization.quantization_of(model)
    read: list[torch.Tensor] = []
    inside: list[np.ndarray] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, inputs: read.append(quantization.dense_rows(inputs[1])), prepend=True
        )
        for layer in model.layers
    ]
    hooks += [
        layer.second.register_forward_pre_hook(lambda module, inputs: inside.append((inputs[0] != 0).sum(1).numpy()))
        for layer in model.layers
        if isinstance(layer, Isomorphism)
    ]
    try:
        if found is not None:
            found.packed = True
        infer(model, workload.task.held)
    finally:
        for hook in hooks:
            hook.remove()
    rows = []
    for at, one in enumerate(read):
        hidden = inside[at] if inside else None
        packed = None if found is None else found.stored.get(f"layers.{at}.rows")
        if packed is not None:
            coded = packed.decoded()
            counts = (coded.codes != 0).sum(1).numpy()
            rows.append(RowStats(counts, coded.widths.numpy().astype(np.int64), float(packed.nbytes), hidden))
        else:
            counts = (one != 0).sum(1).numpy()
            binary = found is not None and at == 0
            size = float(packed_input(one.numpy())[0].nbytes + 4 * len(one)) if binary else 4.0 * one.numel()
            rows.append(RowStats(counts, np.full(len(one), 1 if binary else 32), size, hidden))
    return rows


def parts(workload: GraphWorkload, model: nn.Module) -> dict[str, Counts]:
    """Operations and bytes of an inference of all nodes, by layer and step; UserError for what is not counted."""
    if not isinstance(model, Gnn):
        raise UserError(
            "The energy of this network is not counted.",
            why="operations are counted in layers that pass messages and come with the package",
            do="espalier.kernels.counts.Counter(model) around a call",
        )
    found, options = quantization.quantization_of(model), workload.recipe.quant
    nodes, edges = workload.graph.nodes, workload.graph.edges
    counted: dict[str, Counts] = {}
    for at, (layer, rows) in enumerate(zip(model.layers, row_stats(workload, model), strict=True)):
        assert isinstance(layer, Layer)
        width = layer.heads * layer.columns if isinstance(layer, GraphAttention) else layer.outputs
        weight = options.weights if options is not None and options.weights else 32
        matrix = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        macs = float(rows.nonzeros.sum()) * width * (2 if isinstance(layer, Mean) else 1)
        hidden = 0.0 if rows.hidden is None else float(rows.hidden.sum()) * layer.outputs
        scores = 2.0 * nodes * width if isinstance(layer, GraphAttention) else 0.0
        if found is None:
            product = Counts(macs=macs + hidden + scores)
        else:
            mean = float(rows.nonzeros @ np.maximum(rows.bits, 1)) / max(1.0, float(rows.nonzeros.sum()))
            product = low_bit(macs, mean, weight) + low_bit(hidden, 32, weight) + Counts(macs=scores)
        moved = rows.size + matrix * weight / 8
        counted[f"layers.{at} product"] = product + Counts(bytes_moved=moved)
        first = layer.aggregated_first(torch.zeros(0))
        columns, loops = (layer.inputs if first else width), nodes if layer.loops else 0
        bits = options.messages if options is not None and options.messages and not first else 32
        sums = float(edges + loops) * columns
        arithmetic = Counts(acs=sums) if bits == 32 else low_bit(sums, bits, 8)
        moved = nodes * columns * bits / 8 * 2 + INDEX * (edges + loops) + 4.0 * nodes * layer.outputs
        counted[f"layers.{at} aggregation"] = arithmetic + Counts(bytes_moved=moved)
    return counted


def network(workload: GraphWorkload, model: Gnn) -> Network:
    """The trained network for `quant.mega.simulator`, with the widths and the packages that it has: GCN's edges of a
    node to itself, both matrices of GraphSAGE; GIN's perceptron as two layers, the first with (1 + epsilon) x as an
    edge. Raises UserError: GAT."""
    from espalier.quant.mega.simulator import LayerShape, Network
    from espalier.sparse.partition import clusters

    options, graph = workload.recipe.quant, workload.graph
    if any(isinstance(layer, GraphAttention) for layer in model.layers):
        raise UserError(
            "Accelerators are not simulated for GAT.",
            why="the five dataflows have no form for a softmax over a node's edges",
            do='model.kind = "gcn", "sage" or "gin"; operations and bytes are counted for GAT too',
        )
    layers: list[LayerShape] = []
    for layer, rows in zip(model.layers, row_stats(workload, model), strict=True):
        assert isinstance(layer, Layer)
        bits, own = options.messages if options is not None and options.messages else 32, isinstance(layer, Mean)
        layers.append(LayerShape(layer.inputs, layer.outputs, rows.nonzeros, rows.bits, bits, rows.size, own))
        if rows.hidden is not None:
            inner, full = layer.outputs, np.full(graph.nodes, 32)
            size = 4.0 * graph.nodes * inner
            layers.append(LayerShape(inner, inner, rows.hidden, full, bits, size, aggregates=False))
    indptr, indices = np.asarray(graph.indptr), np.asarray(graph.indices)
    if any(isinstance(layer, Isomorphism) or layer.loops for layer in model.layers):
        indices = np.insert(indices, indptr[1:], np.arange(graph.nodes))
        indptr = indptr + np.arange(graph.nodes + 1)
    known: dict[int, Any] = {}

    def cut(count: int) -> Any:
        if count not in known:
            known[count] = clusters(graph.indptr, graph.indices, min(count, graph.nodes), volume=False)
        return known[count]

    return Network(indptr, indices, cut, layers)


def accelerators(workload: GraphWorkload, model: Gnn) -> list[Result]:
    """What an inference of all nodes takes on MEGA, SGCN, GROW, GCNAX and HyGCN, simulated."""
    from espalier.quant.mega import simulator

    found = network(workload, model)
    return [simulator.simulate(name, found) for name in simulator.DATAFLOWS]
