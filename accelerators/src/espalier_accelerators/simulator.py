"""Cycles, DRAM bytes and joules of MEGA and of HyGCN, GCNAX, GROW and SGCN on a graph network's inference.

The authors published no simulator; this one is ours. Each accelerator is a dataflow: for each layer phases of DRAM
requests and of cycles of its engines, which overlap (a phase takes the longer of the two). All have the same clock
(1 GHz), buffer, DRAM and multipliers, those of MEGA's table (HPCA 2024, arXiv 2311.09775, section VI). DRAM is
simulated request by request (dram.py); no constant is fitted to a published figure. Two rules are the same for all:
results of a layer are written, as the next one reads them; what a layer makes for itself stays in the buffer where it
fits. What the papers leave open is said beside each dataflow. After HyGCN (HPCA 2020), GCNAX (HPCA 2021), GROW and
SGCN (HPCA 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.kernels.counts import ENERGY, PICO, Counts, integer_sums, low_bit
from espalier.sparse.condense import condense
from espalier_accelerators.dram import Device, Trace, device

Array = NDArray[Any]
WORD = 4
"""Bytes of a value, and of an index, where nothing is quantized."""
PARTIAL = 2
"""Bytes of MEGA's partial sums."""


@dataclass(frozen=True)
class Chip:
    """What all accelerators have: bytes of buffers, products and sums in a cycle, and DRAM.

    MEGA's buffers are 392 KiB in all, 128 of them for aggregation; 1,024 bit-serial products and 256 sums a cycle.
    """

    buffer: int = 392 << 10
    aggregation: int = 128 << 10
    products: int = 1024
    sums: int = 256
    dram: Device = field(default_factory=lambda: device("HBM2_8Gb_x128"))


class LayerShape(NamedTuple):
    """A layer: its widths, values of each row that are not 0, and, quantized, bits of each row and of a message.

    Attributes:
        packed_bytes: of all rows as MEGA stores them.
        own: a second matrix of the same shape maps each node's own row, and that is added to the sum (GraphSAGE).
        aggregates: False: the next matrix of a perceptron, whose rows are the results before it (GIN).
    """

    inputs: int
    outputs: int
    nonzeros: Array
    bits: Array
    message_bits: int
    packed_bytes: float
    own: bool = False
    aggregates: bool = True

    @property
    def matrices(self) -> int:
        """How many of inputs x outputs."""
        return 2 if self.own else 1

    @property
    def weights(self) -> int:
        """Values of its matrices."""
        return self.matrices * self.inputs * self.outputs


class Network(NamedTuple):
    """A graph by target, the part of each node, and layers."""

    indptr: Array
    indices: Array
    parts: Callable[[int], Array]
    layers: Sequence[LayerShape]


class Phase(NamedTuple):
    """Requests to blocks of DRAM, in order, and what the engines do meanwhile."""

    reads: Array
    writes: Array
    cycles: float
    products: float
    sums: float

    @property
    def requests(self) -> Trace:
        """The reads, then the writes."""
        blocks = np.concatenate([self.reads, self.writes])
        return Trace(blocks, np.arange(len(blocks)) >= len(self.reads))


class Result(NamedTuple):
    """What an inference takes. `bytes`: moved to and from DRAM, in whole requests. Joules of DRAM, of products and
    sums, and of the buffers, which each byte of DRAM passes once."""

    name: str
    cycles: float
    compute_cycles: float
    bytes: float
    row_hits: float
    dram_joules: float
    arithmetic_joules: float
    buffer_joules: float

    @property
    def joules(self) -> float:
        """All of them."""
        return self.dram_joules + self.arithmetic_joules + self.buffer_joules


class Memory:
    """Addresses of tensors in DRAM, one after the other. Has state: how far it is filled."""

    def __init__(self, chip: Chip) -> None:
        self.block, self.next = chip.dram.block, 0

    def stream(self, size: float) -> Array:
        """Blocks of a tensor that is passed over once, from its beginning."""
        count = math.ceil(size / self.block)
        self.next += count
        return np.arange(self.next - count, self.next)

    def rows(self, tensor: Array, ids: Array, size: float) -> Array:
        """Blocks of the rows `ids`, of `size` bytes, of the tensor in the blocks `tensor`, each row by itself."""
        first = np.floor(ids * size / self.block).astype(np.int64)
        count = (np.ceil((ids + 1) * size / self.block).astype(np.int64) - first).clip(min=1)
        spread = np.repeat(first - np.concatenate([[0], np.cumsum(count)[:-1]]), count) + np.arange(int(count.sum()))
        return tensor[spread]


NONE = np.zeros(0, np.int64)
Dataflow = Callable[[Chip, Network], Iterator[Phase]]


def _targets(network: Network) -> Array:
    return np.repeat(np.arange(len(network.indptr) - 1), np.diff(network.indptr))


def _interval_sources(network: Network, rows: int, with_self: bool = False) -> Array:
    """For each interval of so many targets its sources, each once; with `own` the targets too."""
    nodes, sources = len(network.indptr) - 1, [NONE]
    for start in range(0, nodes, rows):
        stop = min(start + rows, nodes)
        ids = network.indices[network.indptr[start] : network.indptr[stop]]
        sources.append(np.unique(np.concatenate([ids, np.arange(start, stop)]) if with_self else ids))
    return np.concatenate(sources)


def _layers(
    network: Network, chip: Chip, memory: Memory, stored: Callable[[LayerShape], float]
) -> Iterator[tuple[LayerShape, Array, Array]]:
    """Of each layer the blocks of the rows it reads (`stored` bytes) and of its results, written as the next one reads
    them, the last ones dense. Rows inside a perceptron stay in the buffer where they fit, and have no blocks."""
    sizes = [
        0.0 if not layer.aggregates and stored(layer) <= chip.buffer else stored(layer) for layer in network.layers
    ]
    rows, last = memory.stream(sizes[0]), WORD * (len(network.indptr) - 1) * network.layers[-1].outputs
    for layer, size in zip(network.layers, [*sizes[1:], last], strict=True):
        results = memory.stream(size)
        yield layer, rows, results
        rows = results


def _intermediate(chip: Chip, memory: Memory, size: float, result_bytes: float) -> tuple[Array, Array]:
    """Blocks of X W (`size` bytes) and of own rows' product; none where both fit the buffer and stay there."""
    return (NONE, NONE) if size + result_bytes <= chip.buffer else (memory.stream(size), memory.stream(result_bytes))


def _combination(chip: Chip, memory: Memory, layer: LayerShape, rows: Array, out: Array) -> Phase:
    """X W: blocks of rows read, and of the result written; values that are 0 are not multiplied."""
    weights = memory.stream(WORD * layer.weights)
    products = float(layer.nonzeros.sum()) * layer.outputs * layer.matrices
    return Phase(np.concatenate([rows, weights]), out, products / chip.products, products, 0.0)


def _dense_bytes(layer: LayerShape) -> float:
    """All values of the rows."""
    return float(WORD * len(layer.nonzeros) * layer.inputs)


def _sparse_bytes(layer: LayerShape) -> float:
    """Values and columns of what is not 0 (CSR), or all values where that is less."""
    return min(2 * WORD * float(layer.nonzeros.sum()) + WORD * len(layer.nonzeros), _dense_bytes(layer))


def _bitmap_bytes(layer: LayerShape) -> float:
    """A bitmap of each row and the values that are not 0, or CSR, or all values where that is less."""
    return min(len(layer.nonzeros) * layer.inputs / 8 + WORD * float(layer.nonzeros.sum()), _sparse_bytes(layer))


def hygcn(chip: Chip, network: Network) -> Iterator[Phase]:
    """(A X) W: for each interval of targets that fits the buffer their sources' dense rows, then the matrix. Zeros are
    multiplied too."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer, rows, results in _layers(network, chip, memory, _dense_bytes):
        reads, sums, products = [rows, memory.stream(WORD * layer.weights)], 0, nodes * layer.weights
        if layer.aggregates:
            height = max(1, chip.aggregation // (WORD * layer.inputs))
            reads[0] = memory.rows(rows, _interval_sources(network, height, layer.own), WORD * layer.inputs)
            reads.insert(1, memory.stream(WORD * len(network.indices)))
            sums = len(network.indices) * layer.inputs
        yield Phase(np.concatenate(reads), results, max(sums / chip.sums, products / chip.products), products, sums)


def gcnax(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W): two sparse products; of these orders the one of least DRAM bytes. Fused: as many columns of X W as the
    buffer holds are summed before the next ones are multiplied (rows of X and edges are read again for each tile; all
    columns are one tile where they fit). By columns: X W is written, edges are read again for each tile. By targets:
    rows of X W are read again for each. Tiles by targets and by sources at once, whose few edges fill no request and by
    which GROW's authors explain their gain, are not tried. Tiles by targets read the rows that their edges need and no
    others, which flatters GCNAX where they are taken."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer, rows, results in _layers(network, chip, memory, _sparse_bytes):
        if not layer.aggregates:
            yield _combination(chip, memory, layer, rows, results)
            continue
        size, edges = WORD * layer.outputs, memory.stream(2 * WORD * len(network.indices))
        fused = _tiles(layer.outputs, chip.buffer // max(1, WORD * nodes * layer.matrices))
        tiles = _tiles(layer.outputs, chip.buffer // max(1, WORD * nodes))
        ids = _interval_sources(network, max(1, chip.buffer // (2 * size)))
        mapped_bytes = nodes * size * (layer.matrices - 1)
        features, once = memory.block * len(rows), memory.block * len(edges)
        by_columns, by_targets = nodes * size + once * tiles, size * len(ids) + once
        sums = len(network.indices) * layer.outputs
        if (features + once) * fused <= features + nodes * size + 2 * mapped_bytes + min(by_columns, by_targets):
            yield _combination(chip, memory, layer, np.tile(rows, int(fused)), NONE)
            yield Phase(np.tile(edges, int(fused)), results, sums / chip.sums, 0.0, sums)
            continue
        middle, mapped = memory.stream(nodes * size), memory.stream(mapped_bytes)
        yield _combination(chip, memory, layer, rows, np.concatenate([middle, mapped]))
        if by_columns <= by_targets:
            reads = [middle, np.tile(edges, int(tiles)), mapped]
        else:
            reads = [memory.rows(middle, ids, size), edges, mapped]
        yield Phase(np.concatenate(reads), results, sums / chip.sums, 0.0, sums)


def _tiles(columns: int, columns_held: int) -> float:
    """Of so many columns each, where any are held."""
    return math.ceil(columns / columns_held) if columns_held else math.inf


def grow(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W) by rows, cluster by cluster, nodes numbered by cluster beforehand: the rows of X W that a cluster uses
    most, as many as the buffer holds, are read once and stay; all others are read at each edge. Rows ahead of one that
    waits go on, so that latencies are hidden."""

    def read(middle: Array, nodes: int, size: int, memory: Memory) -> Array:
        clusters = np.asarray(network.parts(max(1, math.ceil(nodes * size / chip.buffer))))
        numbers = np.argsort(np.argsort(clusters, kind="stable"))
        keys = clusters[_targets(network)].astype(np.int64) * nodes + numbers[network.indices]
        return memory.rows(middle, _kept_and_missed(keys, nodes, chip.buffer // size) % nodes, size)

    return _by_rows(chip, network, _sparse_bytes, 2 * WORD, read)


def _kept_and_missed(keys: Array, nodes: int, room: int) -> Array:
    """Of `keys` (cluster * nodes + source, one an edge) those that are read: of each cluster first its `room` most used
    sources, once, then those of all other edges."""
    known, place, uses = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.lexsort((-uses, known // nodes))
    cluster = known[order] // nodes
    resident = np.zeros(len(known), bool)
    resident[order] = np.arange(len(order)) - np.searchsorted(cluster, cluster) < room
    read = np.concatenate([known[resident], keys[~resident[place]]])
    return read[np.argsort(read // nodes, kind="stable")]


def sgcn(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W), features between layers stored as a bitmap with the values that are not 0, rows of X W cached by
    clusters of targets."""

    def read(middle: Array, nodes: int, size: int, memory: Memory) -> Array:
        labels = network.parts(max(1, math.ceil(nodes * size / chip.buffer)))
        keys = np.unique(labels[_targets(network)].astype(np.int64) * nodes + network.indices)
        return memory.rows(middle, keys % nodes, size)

    return _by_rows(chip, network, _bitmap_bytes, WORD, read)


def _by_rows(
    chip: Chip, network: Network, stored: Callable[[LayerShape], float], edge: int, read: Callable[..., Array]
) -> Iterator[Phase]:
    """A (X W) by rows: features as `stored`, edges of so many bytes, and the blocks of X W that are `read` where it
    does not fit the buffer."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer, rows, results in _layers(network, chip, memory, stored):
        if not layer.aggregates:
            yield _combination(chip, memory, layer, rows, results)
            continue
        size = WORD * layer.outputs
        middle, mapped = _intermediate(chip, memory, nodes * size, nodes * size * (layer.matrices - 1))
        yield _combination(chip, memory, layer, rows, np.concatenate([middle, mapped]))
        reads = [read(middle, nodes, size, memory) if len(middle) else NONE]
        reads += [memory.stream(edge * len(network.indices)), mapped]
        sums = len(network.indices) * layer.outputs
        yield Phase(np.concatenate(reads), results, sums / chip.sums, 0.0, sums)


def mega(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W) on packages: a product takes as many cycles as its row has bits; where messages of few bits do not fit
    the buffer, those that other parts need are condensed: written once for each part, read in sequence. A node's own
    product waits as 16-bit partial sums. Results are packed for the next layer."""
    return _on_packages(chip, network, condensed=True)


def uncondensed(chip: Chip, network: Network) -> Iterator[Phase]:
    """As `mega`, but each part reads the messages of its edges from where they are, each row once."""
    return _on_packages(chip, network, condensed=False)


def _on_packages(chip: Chip, network: Network, condensed: bool) -> Iterator[Phase]:
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer, rows, results in _layers(network, chip, memory, lambda layer: layer.packed_bytes):
        products = float(layer.nonzeros.sum()) * layer.outputs * layer.matrices
        serial = float(layer.nonzeros @ np.maximum(layer.bits, 1)) * layer.outputs * layer.matrices
        read = np.concatenate([rows, memory.stream(layer.weights / 2)])
        if not layer.aggregates:
            yield Phase(read, results, serial / chip.products, products, 0.0)
            continue
        size, region = layer.outputs * layer.message_bits / 8, NONE
        partial = nodes * layer.outputs * PARTIAL
        middle, mapped = _intermediate(chip, memory, nodes * size, partial * (layer.matrices - 1))
        if len(middle):
            labels = network.parts(max(1, math.ceil(partial / chip.aggregation)))
            if condensed:
                region = memory.stream(len(condense(network.indptr, network.indices, labels).regions) * size)
        written = np.concatenate([middle, region, mapped])
        yield Phase(read, written, serial / chip.products, products, 0.0)
        sums = len(network.indices) * layer.outputs
        back = written
        if len(middle) and not condensed:
            keys = np.unique(labels[_targets(network)].astype(np.int64) * nodes + network.indices)
            back = np.concatenate([memory.rows(middle, keys % nodes, size), mapped])
        again = np.concatenate([back, memory.stream(WORD * len(network.indices))])
        yield Phase(again, results, sums / chip.sums, 0.0, sums)


DATAFLOWS: dict[str, Dataflow] = {"mega": mega, "sgcn": sgcn, "grow": grow, "gcnax": gcnax, "hygcn": hygcn}


def simulate(name: str, network: Network, chip: Chip | None = None, flow: Dataflow | None = None) -> Result:
    """An inference of `network` by the accelerator `name`, a key of `DATAFLOWS`; by `flow` in place of its own."""
    chip = chip or Chip()
    cycles = compute = moved = picojoules = arithmetic = 0.0
    hits = requests = 0
    product, addition = _joules(name, network)
    for phase in (flow or DATAFLOWS[name])(chip, network):
        blocks, served = phase.requests.blocks, phase.requests.served(chip.dram)
        cycles += max(served.cycles * chip.dram.tck, phase.cycles)
        compute += phase.cycles
        moved += len(blocks) * chip.dram.block
        hits, requests = hits + served.hits, requests + served.requests
        picojoules += served.picojoules
        arithmetic += phase.products * product + phase.sums * addition
    joules = picojoules * PICO, arithmetic, moved * ENERGY["sram_byte"].value
    return Result(name, cycles, compute, moved, hits / max(1, requests), *joules)


def trace(name: str, network: Network, chip: Chip | None = None) -> Trace:
    """All requests of an inference to DRAM, in order, each as soon as there is room."""
    phases = [phase.requests for phase in DATAFLOWS[name](chip or Chip(), network)]
    return Trace(np.concatenate([phase.blocks for phase in phases]), np.concatenate([phase.writes for phase in phases]))


def _joules(name: str, network: Network) -> tuple[float, float]:
    """Of a product with its accumulation, and of an addition to a sum of messages: in fp32; MEGA's of the mean width
    and 4 bits, and of its partial sums."""
    if name != "mega":
        return Counts(macs=1).joules(), Counts(acs=1).joules()
    values = sum(float(layer.nonzeros.sum()) for layer in network.layers)
    bits = sum(float(layer.nonzeros @ np.maximum(layer.bits, 1)) for layer in network.layers) / max(1.0, values)
    return low_bit(1, bits, 4).joules(), integer_sums(1, 8 * PARTIAL).joules()
