"""Energy of an inference of a graph network: operations, bytes and joules by part, and what accelerators would take.

Operations are counted from the shapes of the layers and the values that are not 0; bytes are those of the rows, the
edges and the matrices as they are stored, each read or written once a layer. Both are models, not measurements.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from espalier.graph.networks.gnn import Gnn, GraphAttention, Isomorphism, Layer, Mean
from espalier.graph.parts import part_inference
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.tasks.node_classification import NodeTask
from espalier.graph.workload import GraphWorkload
from espalier.kernels.counts import Counts, integer_sums, low_bit
from espalier.mechanisms.few_bits import quantization
from espalier.mechanisms.few_bits.options import Quant
from espalier.mechanisms.few_bits.packed_run import packed_input
from espalier.parallel.workload import Workload
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size
from espalier.train.workload_row import EnergyTables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from espalier.graph.data.graph import Graph
    from espalier.graph.networks.base import MessageBlock, Rows
    from espalier_accelerators.simulator import LayerShape, Network, Result

INDEX = 4
"""Bytes of an edge's source."""
SUM = 16
"""Bits of sums of messages that are integers."""


class RowStats(NamedTuple):
    """Of the rows that a layer reads: values of each that are not 0, their bits, and bytes of all as stored; of the
    rows inside GIN's perceptron, which stay fp32, the values that are not 0; of the sums that a layer multiplies which
    sums its rows first (GIN's with a node's own row), too."""

    nonzeros: np.ndarray
    bits: np.ndarray
    size: float
    hidden: np.ndarray | None = None
    sums: np.ndarray | None = None


def row_stats(workload: GraphWorkload, model: Gnn) -> list[RowStats]:
    """Of each layer, from an inference of all nodes. Raises UserError: another task, or features on disk."""
    if not isinstance(workload.task, NodeTask) or workload.recipe.store is not None:
        raise UserError(
            "The energy of this run is not counted.",
            why="it is of networks that predict nodes of a graph in memory",
            do='a recipe with graph.task = "node" and no [store]',
        )
    quantizers = quantization.quantization_of(model)
    read: list[list[torch.Tensor]] = []
    inside: list[list[np.ndarray]] = []
    with ExitStack() as stack:
        stored = {} if quantizers is None else stack.enter_context(quantization.packing(quantizers))
        layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        for layer in layers:
            read.append([])
            hook = layer.register_forward_pre_hook(partial(_read, read[-1]), prepend=True)
            stack.callback(hook.remove)
            if isinstance(layer, Isomorphism):
                inside.append([])
                hook = layer.second.register_forward_pre_hook(partial(_read_inside, inside[-1]))
                stack.callback(hook.remove)
        sums = [stack.enter_context(_aggregated(layer)) for layer in layers]
        infer(model, workload.task.view)
    rows = []
    for at, (layer, values) in enumerate(zip(layers, map(torch.cat, read), strict=True)):
        summed = None
        if sums[at]:
            self_rows = values if isinstance(layer, Isomorphism) else torch.zeros(())
            summed = ((torch.cat(sums[at]) != 0) | (self_rows != 0)).sum(1).numpy()
        hidden = np.concatenate(inside[at]) if inside else None
        packed = stored.get(f"layers.{at}.rows")
        binary = quantizers is not None and at == 0
        nonzeros = _nonzeros(values)
        if packed is not None:
            assert packed.rows == len(values) == workload.graph.nodes
            codes, widths, _ = packed.decoded()
            nonzeros = _nonzeros(codes)
            bits = widths.numpy().astype(np.int64)
            size = packed.nbytes
        elif binary:
            bits = np.full(len(values), 1)
            size = packed_input(values.numpy())[0].nbytes + 4 * len(values)
        else:
            bits = np.full(len(values), 32)
            size = values.nbytes
        rows.append(RowStats(nonzeros, bits, float(size), hidden, summed))
    return rows


def _read(read: list[torch.Tensor], layer: nn.Module, inputs: tuple[MessageBlock, Rows]) -> None:
    """The rows of the targets: all of them, where a layer is passed in pieces."""
    read.append(quantization.dense_rows(inputs[1])[: inputs[0].targets])


def _read_inside(inside: list[np.ndarray], layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    inside.append(_nonzeros(inputs[0]))


def _nonzeros(rows: torch.Tensor) -> np.ndarray:
    """int64 [rows]"""
    return (rows != 0).sum(1).numpy()


@contextmanager
def _aggregated(layer: Layer) -> Iterator[list[torch.Tensor]]:
    """What the layer's aggregation gives within, where it sums its rows first."""
    sums: list[torch.Tensor] = []
    plain = layer.aggregate
    first = layer.aggregated_first

    def aggregate(block: MessageBlock, rows: Rows, start: torch.Tensor | None = None) -> torch.Tensor:
        made = plain(block, rows, start)
        if first(rows):
            sums.append(quantization.dense_rows(made))
        return made

    layer.aggregate = aggregate
    try:
        yield sums
    finally:
        layer.aggregate = plain


def parts(workload: GraphWorkload, model: nn.Module) -> dict[str, Counts]:
    """Operations and bytes of an inference of all nodes, by layer and step; UserError for what is not counted."""
    if not isinstance(model, Gnn):
        raise UserError(
            "The energy of this network is not counted.",
            why="operations are counted in layers that pass messages and come with the package",
            do="espalier.kernels.counts.Counter(model) around a call",
        )
    options = workload.recipe.options(Quant)
    graph = workload.graph
    counted: dict[str, Counts] = {}
    for at, (layer, rows) in enumerate(zip(model.layers, row_stats(workload, model), strict=True)):
        assert isinstance(layer, Layer)
        product, aggregation = _layer(layer, rows, options, graph)
        counted[f"layers.{at} product"] = product
        counted[f"layers.{at} aggregation"] = aggregation
    return counted


def _layer(layer: Layer, rows: RowStats, options: Quant | None, graph: Graph) -> tuple[Counts, Counts]:
    """Of its product and of its aggregation. A layer that sums first multiplies the sums (GraphSAGE own rows too)."""
    width = layer.heads * layer.columns if isinstance(layer, GraphAttention) else layer.outputs
    weight = options.weights if options is not None and options.weights else 32
    matrix = sum(p.numel() for p in layer.parameters() if p.ndim == 2) * weight / 8
    edges = graph.edges + (graph.nodes if layer.loops else 0)
    scores = 2.0 * graph.nodes * width if isinstance(layer, GraphAttention) else 0.0
    hidden = 0.0 if rows.hidden is None else float(rows.hidden.sum()) * layer.outputs
    summed = 0.0 if rows.sums is None else float(rows.sums.sum()) * width
    direct = float(rows.nonzeros.sum()) * width * ((rows.sums is None) + isinstance(layer, Mean))
    bits = 32 if options is None or not options.aggregates else options.aggregates
    if options is None:
        product = Counts(macs=direct + summed + hidden + scores)
    else:
        mean = float(rows.nonzeros @ np.maximum(rows.bits, 1)) / max(1.0, float(rows.nonzeros.sum()))
        product = low_bit(direct, mean, weight) + low_bit(summed, bits, weight) + low_bit(hidden, 32, weight)
        product += Counts(macs=scores)
    results = 4.0 * graph.nodes * layer.outputs
    if rows.sums is not None:
        between = graph.nodes * layer.inputs * bits / 8
        again = rows.size if isinstance(layer, Mean) else 0.0
        product += Counts(bytes_moved=between + again + matrix + results)
        return product, Counts(acs=float(edges) * layer.inputs, bytes_moved=rows.size + INDEX * edges + between)
    messages = message_bits(rows, options)
    sums = float(edges) * width
    arithmetic = Counts(acs=sums) if messages == 32 else integer_sums(sums, SUM)
    between = graph.nodes * width * messages / 8
    aggregation = arithmetic + Counts(bytes_moved=2 * between + INDEX * edges + results)
    return product + Counts(bytes_moved=rows.size + matrix), aggregation


def message_bits(rows: RowStats, options: Quant | None) -> int:
    """Of rows between product and sum; 32: fp32, as where a layer sums first."""
    return 32 if options is None or not options.messages or rows.sums is not None else options.messages


def network(workload: GraphWorkload, model: Gnn) -> Network:
    """The trained network for `espalier_accelerators.simulator`, with the widths and the packages that it has: GCN's
    edges of a node to itself, both matrices of GraphSAGE; GIN's perceptron as two layers, the first with
    (1 + epsilon) x as an edge. Raises UserError: GAT."""
    from espalier.sparse.partition import clusters
    from espalier_accelerators.simulator import LayerShape, Network

    options = workload.recipe.options(Quant)
    graph = workload.graph
    if any(isinstance(layer, GraphAttention) for layer in model.layers):
        raise UserError(
            "Accelerators are not simulated for GAT.",
            why="the five dataflows have no form for a softmax over a node's edges",
            do='model.kind = "gcn", "sage" or "gin"; operations and bytes are counted for GAT too',
        )
    layers: list[LayerShape] = []
    for layer, rows in zip(model.layers, row_stats(workload, model), strict=True):
        assert isinstance(layer, Layer)
        bits = message_bits(rows, options)
        adds_own = isinstance(layer, Mean)
        layers.append(LayerShape(layer.inputs, layer.outputs, rows.nonzeros, rows.bits, bits, rows.size, adds_own))
        if rows.hidden is not None:
            inner = layer.outputs
            full = np.full(graph.nodes, 32)
            size = 4.0 * graph.nodes * inner
            layers.append(LayerShape(inner, inner, rows.hidden, full, bits, size, aggregates=False))
    indptr = np.asarray(graph.indptr)
    indices = np.asarray(graph.indices)
    if any(isinstance(layer, Isomorphism) or layer.loops for layer in model.layers):
        indices = np.insert(indices, indptr[1:], np.arange(graph.nodes))
        indptr = indptr + np.arange(graph.nodes + 1)

    @cache
    def cut(count: int) -> Any:
        return clusters(graph.indptr, graph.indices, min(count, graph.nodes), volume=False)

    return Network(indptr, indices, cut, layers)


def accelerators(workload: GraphWorkload, model: Gnn) -> list[Result]:
    """What an inference of all nodes takes on MEGA, SGCN, GROW, GCNAX and HyGCN, simulated. Raises UserError as
    `network`, and where the distribution with the simulator is not installed."""
    try:
        from espalier_accelerators import simulator
    except ImportError:
        raise UserError(
            "Accelerators are not simulated.",
            why="the distribution espalier-accelerators is not installed",
            do="pip install ./accelerators, from the root of Espalier's repository",
        ) from None
    trained = network(workload, model)
    return [simulator.simulate(name, trained) for name in simulator.DATAFLOWS]


def tables(workload: Workload, model: nn.Module) -> EnergyTables:
    """See `CountsEnergy.energy`."""
    assert isinstance(workload, GraphWorkload)
    if workload.graph.partition is not None:
        workload = GraphWorkload(workload.recipe, part_inference.whole_graph(workload.graph), workload.folder)
    counted = parts(workload, model)
    assert isinstance(model, Gnn)
    what = f"an inference of all {workload.graph.nodes:,} nodes"
    try:
        results = accelerators(workload, model)
    except UserError as error:
        return EnergyTables(what, counted, [(error.what, ("why", "what to do"), [(error.why, error.do)])])
    best = results[0]
    rows = [
        (result.name, f"{result.cycles:,.0f}", show_size(result.bytes),
         f"{result.row_hits:.0%}", f"{1e6 * result.joules:.3g} µJ",
         f"{result.cycles / best.cycles:.2f}", f"{result.bytes / best.bytes:.2f}", f"{result.joules / best.joules:.2f}")
        for result in results
    ]  # fmt: skip
    columns = ("accelerator", "cycles", "DRAM", "row hits", "energy", "x cycles", "x DRAM", "x energy")
    title = "Simulated on the trained network; the others in fp32 (espalier_accelerators.simulator)"
    return EnergyTables(what, counted, [(title, columns, rows)])
