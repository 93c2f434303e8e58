"""Cycles, DRAM bytes and joules of MEGA and of HyGCN, GCNAX, GROW and SGCN on a graph network's inference.

The authors published no simulator; this one is ours. Each accelerator is a dataflow: for each layer phases of DRAM
requests and of cycles of its engines, which overlap (a phase takes the longer of the two). All have the same clock
(1 GHz), buffer, DRAM and multipliers, those of MEGA's table (HPCA 2024, arXiv 2311.09775, section VI). DRAM is
simulated request by request (dram.py); no constant is fitted to a published figure. What the papers leave open is
said beside each dataflow. After HyGCN (HPCA 2020), GCNAX (HPCA 2021), GROW and SGCN (HPCA 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.kernels.counts import ENERGY, PICO
from espalier.quant.mega.condense import condense
from espalier.quant.mega.dram import Device, Trace, device

Array = NDArray[Any]
WORD = 4
"""Bytes of a value, and of an index, where nothing is quantized."""


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
    """A layer: its widths, values of each row that are not 0, and, quantized, bits of each row and of a message."""

    inputs: int
    outputs: int
    nonzeros: Array
    bits: Array
    message_bits: int
    packed_bytes: float


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

    def rows(self, total: int, ids: Array, size: float) -> Array:
        """Blocks of the rows `ids` of a tensor of `total` rows of `size` bytes, each row by itself."""
        begin = self.next
        self.next += math.ceil(total * size / self.block)
        first = np.floor(ids * size / self.block).astype(np.int64)
        count = (np.ceil((ids + 1) * size / self.block).astype(np.int64) - first).clip(min=1)
        spread = np.repeat(first - np.concatenate([[0], np.cumsum(count)[:-1]]), count) + np.arange(int(count.sum()))
        return begin + spread

    def gathered(self, chip: Chip, total: int, ids: Array, size: float) -> Array:
        """As `rows`; where the buffer holds the whole tensor, its blocks in sequence."""
        return self.stream(total * size) if total * size <= chip.buffer else self.rows(total, ids, size)


NONE = np.zeros(0, np.int64)
Dataflow = Callable[[Chip, Network], Iterator[Phase]]


def _targets(network: Network) -> Array:
    return np.repeat(np.arange(len(network.indptr) - 1), np.diff(network.indptr))


def _interval_sources(network: Network, rows: int) -> Iterator[Array]:
    """For each interval of so many targets its sources, each once."""
    for start in range(0, len(network.indptr) - 1, rows):
        stop = min(start + rows, len(network.indptr) - 1)
        yield np.unique(network.indices[network.indptr[start] : network.indptr[stop]])


def hygcn(chip: Chip, network: Network) -> Iterator[Phase]:
    """(A X) W: for each interval of targets that fits the buffer their sources' dense rows, then the matrix."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer in network.layers:
        rows = max(1, chip.aggregation // (WORD * layer.inputs))
        found = list(_interval_sources(network, rows))
        ids = np.concatenate(found) if found else NONE
        reads = [memory.rows(nodes, ids, WORD * layer.inputs), memory.stream(WORD * len(network.indices))]
        reads.append(memory.stream(WORD * layer.inputs * layer.outputs))
        sums, products = len(network.indices) * layer.inputs, nodes * layer.inputs * layer.outputs
        cycles = max(sums / chip.sums, products / chip.products)
        yield Phase(np.concatenate(reads), memory.stream(WORD * nodes * layer.outputs), cycles, products, sums)


def _combination(chip: Chip, memory: Memory, layer: LayerShape, size: float, out: float) -> Phase:
    """X W: rows as they are stored (`size` bytes), the result written (`out` bytes)."""
    weights = memory.stream(WORD * layer.inputs * layer.outputs)
    products = float(layer.nonzeros.sum()) * layer.outputs
    return Phase(
        np.concatenate([memory.stream(size), weights]), memory.stream(out), products / chip.products, products, 0.0
    )


def _sparse_bytes(layer: LayerShape) -> float:
    """Values and columns of what is not 0 (CSR), or all values where that is less."""
    nodes = len(layer.nonzeros)
    return min(2 * WORD * float(layer.nonzeros.sum()) + WORD * nodes, WORD * nodes * layer.inputs)


def gcnax(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W): two sparse products; of the tilings of the second that fit the buffer the one of least DRAM bytes: by
    columns (edges read again for each tile) or by targets (rows of X W read again for each). Tiles by targets and by
    sources at once, whose few edges fill no request and by which GROW's authors explain their gain, are not tried.
    Tiles by targets read the rows that their edges need and no others, which flatters GCNAX where they are taken: not
    on Cora and CiteSeer."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer in network.layers:
        middle = WORD * nodes * layer.outputs
        yield _combination(chip, memory, layer, _sparse_bytes(layer), middle)
        columns = min(layer.outputs, chip.buffer // (2 * WORD * nodes))
        edges, tiled = 2 * WORD * len(network.indices), None
        by_columns = math.inf if not columns else middle + edges * math.ceil(layer.outputs / columns)
        rows = max(1, chip.buffer // (2 * WORD * layer.outputs))
        found = list(_interval_sources(network, rows))
        ids = np.concatenate(found) if found else NONE
        by_targets = WORD * layer.outputs * len(ids) + edges
        if by_columns <= by_targets:
            tiled = memory.stream(by_columns)
        else:
            tiled = np.concatenate([memory.rows(nodes, ids, WORD * layer.outputs), memory.stream(edges)])
        sums = len(network.indices) * layer.outputs
        yield Phase(tiled, memory.stream(middle), sums / chip.sums, 0.0, sums)


def grow(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W) by rows, cluster by cluster, nodes numbered by cluster beforehand: the rows of X W that a cluster uses
    most, as many as the buffer holds, are read once and stay; all others are read at each edge. Rows ahead of one that
    waits go on, so that latencies are hidden."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer in network.layers:
        size = WORD * layer.outputs
        middle = nodes * size
        yield _combination(chip, memory, layer, _sparse_bytes(layer), middle)
        clusters = np.asarray(network.parts(max(1, math.ceil(middle / chip.buffer))))
        numbers = np.argsort(np.argsort(clusters, kind="stable"))
        keys = clusters[_targets(network)].astype(np.int64) * nodes + numbers[network.indices]
        read = _kept_and_missed(keys, nodes, chip.buffer // size)
        reads = [memory.gathered(chip, nodes, read % nodes, size), memory.stream(2 * WORD * len(network.indices))]
        sums = len(network.indices) * layer.outputs
        yield Phase(np.concatenate(reads), memory.stream(middle), sums / chip.sums, 0.0, sums)


def _kept_and_missed(keys: Array, nodes: int, room: int) -> Array:
    """Of `keys` (cluster * nodes + source, one an edge) those that are read: of each cluster first its `room` most used
    sources, once, then those of all other edges."""
    known, place, uses = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.lexsort((-uses, known // nodes))
    cluster = known[order] // nodes
    kept = np.zeros(len(known), bool)
    kept[order] = np.arange(len(order)) - np.searchsorted(cluster, cluster) < room
    read = np.concatenate([known[kept], keys[~kept[place]]])
    return read[np.argsort(read // nodes, kind="stable")]


def sgcn(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W), features between layers stored as a bitmap with the values that are not 0, rows of X W cached by
    clusters of targets."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer in network.layers:
        size = WORD * layer.outputs
        stored = nodes * layer.inputs / 8 + WORD * float(layer.nonzeros.sum())
        middle = nodes * size
        bytes_ = min(stored, _sparse_bytes(layer))
        yield _combination(chip, memory, layer, bytes_, middle)
        labels = network.parts(max(1, math.ceil(nodes * size / chip.buffer)))
        keys = np.unique(labels[_targets(network)].astype(np.int64) * nodes + network.indices)
        reads = [memory.gathered(chip, nodes, keys % nodes, size), memory.stream(WORD * len(network.indices))]
        sums = len(network.indices) * layer.outputs
        yield Phase(np.concatenate(reads), memory.stream(middle), sums / chip.sums, 0.0, sums)


def mega(chip: Chip, network: Network) -> Iterator[Phase]:
    """A (X W) on packages: a product takes as many cycles as its row has bits; messages of few bits stay in the buffer
    of their part, those that other parts need are condensed: written once for each part, read in sequence."""
    nodes, memory = len(network.indptr) - 1, Memory(chip)
    for layer in network.layers:
        products = float(layer.nonzeros.sum()) * layer.outputs
        cycles = float(layer.nonzeros @ np.maximum(layer.bits, 1)) * layer.outputs / chip.products
        size = layer.outputs * layer.message_bits / 8
        labels = network.parts(max(1, math.ceil(nodes * layer.outputs * 2 / chip.aggregation)))
        plan = condense(network.indptr, network.indices, labels)
        own = nodes * size > chip.buffer
        region = len(plan.regions) * size
        written = region + (nodes * size if own else 0)
        weights = memory.stream(layer.inputs * layer.outputs / 2)
        packed = memory.stream(layer.packed_bytes)
        yield Phase(np.concatenate([packed, weights]), memory.stream(written), cycles, products, 0.0)
        sums = len(network.indices) * layer.outputs
        read = memory.stream(region + (nodes * size if own else 0) + WORD * len(network.indices))
        yield Phase(read, NONE, sums / chip.sums, 0.0, sums)


DATAFLOWS: dict[str, Dataflow] = {"mega": mega, "sgcn": sgcn, "grow": grow, "gcnax": gcnax, "hygcn": hygcn}


def simulate(name: str, network: Network, chip: Chip | None = None) -> Result:
    """An inference of `network` by the accelerator `name`, a key of `DATAFLOWS`."""
    chip = chip or Chip()
    cycles = compute = moved = picojoules = arithmetic = 0.0
    hits = requests = 0
    share = _quantized_share(name, network)
    for phase in DATAFLOWS[name](chip, network):
        blocks, served = phase.requests.blocks, phase.requests.served(chip.dram)
        cycles += max(served.cycles * chip.dram.tck, phase.cycles)
        compute += phase.cycles
        moved += len(blocks) * chip.dram.block
        hits, requests = hits + served.hits, requests + served.requests
        picojoules += served.picojoules
        arithmetic += (phase.products * ENERGY["mac"].value + phase.sums * ENERGY["ac"].value) * share
    joules = picojoules * PICO, arithmetic, moved * ENERGY["sram_byte"].value
    return Result(name, cycles, compute, moved, hits / max(1, requests), *joules)


def trace(name: str, network: Network, chip: Chip | None = None) -> Trace:
    """All requests of an inference to DRAM, in order, each as soon as there is room."""
    phases = [phase.requests for phase in DATAFLOWS[name](chip or Chip(), network)]
    return Trace(np.concatenate([one.blocks for one in phases]), np.concatenate([one.writes for one in phases]))


def _quantized_share(name: str, network: Network) -> float:
    """What a product takes of few bits, of what it takes in fp32: an 8-bit one scaled by the mean width and 4 bits."""
    if name != "mega":
        return 1.0
    values = sum(float(one.nonzeros.sum()) for one in network.layers)
    bits = sum(float(one.nonzeros @ np.maximum(one.bits, 1)) for one in network.layers) / max(1.0, values)
    return ENERGY["int8_mac"].value / ENERGY["mac"].value * bits * 4 / 64
