"""Quantized graph networks: what `[quant]` puts round the layers of a network, and what its codes take.

Rows are quantized where a layer reads them (a width and a step by node, degree or layer), weights by output, rows that
were multiplied and are about to be summed by column, sums by column. Where the edges of a layer have no weights, the
scale of a message's source is multiplied in before it is quantized, and that of its target after the sum, so that
sums are those of integers, exactly (as MixQ has it, arXiv 2505.09361).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic, traffic
from espalier.graph.networks.base import Aggregate, Forms, Kept, MessageBlock, MessageBlocks, Rows, dense
from espalier.graph.networks.gnn import Gnn, GraphAttention, Layer
from espalier.graph.networks.network import QUANTIZED
from espalier.graph.parts.coded_rows import Coding, RowSize, row_size
from espalier.graph.parts.halo import Halo
from espalier.graph.sampling.batch_strategy import HeldRows
from espalier.graph.sampling.subgraphs import forward
from espalier.kernels.step_codes import step_codes
from espalier.mechanisms.few_bits import a2q
from espalier.mechanisms.few_bits.a2q import ColumnQuantizer, FeatureQuantizer, Rule
from espalier.mechanisms.few_bits.bit_allocator import (
    MOST,
    STEP_RATE,
    DegreeBits,
    MemoryTarget,
    NodeBits,
    RowIndex,
    Total,
    alone,
    stored,
)
from espalier.mechanisms.few_bits.mega.package import PackedRows, encode
from espalier.mechanisms.few_bits.options import Quant
from espalier.mechanisms.few_bits.packed_spmm import PackedMatrix, packed_matmul
from espalier.mechanisms.few_bits.quantized_graph import QuantizedGraph
from espalier.parallel.workload import SummedLoss
from espalier.recipe import units
from espalier.store.artifacts import Curve, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROBED = 4096
"""Targets whose values steps begin with."""

MOST_PROBED = 1 << 28
"""Edges times columns of the pass that steps begin with; a larger one is not made."""


class Quantization:
    """The quantizers of a network. Has state: its parts are those of the network.

    Attributes:
        packed: rows that layers read are put in packages and taken out of them, and messages summed as they are packed;
            the results are the same but for rounding of float32.
        stored: those packages by the name of what they are rows of, while `packed`.
        pieces: values of the rows that are read in pieces, and whose; see `pack`.
        part: of the graph, that this rank trains on; None: all of it.
        by_layer: layers round what they read, those of a `Gnn`.
        entry: of features, in other networks; now, rows: of the pass under way; ids, owned: see `HeldRows`.
    """

    def __init__(self, options: Quant, graph: QuantizedGraph) -> None:
        self.options = options
        self.graph = graph
        self.features: list[FeatureQuantizer] = []
        self.columns: list[ColumnQuantizer] = []
        self.target: MemoryTarget | None = None
        self.packed = False
        self.first = 0
        self.by_layer = False
        self.part: Halo | None = None
        self.entry: FeatureQuantizer | None = None
        self.ids: Tensor | None = None
        self.now = RowIndex()
        self.rows = 0
        self.owned = 0
        self.stored: dict[str, PackedRows] = {}
        self.pieces: tuple[FeatureQuantizer | None, Tensor] = (None, torch.zeros(0))
        self.degrees = None if graph.whole else graph.degrees()
        self._degrees_seen = self.degrees if graph.seen is None else graph.degrees(training=True)
        self._root = None if graph.whole else graph.root()
        self._root_seen = self._root if graph.seen is None else graph.root(training=True)

    @property
    def every(self) -> list[FeatureQuantizer | ColumnQuantizer]:
        """All that learn."""
        return [*self.features, *self.columns]

    @property
    def widest(self) -> int:
        """Columns of the widest rows but the input's."""
        return max((feature.columns for feature in self.features[1 - self.first :]), default=1)

    @property
    def learning(self) -> bool:
        """Whether passes are those of training, or of the steps that it begins with."""
        return any(quantizer.training or quantizer.beginning is not None for quantizer in self.every[:1])

    @property
    def root(self) -> Tensor | None:
        """float32 [nodes], what GCN scales nodes by, in training by the edges that it sees."""
        return self._root_seen if self.learning else self._root

    def add(self, owner: nn.Module, at: int, columns: int, signed: bool, name: str = "quantizer") -> FeatureQuantizer:
        """A quantizer of the rows that layer `at` reads, as the part `name` of `owner`."""
        rule = Rule(signed=signed, local=1.0 if not self.graph.whole else 0.0)
        made = FeatureQuantizer(self.graph.allocator(self.options, self.options.bits + (not signed)), columns, rule)
        owner.add_module(name, made)
        self.first = self.first if self.features else at
        self.features.append(made)
        return made

    def name(self, quantizer: FeatureQuantizer) -> str:
        """Of its rows among packages."""
        return f"layers.{self.features.index(quantizer) + self.first}.rows"

    def rounded(self, quantizer: FeatureQuantizer, values: Tensor, index: RowIndex) -> Tensor:
        """`values` as they are stored."""
        if not self.packed:
            return quantizer(values, index)
        if index.ids is not None and self.pieces[0] is quantizer:
            return self.pieces[1][index.ids.to(self.pieces[1].device)].to(values)
        name = self.name(quantizer)
        self.stored[name] = encode(quantizer.codes(values, index))
        return self.stored[name].values().to(values.dtype)

    def pack(self, layer: nn.Module, rows: Rows, placed: dict[str, Any]) -> None:
        """Packs the rows of all nodes before `layer` reads them in pieces; nothing unless `packed`."""
        quantizer = getattr(layer, "quantizer", None)
        if self.packed and isinstance(quantizer, FeatureQuantizer):
            values = (rows.values if isinstance(rows, Kept) else rows).to(**placed)
            degrees = None if self.degrees is None else self.degrees.to(values.device)
            self.pieces = quantizer, self.rounded(quantizer, values, RowIndex(None, degrees))

    def enters(self, block: MessageBlock, features: Tensor) -> Tensor:
        """Features of a forward pass that begins, as they are stored; as they are, where layers see to it."""
        if self.by_layer:
            return features
        self.now = self.index(block)
        self.rows = len(features)
        if self.ids is not None and (block.halo is not None or block.tokens is not None):
            self.now = self._of(self.ids, self.owned)
        return features if self.entry is None else self.rounded(self.entry, features, self.now)

    def index(self, block: MessageBlock) -> RowIndex:
        """Of the sources of `block`."""
        if self.degrees is None:
            return RowIndex(block.nodes, block.indptr.diff())
        if self.part is not None and (owned := self.own(block)):
            return self._of(self.part.nodes if block.halo is None else self.part.owned, owned)
        return self._of(block.nodes, device=block.indptr.device)

    def _of(self, ids: Tensor | None, owned: int = 0, device: torch.device | None = None) -> RowIndex:
        """Of the nodes `ids`. In training, degrees are those that it sees, and what is hidden teaches nothing."""
        learning = self.learning
        known = [self._degrees_seen if learning else self.degrees, self.graph.shown if learning else None]
        if ids is not None:
            known = [None if tensor is None else tensor.to(ids.device)[ids] for tensor in known]
        degrees, shown = (None if tensor is None else tensor.to(device or tensor.device) for tensor in known)
        return RowIndex(ids, degrees, owned, shown)

    def shown(self, block: MessageBlock) -> Tensor | None:
        """bool [sources]: rows of `block` that teach; None: all do."""
        return None if self.graph.shown is None or not self.learning else self.index(block).shown

    def own(self, block: MessageBlock) -> int:
        """Rows that this rank owns where `block` is of its part; 0 where it is of the whole graph."""
        if self.part is None or len(block.indptr) != len(self.part.owned) + 1:
            return 0
        return len(self.part.owned)

    def over_ranks(self, rows: HeldRows) -> None:
        """Rows of the passes of this rank, of which all ranks together see every node in every step: those of layers
        are rounded by the rank that owns them, before they cross."""
        if rows.halo is None:
            self.ids = rows.ids
            self.owned = rows.owned
        self.part = rows.halo
        for feature in self.features:
            if isinstance(feature.allocator, NodeBits):
                shown = feature.allocator.shown
                feature.allocator.seen.copy_(torch.ones(()) if shown is None else shown)
        for column in self.columns:
            column.share = rows.share

    def loss(self, task_loss: SummedLoss) -> SummedLoss:
        """(sum, weight) with the gradient of the target's penalty; the value stays that of the task."""
        if self.target is None or not self.target.layers:
            return task_loss
        total, weight = task_loss
        penalty = self.target.penalty().to(total.dtype)
        return total + weight * (penalty - penalty.detach()), weight

    def row_size(self, model: nn.Module, at: int, size: int) -> RowSize | None:
        assert isinstance(model, Gnn)
        if not at or model.options.activation == "maxk":
            return None
        layer: Any = model.layers[at]
        messages = layer.quantized.messages if hasattr(layer, "quantized") else None
        if messages is not None:
            score_bytes = layer.heads * size if isinstance(layer, GraphAttention) else 0
            return row_size(len(messages.raw_step), messages.bits, score_bytes)
        return row_size(layer.inputs, _code_bits(layer.quantizer), by_row=True) if _sums_read_rows(layer) else None

    def share(self, share: float) -> None:
        for quantizer in self.every:
            quantizer.share = share


def quantization_of(model: nn.Module) -> Quantization | None:
    """Of a network that `quantized_networks.equip` was called with."""
    quantizers = getattr(model, QUANTIZED, None)
    return quantizers if isinstance(quantizers, Quantization) else None


def equipped(model: nn.Module) -> Quantization:
    """As `quantization_of`, of a network that has quantizers."""
    quantizers = quantization_of(model)
    assert quantizers is not None, "equip was not called"
    return quantizers


class _Aggregate(nn.Module):
    """A layer's aggregation over quantized messages, its sums quantized. Has state: the steps."""

    def __init__(self, layer: Layer, quantizers: Quantization) -> None:
        super().__init__()
        options = quantizers.options
        self.quantizers = quantizers
        self.symmetric = layer.scale == "symmetric"
        columns = layer.outputs
        if isinstance(layer, GraphAttention):
            columns = layer.heads * layer.columns
        self.plain = layer.aggregate
        self.attention = layer.attend
        self.first = layer.inputs <= layer.outputs and not isinstance(layer, GraphAttention)
        messages = options.messages and not self.first
        self.messages = ColumnQuantizer(columns, options.messages, local=True) if messages else None
        width = layer.inputs if self.first else columns
        self.sums = ColumnQuantizer(width, options.aggregates, local=True) if options.aggregates else None

    @property
    def root(self) -> Tensor | None:
        """See `Quantization.root`; None: edges have other scales."""
        return self.quantizers.root if self.symmetric else None

    def forward(self, block: MessageBlock, rows: Rows, start: Tensor | None = None) -> Tensor:
        shown = self.quantizers.shown(block)
        if self.messages is not None and not isinstance(rows, Kept):
            scale, block = _source_scale(block, self.root)
            rows = rows if scale is None else rows * scale[: len(rows), None]
            if self.quantizers.packed and block.halo is None:
                return self._finished(_packed_sums(self.messages, block, rows), start, shown)
            coded: Tensor = self.messages(rows, self.quantizers.own(block), shown)
            sums = _scaled_sums(self.plain, self._crossing(self.messages, block, coded.dtype), coded)
            return self._finished(sums, start, shown)
        if self.sums is None or isinstance(rows, Kept):
            return self.plain(block, rows, start)
        return self._finished(self.plain(block, rows), start, shown)

    @staticmethod
    def _crossing(messages: ColumnQuantizer, block: MessageBlock, rounded: torch.dtype) -> MessageBlock:
        steps = step_codes(messages.raw_step.detach() * STEP_RATE)
        return _coded(block, Coding(messages.bits, steps, kind=messages.raw_step.dtype, rounded=rounded))

    def _finished(self, sums: Tensor, start: Tensor | None, shown: Tensor | None) -> Tensor:
        sums = sums if self.sums is None else self.sums(sums, shown=_first(shown, sums))
        return sums if start is None else sums + start

    def attend(self, block: MessageBlock, rows: Tensor, scores: tuple[Tensor, Tensor], dropout: float) -> Tensor:
        shown = self.quantizers.shown(block)
        if self.messages is not None:
            rows = self.messages(rows.flatten(1), self.quantizers.own(block), shown).view_as(rows)
            block = self._crossing(self.messages, block, rows.dtype)
        out = self.attention(block, rows, scores, dropout)
        return out if self.sums is None else self.sums(out.flatten(1), shown=_first(shown, out)).view_as(out)


def _first(shown: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if shown is None else shown[: len(rows)]


def _coded(block: MessageBlock, coding: Coding) -> MessageBlock:
    """Rows that other ranks need cross as codes."""
    return block._replace(halo=replace(block.halo, coding=coding)) if isinstance(block.halo, Halo) else block


def _sums_read_rows(layer: Any) -> bool:
    return hasattr(layer, "quantizer") and bool(layer.aggregated_first(torch.empty(0)))


def _code_bits(quantizer: FeatureQuantizer) -> int:
    """Of rows that cross: learned widths change from step to step, so theirs take 8."""
    allocator = quantizer.allocator
    return MOST if allocator.learned else int(stored(allocator.bits.detach(), quantizer.rule.signed).max())


def _packed_sums(messages: ColumnQuantizer, block: MessageBlock, rows: Tensor) -> Tensor:
    """Sums over `block` of messages that lie packed, in integers where edges have no weights."""
    codes, step = messages.codes(rows)
    widths = torch.full((len(codes),), messages.bits, dtype=torch.uint8)
    matrix = PackedMatrix.of(codes, widths, torch.ones(len(codes)))
    sums = packed_matmul(matrix, block.indptr, block.indices, block.weights) * step
    return sums if block.left is None else sums * block.left[:, None]


def _scaled_sums(plain: Aggregate, block: MessageBlock, rows: Tensor) -> Tensor:
    """Sums over `block` of messages, and only then the scale of its targets, as `_packed_sums` has it: a scale within
    each edge would round every term."""
    if block.left is None:
        return plain(block, rows)
    return plain(block._replace(left=None, forms=_forms_without(block, "left")), rows) * block.left[:, None]


def _forms_without(block: MessageBlock, side: str) -> Forms:
    """Forms of the block without its scale `left` or `right`: its compressed matrix too, where it has one."""

    def make() -> Forms:
        made = Forms()
        compressed = block.forms.known.get("compressed")
        if compressed is not None:
            made.known["compressed"] = replace(compressed, scale=compressed.scale._replace(**{side: None}))
        return made

    return block.forms.get(f"without {side}", make)


def _source_scale(block: MessageBlock, root: Tensor | None) -> tuple[Tensor | None, MessageBlock]:
    """What the block multiplies its sources by, and the block without it. Blocks that were drawn have it in their
    weights; `root` is then that of all nodes, where the network scales by it."""
    if block.right is not None:
        return block.right, block._replace(right=None, forms=_forms_without(block, "right"))
    if root is None or block.nodes is None or block.weights is None:
        return None, block
    scale = root.to(block.weights)[block.nodes]
    return scale, block._replace(weights=block.weights / scale[block.indices], forms=Forms())


def equip_layers(model: Gnn, quantizers: Quantization) -> None:
    """Puts quantizers round the layers of `model`. The kernels of its seam have to be there already."""
    options = quantizers.options
    graph = quantizers.graph
    quantizers.by_layer = True
    dropout = model.options.dropout or 0.0
    elu = model.options.activation in ("elu", "maxk")
    for at, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        signed = graph.input_signed if at == 0 else elu
        if signed is not None:
            quantizer = quantizers.add(layer, at, layer.inputs, signed)
            dropped = dropout if at or model.drops_features else 0.0
            quantizer.gain = 1 / (1 - dropped) if dropped < 1 else 1.0
            layer.register_forward_pre_hook(_before(quantizers))
            layer.register_forward_hook(_after)
        if options.weights:
            a2q.quantize_weights(layer, options.weights)
        if options.messages or options.aggregates:
            aggregate = _Aggregate(layer, quantizers)
            quantizers.columns += [column for column in (aggregate.messages, aggregate.sums) if column is not None]
            layer.add_module("quantized", aggregate)
            layer.aggregate = aggregate.forward
            layer.attend = aggregate.attend


def _before(quantizers: Quantization) -> Any:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (block, rows), quantizer = inputs, module.quantizer
        assert isinstance(quantizer, FeatureQuantizer)
        index = quantizers.index(block)
        values = rows.values if isinstance(rows, Kept) else rows
        if quantizers.packed or values.requires_grad or block.halo is not None or not torch.is_grad_enabled():
            values = quantizers.rounded(quantizer, values, index)
        else:
            values, vars(module)["learned"] = quantizer.rounded(values, index)
        if not quantizers.packed and not isinstance(rows, Kept) and _sums_read_rows(module):
            bits = _code_bits(quantizer)
            signed = quantizer.rule.signed
            logarithm = quantizer.last
            gain = quantizer.factor
            kind = logarithm.dtype
            block = _coded(block, Coding(bits, step_codes(logarithm), True, signed, gain, kind, values.dtype))
        return block, rows._replace(values=values) if isinstance(rows, Kept) else values

    return before


@torch.no_grad()
def begin(model: nn.Module, features: Tensor, blocks: MessageBlocks, total: Total = alone) -> None:
    """Steps that fit what the untrained network makes of `features`; `total`: adds up over ranks that have parts."""
    training = model.training
    model.eval()
    for quantizer in equipped(model).every:
        quantizer.beginning = total
    forward(model, features, blocks)
    for quantizer in equipped(model).every:
        quantizer.beginning = None
    model.train(training)


def begin_over_ranks(model: nn.Module, features: Tensor, blocks: MessageBlocks, group: Any) -> None:
    """As `begin`, of the parts of a graph that ranks of `group` have; all call it alike."""

    def total(value: Tensor) -> Tensor:
        summed = value.clone()
        with traffic(Traffic.CONTROL):
            dist.all_reduce(summed, group=group)
        return summed

    if float(total(torch.tensor(float(blocks[0].edges)))) * equipped(model).widest <= MOST_PROBED:
        begin(model, features, blocks, total)


def _after(module: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> Tensor:
    learned = vars(module).pop("learned", None)
    return result if learned is None else learned(result)


# --- what it says of itself ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of the rows of all layers: `codes`; `pairs`: widths and steps, 12 bits of each entry, and of each row where
    it takes one of a bank. And how many `values` they have."""

    codes: float
    pairs: float
    values: float


def stored_bytes(quantizers: Quantization) -> StoredBytes:
    """As evaluation has it."""
    codes = pairs = values = 0.0
    shift = 0.0 if quantizers.target is None else quantizers.target.shift()
    for feature in quantizers.features:
        allocator = feature.allocator
        rows = float(feature.allocator.counts.sum())
        codes += MemoryTarget.bytes_of(feature.layer, shift)
        pairs += (12 * len(allocator.counts) + allocator.side * rows) / 8
        values += rows * feature.columns
    return StoredBytes(codes, pairs, values)


def sentence(quantizers: Quantization) -> str:
    """What a plan says."""
    options = quantizers.options
    target = quantizers.target
    kind = type(options).__struct_config__.tag
    counted = stored_bytes(quantizers)
    parts = [f"{name} {bits} bits" for name, bits in _components(options, bool(quantizers.columns))]
    if not quantizers.features:
        return f"Quantization ({kind}): no features, as rows of the input have one value each; {', '.join(parts)}."
    aim = f"features {options.bits:g} bits"
    if target is not None and target.layers:
        aim = f"features at most {units.show_size(target.target)} of codes"
        aim += f" ({8 * target.target / counted.values:.3g} bits a value)"
    return (
        f"Quantization ({kind}): {aim}, widths and steps {units.show_size(counted.pairs)}, "
        f"where fp32 takes {units.show_size(4 * counted.values)}; {', '.join(parts)}."
    )


def _components(options: Quant, columns: bool) -> list[tuple[str, int]]:
    named = (("weights", options.weights), ("messages", options.messages), ("sums", options.aggregates))
    return [(name, bits) for name, bits in named if bits and (columns or name == "weights")]


GROUPS = ((0, 1), (1, 2), (2, 3), (3, 5), (5, 9), (9, 17), (17, 65), (65, 1 << 62))
"""Degrees in the table of bits."""


SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the target, at which accuracy is shown."""


class Packed(NamedTuple):
    """Bytes of the packages of all rows that layers read, everything counted, and the score of a model that reads them,
    in per cent: accuracy, or another `figure`."""

    bytes: int
    score: float
    figure: str


@contextmanager
def packing(quantizers: Quantization) -> Iterator[dict[str, PackedRows]]:
    """Rows that layers read within are packed (see `Quantization.stored`, which is what is given)."""
    quantizers.packed = True
    quantizers.stored = {}
    try:
        yield quantizers.stored
    finally:
        quantizers.packed = False
        quantizers.stored = {}
        quantizers.pieces = (None, torch.zeros(0))


def packed(quantization: Quantization, score: Callable[[], float], figure: str = "accuracy") -> Packed:
    """`score` infers the model whole, and gives the value of `figure` in per cent."""
    with packing(quantization) as stored:
        value = score()
        return Packed(sum(rows.nbytes for rows in stored.values()), value, figure)


def curves(quantizers: Quantization, now: Callable[[], Packed] | None) -> list[Curve]:
    """Bits against degree; accuracy (or R²) against bytes of packages, of the trained model under smaller targets
    (None: not shown). `now` tells both of the model as it is then: see `packed`."""
    if not quantizers.features or quantizers.degrees is None:
        return []
    degrees = quantizers.degrees.unique().tolist()
    rows = [[degree, *_mean_widths(quantizers, quantizers.degrees == degree)] for degree in degrees]
    drawn = [Curve("Bits against degree", "degree", _width_names(quantizers), rows)]
    target = quantizers.target
    if now is None or target is None or not target.layers:
        return drawn
    asked, whole, points, figure = target.asked, target.target, [], ""
    try:
        for share in SHARES:
            target.asked = max(target.least, math.floor(share * whole))
            now_packed = now()
            figure = now_packed.figure
            points.append([now_packed.bytes / 1024, now_packed.score])
    finally:
        target.asked = asked
    title = f"{figure[0].upper()}{figure[1:]} against bytes of packed features, all counted"
    return [*drawn, Curve(title, "KiB", ["per cent"], points)]


def tables(quantizers: Quantization, stored: Packed | None = None, plain: str = "") -> list[Table]:
    """Bits against degree, and bytes, for the report; `stored`: of the packages too, and the accuracy from them;
    `plain`: what stands behind "fp32"."""
    if not quantizers.features or quantizers.degrees is None:
        return []
    counted = stored_bytes(quantizers)
    sizes = [("codes", counted.codes), ("widths and steps", counted.pairs), (f"fp32{plain}", 4 * counted.values)]
    if stored is not None:
        figure = "" if stored.figure == "accuracy" else f"{stored.figure} "
        label = f"packages, everything counted ({figure}{stored.score:.1f} % from them)"
        sizes.insert(2, (label, stored.bytes))
    rows: list[list[str | int | float]] = []
    for low, high in GROUPS:
        chosen = (quantizers.degrees >= low) & (quantizers.degrees < high)
        if bool(chosen.any()):
            label = str(low) if high == low + 1 else f"{low} to {high - 1}" if high < 1 << 62 else f"{low} and more"
            rows.append([label, int(chosen.sum()), *_mean_widths(quantizers, chosen)])
    shown = [(name, units.show_size(size), 8 * size / counted.values) for name, size in sizes]
    return [
        Table(("features", "bytes", "bits a value"), shown),
        Table(("degree", "nodes", *_width_names(quantizers)), rows),
    ]


@torch.no_grad()
def node_widths(quantizers: Quantization, quantizer: FeatureQuantizer) -> Tensor:
    """float [nodes]: the stored width of each node of the graph; a bank's depends on values and is its mean."""
    allocator = quantizer.allocator
    shift = 0.0 if quantizers.target is None else quantizers.target.shift()
    widths = allocator.widths(quantizer.rule.signed, shift).bits.float()
    assert quantizers.degrees is not None
    if isinstance(allocator, DegreeBits):
        entries = allocator.entries_of(widths, RowIndex(None, quantizers.degrees), quantizer.rule.signed)
        return widths[entries]
    if isinstance(allocator, NodeBits):
        return widths[allocator.places.clamp(min=0)]
    return widths.mean().expand(len(quantizers.degrees))


def _mean_widths(quantizers: Quantization, chosen: Tensor) -> list[float]:
    """By layer, of the `chosen` nodes."""
    return [node_widths(quantizers, feature)[chosen].mean().item() for feature in quantizers.features]


def _width_names(quantizers: Quantization) -> list[str]:
    return [f"bits, rows of {feature.columns}" for feature in quantizers.features]


def dense_rows(rows: Rows) -> Tensor:
    """float32, on the CPU."""
    return dense(rows).detach().float().cpu()
