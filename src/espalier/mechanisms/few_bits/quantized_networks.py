"""Quantizers put into a network: round the layers of `gnn` (`quantization`), into graph transformers, and into networks
of anybody's code.

Features are rounded where they enter. Of a transformer, rows are rounded where attention reads them (of nodes: virtual
tokens stay as they are), queries, keys and values by column (`quant.messages`), what attention gives by column too
(`quant.aggregates`). Of a network that is not ours, rows are rounded where a layer with a method `propagate` reads
them, before they cross between ranks; what such a layer does with them is not known. The matrices of both are rounded
by output.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.graph.networks import compiled_aggregate, foreign_network
from espalier.graph.networks.gnn import Gnn
from espalier.graph.networks.network import QUANTIZED, GraphNetwork
from espalier.graph.parts import partition_folder
from espalier.graph.sampling.neighbor_sampler import Style, whole
from espalier.graph.sampling.subgraphs import MESSAGES
from espalier.mechanisms.few_bits import a2q, quantization
from espalier.mechanisms.few_bits.a2q import ColumnQuantizer, FeatureQuantizer
from espalier.mechanisms.few_bits.bit_allocator import MemoryTarget
from espalier.mechanisms.few_bits.options import Quant
from espalier.mechanisms.few_bits.quantization import Quantization
from espalier.mechanisms.few_bits.quantized_graph import QuantizedGraph
from espalier.recipe import units
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from espalier.graph.sampling.subgraphs import SubgraphBatch

NARROWED = 0.5
"""Share of the steps over which widths come down to the target; see docs/measured/few-bits.md."""


def equip(model: nn.Module, options: Quant, graph: QuantizedGraph) -> Quantization:
    """Puts quantizers into `model`, whose `quantization` is what is returned. Raises UserError: a target that is too
    small, a network that does not run on a few nodes."""
    quantizers = Quantization(options, graph)
    if isinstance(model, Gnn):
        quantization.equip_layers(model, quantizers)
    else:
        _equip_other(model, quantizers)
    layers = [feature.layer for feature in quantizers.features]
    asked = None if options.target is None else max(1, units.size(options.target, "quant.target"))
    quantizers.target = MemoryTarget(layers, asked, checked=graph.trained is None)
    for feature in quantizers.features:
        feature.shift = quantizers.target.shift
        feature.narrowing = NARROWED * graph.steps
    vars(model)[QUANTIZED] = quantizers
    return quantizers


def built(model: nn.Module, options: Quant, graph: QuantizedGraph, batch: SubgraphBatch | None) -> None:
    """`model` with kernels, quantizers round them, and steps that fit what the untrained network makes of `batch`;
    None: they begin where the parts of the graph are. Computes in one thread, since ranks may be forked later."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quantizers = equip(compiled_aggregate.equip(model), options, graph)
        if batch is None or graph.trained is not None:  # a trained network has its steps
            return
        if batch.blocks[0].edges * quantizers.widest <= quantization.MOST_PROBED:
            quantization.begin(model, batch.features, batch.blocks)
    finally:
        torch.set_num_threads(threads)


def _equip_other(model: nn.Module, quantizers: Quantization) -> None:
    if (signed := quantizers.graph.input_signed) is not None:
        quantizers.entry = quantizers.add(model, 0, quantizers.graph.graph.features.shape[1], signed, "entry")
    if isinstance(model, GraphNetwork):
        _in_attention(model, quantizers)
    else:
        _at_messages(model, quantizers)
    if quantizers.options.weights:
        a2q.quantize_weights(model, quantizers.options.weights)


# --- graph transformers ----------------------------------------------------------------------------------------------


def _in_attention(model: Any, quantizers: Quantization) -> None:
    options = quantizers.options
    for at, layer in enumerate(model.layers, 1):
        inner: Any = layer
        quantizer = quantizers.add(inner, at, inner.qkv.in_features, signed=True)
        inner.qkv.register_forward_pre_hook(partial(_read, quantizers, quantizer))
        if options.messages:
            inner.messages = _column(quantizers, inner.qkv.out_features, options.messages)
            inner.qkv.register_forward_hook(partial(_by_column, quantizers, inner.messages))
        if options.aggregates:
            inner.sums = _column(quantizers, inner.out.in_features, options.aggregates)
            inner.out.register_forward_pre_hook(partial(_by_column, quantizers, inner.sums))


def _column(quantizers: Quantization, columns: int, bits: int) -> ColumnQuantizer:
    made = ColumnQuantizer(columns, bits, local=True)
    quantizers.columns.append(made)
    return made


def _read(quantizers: Quantization, quantizer: FeatureQuantizer, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Rows of nodes, as they are stored; of virtual tokens behind them, as they are."""
    nodes = inputs[0][: quantizers.rows]
    virtual = inputs[0][quantizers.rows :]
    values = quantizers.rounded(quantizer, nodes, quantizers.now)
    return torch.cat([values, virtual]) if len(virtual) else values


def _by_column(
    quantizers: Quantization,
    quantizer: ColumnQuantizer,
    module: nn.Module,
    inputs: tuple[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """What a layer reads, or, after it, what it makes. All virtual tokens, behind the nodes, teach."""
    rows = inputs[0] if out is None else out
    shown = quantizers.now.shown
    if shown is not None:
        shown = torch.cat([shown, shown.new_ones(max(0, len(rows) - len(shown)))])[: len(rows)]
    return quantizer(rows, shown=shown)


# --- networks of anybody's code --------------------------------------------------------------------------------------


def _at_messages(model: nn.Module, quantizers: Quantization) -> None:
    graph = quantizers.graph.graph
    if graph.partition is None:
        columns = graph.features.shape[1]
        block = whole(graph, Style(loops=False, scale="none"))
    else:
        part = partition_folder.any_part(graph.partition.folder)
        columns = part.features.shape[1]
        block = part.block
    widths = foreign_network.row_widths(model, columns, block)
    parts = nn.ModuleList()
    model.add_module("quantizers", parts)
    made = [
        None if width is None else quantizers.add(parts, at, width, signed=True, name=str(at))
        for at, width in enumerate(widths, 1)
    ]
    messages: foreign_network.ForeignMessages = getattr(foreign_network.equip(model), MESSAGES)
    messages.rounded = partial(_crossing, quantizers, made)


def _crossing(quantizers: Quantization, made: list[FeatureQuantizer | None], at: int, rows: Tensor) -> Tensor:
    """The rows that are read for the `at`-th time in a pass, as they are stored."""
    quantizer = made[at] if at < len(made) else None
    if at < len(made) and quantizer is None:  # features, which were rounded when they entered
        return rows
    if quantizer is None or len(rows) != quantizers.rows or rows[0].numel() != quantizer.columns:
        raise UserError(
            f"[quant] is not possible with this network: a layer reads {list(rows.shape)} for "
            f"{quantizers.rows:,} nodes.",
            why=f"on a few nodes its layers read rows {len(made)} times, "
            f"of {', '.join(str(quantizer.columns) for quantizer in made if quantizer is not None)} values",
            do="a network that reads rows of all nodes, of the same widths in every pass, or leave [quant] out",
        )
    return quantizers.rounded(quantizer, rows.flatten(1), quantizers.now).view_as(rows)
