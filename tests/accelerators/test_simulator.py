"""DRAM and accelerators: cases by hand, floors that nothing is below, more bits never faster; edges are served once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from espalier.kernels.counts import constants
from espalier.recipe.errors import UserError
from espalier.sparse.condense import Condensed, condense
from espalier_accelerators import dram, simulator
from espalier_accelerators.dram import Trace, read_trace, write_trace
from espalier_accelerators.simulator import DATAFLOWS, Chip, LayerShape, Network, mega, simulate, uncondensed

HBM = dram.device("HBM2_8Gb_x128")


def graph(nodes: int, degree: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    counts = np.minimum(random.zipf(1.8, nodes) + degree - 1, nodes - 1)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return indptr, np.concatenate([np.sort(random.choice(nodes, one, replace=False)) for one in counts])


SHAPES = {
    "gcn": ((500, 64, 50), (64, 16, 32)),
    "sage": ((500, 64, 50, True), (64, 16, 32, True)),
    "gin": ((500, 64, 50), (64, 64, 40, False, False), (64, 16, 32), (16, 16, 12, False, False)),
}
"""Widths and nonzeros of each layer, whether it has a matrix for own rows, and whether it sums neighbours."""


def network(nodes: int = 3000, bits: int = 2, seed: int = 0, kind: str = "gcn") -> Network:
    indptr, indices = graph(nodes, 4, seed)
    layers = [
        LayerShape(i, o, np.full(nodes, n), np.full(nodes, bits), 4, nodes * (n * bits + i) / 8, *more)
        for i, o, n, *more in SHAPES[kind]
    ]
    return Network(indptr, indices, lambda parts: (np.arange(nodes) * parts // nodes).astype(np.int32), layers)


ONE = 2 + HBM.rcd + HBM.cl + HBM.transfer
"""Cycles of a read of a row that is not open: taken in one, given to its bank's queue in the next."""


def test_one_read_opens_a_row_and_the_next_in_it_follows_by_the_burst():
    one, two = (dram.serve(HBM, np.arange(count)) for count in (1, 2))
    assert one.cycles == ONE == one.latency + 1
    assert two.cycles - one.cycles == max(HBM.ccd_long, HBM.transfer)
    assert (one.hits, two.hits, two.activations) == (0, 1, 1)


def test_another_row_of_one_bank_waits_until_the_first_may_be_closed():
    per_row = HBM.columns // HBM.burst
    stride = per_row * HBM.channels * HBM.banks * HBM.groups
    found = dram.serve(HBM, np.array([0, stride]))
    assert found.hits == 0
    assert found.cycles == ONE + HBM.ras + HBM.rp


def test_streams_reach_the_bandwidth_and_nothing_exceeds_it():
    blocks = np.arange(80_000)
    streamed = dram.serve(HBM, blocks)
    least = len(blocks) * HBM.block / HBM.peak
    assert least <= streamed.cycles < 2.5 * least
    assert streamed.hits > 0.9 * len(blocks)
    random = np.random.default_rng(0).integers(0, 1 << 24, 80_000)
    scattered = dram.serve(HBM, random)
    assert scattered.cycles > streamed.cycles
    assert scattered.hits < 100


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(UserError, match="HBM2_8Gb_x12"):
        dram.device("HBM2_8Gb_x12")


def aggregated(plan: Condensed, indptr: np.ndarray, indices: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A @ rows, of each part from its own rows and its region alone."""
    out, targets = np.zeros_like(rows), np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    for part in range(plan.parts):
        edges = np.flatnonzero(plan.labels[targets] == part)
        own = plan.labels[indices[edges]] == part
        np.add.at(out, targets[edges[own]], rows[indices[edges[own]]])
        region, outside = plan.region(part), edges[~own]
        np.add.at(out, targets[outside], rows[region][np.searchsorted(region, indices[outside])])
    return out


@pytest.mark.parametrize("seed", range(3))
def test_every_edge_is_served_once_and_sums_are_those_of_integers(seed):
    indptr, indices = graph(200, 3, seed)
    labels = np.random.default_rng(seed).integers(0, 7, 200).astype(np.int32)
    plan = condense(indptr, indices, labels)
    rows = np.random.default_rng(seed).integers(-8, 8, (200, 5))
    whole = np.zeros_like(rows)
    targets = np.repeat(np.arange(200), np.diff(indptr))
    np.add.at(whole, targets, rows[indices])
    assert np.array_equal(aggregated(plan, indptr, indices, rows), whole)
    served = set()
    for part in range(plan.parts):
        region = plan.region(part)
        assert (np.diff(region) > 0).all()
        outside = (labels[targets] == part) & (labels[indices] != part)
        assert set(indices[outside].tolist()) == set(region.tolist())
        served |= {(part, source) for source in region.tolist()}
    crossing = labels[targets] != labels[indices]
    assert served == set(zip(labels[targets[crossing]].tolist(), indices[crossing].tolist(), strict=True))


def test_parts_that_fit_no_graph_are_refused():
    with pytest.raises(UserError, match="2 nodes have 3 parts"):
        condense(np.array([0, 0, 1]), np.array([0]), np.array([0, 1, 1]))


@pytest.mark.extremes
@pytest.mark.parametrize("name", DATAFLOWS)
def test_no_accelerator_is_faster_than_its_bandwidth_or_its_products(name):
    """Cycles are of 1 ns, those of DRAM of `tck`: 2 ns and 0.83 ns in the others."""
    given_ = network(600)
    edges, nodes = len(given_.indices), len(given_.indptr) - 1
    for kind in ("HBM2_8Gb_x128", "HBM1_4Gb_x128", "DDR4_8Gb_x8_2400"):
        chip = Chip(dram=dram.device(kind))
        found = simulate(name, given_, chip)
        assert found.cycles >= found.bytes / chip.dram.peak * chip.dram.tck
        for layer in given_.layers:
            products = float(layer.nonzeros.sum()) * layer.outputs * (2 if name == "mega" else 1)
            sums = edges * (layer.inputs if name == "hygcn" else layer.outputs)
            if name == "hygcn":
                products = nodes * layer.inputs * layer.outputs
            assert found.cycles >= max(products / chip.products, sums / chip.sums)
        assert found.cycles >= found.compute_cycles


@pytest.mark.extremes
@pytest.mark.parametrize("name", DATAFLOWS)
def test_more_bandwidth_never_takes_longer(name):
    slow = Chip(dram=replace(HBM, channels=4))
    late = Chip(dram=replace(HBM, cl=28, rcd=28, rp=28))
    fast = simulate(name, network(600)).cycles
    assert fast <= simulate(name, network(600), slow).cycles
    assert fast <= simulate(name, network(600), late).cycles


def test_fewer_bits_never_take_longer_or_move_more():
    results = [simulate("mega", network(bits=bits)) for bits in (1, 2, 4, 8)]
    for less, more in itertools.pairwise(results):
        assert less.cycles <= more.cycles
        assert less.bytes <= more.bytes
        assert less.joules <= more.joules


RING = Network(
    np.arange(9),
    (np.arange(8) + 1) % 8,
    lambda parts: np.zeros(8, np.int32),
    [LayerShape(2, 2, np.full(8, 2), np.full(8, 2), 4, 16.0)],
)
"""8 nodes, an edge from each to the next, two values in and two out, 2 bits each, messages of 4."""

# Blocks read and written by each phase. HyGCN: 8 rows of 8 bytes one by one, 32 bytes of edges, a matrix of 16, then
# 64 bytes of results. The others: 64 bytes of features (CSR would take 160, a bitmap 66) and the matrix; X W stays in
# the buffer; then edges (values and columns: 64 bytes; columns: 32) and 64 bytes of results. MEGA: 16 bytes of packages
# and 8 of a 4-bit matrix, the rest as the others.
PHASES = {
    "hygcn": [(10, 1)],
    "gcnax": [(2, 0), (1, 1)],
    "grow": [(2, 0), (1, 1)],
    "sgcn": [(2, 0), (1, 1)],
    "mega": [(2, 0), (1, 1)],
}
# With a buffer of 7 bytes neither 64 of X W nor 8 of messages stay: they are written, and read at each of 8 edges, by
# MEGA, whose messages are all of one part, in sequence.
SPILLED = {
    "hygcn": [(10, 1)],
    "gcnax": [(2, 1), (9, 1)],
    "grow": [(2, 1), (9, 1)],
    "sgcn": [(2, 1), (9, 1)],
    "mega": [(2, 1), (2, 1)],
}


def arithmetic(name: str, products: float, sums: float) -> float:
    """Joules by the table's constants: fp32; MEGA's products of 2 bits by 4, and sums of 16 bits, whatever is added."""
    table = {key: picojoules for key, picojoules, _ in constants()}
    if name == "mega":
        assert 16 / 32 * table["int32_add"] >= 0.03, "an addition of 8 bits takes 0.03 pJ"
        return 1e-12 * (products * table["int8_mac"] * 2 * 4 / 64 + sums * table["int32_add"] * 16 / 32)
    return 1e-12 * (products * table["mac"] + sums * table["ac"])


@pytest.mark.parametrize("name", DATAFLOWS)
@pytest.mark.parametrize(("chip", "by_hand"), [(Chip(), PHASES), (Chip(buffer=7), SPILLED)], ids=["kept", "spilled"])
def test_a_network_of_eight_nodes_takes_what_is_counted_by_hand(name, chip, by_hand):
    """All blocks of a phase lie in one row. A read follows another by a burst of 2 cycles, a write the last read by 14
    (reads' latency, burst and turn of the bus, less the writes' latency), and ends 6 later.

    Energy of HBM2_8Gb_x128 (1.2 V, 1 ns): an activation 1.2 (65 * 48 - 55 * 34 - 40 * 14) = 828 pJ, a read
    1.2 (390 - 55) 2 = 804, a write 1.2 (500 - 55) 2 = 1068, a cycle of a channel 1.2 * 55 = 66 with a row open, 48
    with none. Its row is opened in cycle 2; seven channels do nothing."""
    found = simulate(name, RING, chip)
    blocks = sum(reads + writes for reads, writes in by_hand[name])
    assert found.bytes == 64 * blocks
    cycles = [32 + 2 * (reads - 1) + (4 if writes else 0) for reads, writes in by_hand[name]]
    assert found.cycles == sum(cycles)
    picojoules = 0.0
    for (reads, writes), took in zip(by_hand[name], cycles, strict=True):
        picojoules += 828 + 804 * reads + 1068 * writes + 66 * (took - 2) + 48 * (2 + 7 * took)
    assert found.dram_joules == pytest.approx(1e-12 * picojoules)
    assert found.arithmetic_joules == pytest.approx(arithmetic(name, products=8 * 2 * 2, sums=8 * 2))
    assert found.buffer_joules == pytest.approx(1e-12 * 1.25 * 64 * blocks)
    assert found.joules == found.dram_joules + found.arithmetic_joules + found.buffer_joules


def stored(name: str, layer: LayerShape) -> float:
    """Bytes of the rows that `layer` reads, as each accelerator has them."""
    nodes, values = len(layer.nonzeros), float(layer.nonzeros.sum())
    dense = 4.0 * nodes * layer.inputs
    compressed = min(dense, 8 * values + 4 * nodes)
    forms = {"mega": layer.packed_bytes, "hygcn": dense, "sgcn": min(compressed, nodes * layer.inputs / 8 + 4 * values)}
    return forms.get(name, compressed)


@pytest.mark.parametrize("buffer", [392 << 10, 16 << 10])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", DATAFLOWS)
def test_what_is_read_was_there_or_was_written_and_all_results_are_written_once(name, kind, buffer):
    """Block by block: nothing is read that is not of the features, the matrices, the edges, or written before; nothing
    is written twice; what is written holds the rows of each further layer (but those inside a perceptron that fit the
    buffer) and the last results."""
    given_, chip = network(600, kind=kind), Chip(buffer=buffer, aggregation=16 << 10)
    there, written, reads = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for phase in DATAFLOWS[name](chip, given_):
        reads = np.union1d(reads, np.setdiff1d(phase.reads, written))
        assert len(np.intersect1d(phase.writes, written)) == 0
        assert len(np.unique(phase.writes)) == len(phase.writes)
        written = np.union1d(written, phase.writes)
    edges = (8 if name in ("gcnax", "grow") else 4) * len(given_.indices)
    for layer in given_.layers:
        matrices = (2 if layer.own else 1) * layer.inputs * layer.outputs * (0.5 if name == "mega" else 4)
        there += math.ceil(matrices / 64) + (math.ceil(edges / 64) if layer.aggregates else 0)
    first = math.ceil(stored(name, given_.layers[0]) / 64)
    assert there < len(reads) <= there + first
    assert name == "hygcn" or len(reads) == there + first
    sizes = [stored(name, one) for one in given_.layers[1:] if one.aggregates or stored(name, one) > buffer]
    results = sum(math.ceil(size / 64) for size in [*sizes, 4 * 600 * 16])
    assert len(written) >= results
    assert len(phase.writes) >= math.ceil(4 * 600 * 16 / 64), "the last results"
    if buffer == 392 << 10 or name == "hygcn":
        assert len(written) == results, "all else fits the buffer"
    else:
        assert len(written) > results, "X W does not fit"


@pytest.mark.parametrize("name", DATAFLOWS)
def test_none_moves_less_than_with_a_buffer_that_holds_all(name):
    for kind in SHAPES:
        given_ = network(600, kind=kind)
        moved = [sum(len(one.requests.blocks) for one in DATAFLOWS[name](Chip(buffer=size << 10), given_))
                 for size in (2048, 392, 64, 16)]  # fmt: skip
        assert min(moved) == moved[0] <= moved[1]


@pytest.mark.parametrize("name", DATAFLOWS)
def test_products_are_those_of_all_matrices(name):
    for kind in SHAPES:
        given_ = network(600, kind=kind)
        products = sum(phase.products for phase in DATAFLOWS[name](Chip(), given_))
        values = [600 * one.inputs if name == "hygcn" else int(one.nonzeros.sum()) for one in given_.layers]
        matrices = [one.outputs * (2 if one.own else 1) for one in given_.layers]
        assert products == sum(np.multiply(values, matrices))


@pytest.mark.parametrize("name", DATAFLOWS)
def test_energy_is_the_sum_of_all_events_times_the_table(name):
    """Of a network of two layers on another DRAM; events counted phase by phase."""
    chip = Chip(dram=dram.device("DDR4_8Gb_x8_2400"))
    given_ = network(400)
    of, act, read, write, refresh = chip.dram, *(0.0,) * 4
    act, read, write, refresh, active, idle = of.energies
    least = most = 0.0
    for phase in DATAFLOWS[name](chip, given_):
        served = phase.requests.served(of)
        events = served.activations * act + len(phase.reads) * read + len(phase.writes) * write
        events += served.refreshes * refresh
        least += events + of.channels * of.ranks * served.cycles * idle
        most += events + of.channels * of.ranks * served.cycles * active
    found = simulate(name, given_, chip)
    assert least <= 1e12 * found.dram_joules <= most < 1.2 * least
    products, sums = (sum(getattr(one, what) for one in DATAFLOWS[name](chip, given_)) for what in ("products", "sums"))
    assert found.arithmetic_joules == pytest.approx(arithmetic(name, products, sums))


def test_sums_take_the_same_whatever_the_width_of_what_is_added():
    """With layers of one value each row; products, of which there are few, take less of fewer bits."""
    one = network(400)
    of = [one._replace(layers=[each._replace(nonzeros=0 * each.nonzeros, bits=0 * each.bits + bits)
                               for each in one.layers]) for bits in (1, 8)]  # fmt: skip
    narrow, wide = (simulate("mega", each).arithmetic_joules for each in of)
    sums = sum(phase.sums for phase in DATAFLOWS["mega"](Chip(), one))
    assert narrow == wide == pytest.approx(sums * 0.05e-12)


def test_without_condensing_each_part_reads_its_sources_rows_and_nothing_is_written_twice():
    given_, chip = network(600), Chip(buffer=4096, aggregation=4096)
    flows = {flow: [simulate("mega", given_, chip, flow), *flow(chip, given_)] for flow in (mega, uncondensed)}
    (plain, *phases), (found, *bare) = flows[mega], flows[uncondensed]
    assert plain == simulate("mega", given_, chip)
    targets = np.repeat(np.arange(600), np.diff(given_.indptr))
    for at, layer in enumerate(given_.layers):
        labels = given_.parts(math.ceil(600 * layer.outputs * 2 / 4096))
        rows = {
            (labels[target], source) for target, source in zip(targets.tolist(), given_.indices.tolist(), strict=True)
        }
        size = layer.outputs // 2
        blocks = sum(math.ceil((source + 1) * size / 64) - source * size // 64 for _, source in rows)
        edges = math.ceil(4 * len(given_.indices) / 64)
        assert len(bare[2 * at + 1].reads) == blocks + edges
        assert len(bare[2 * at].writes) == math.ceil(600 * size / 64) < len(phases[2 * at].writes)
    assert found.bytes > plain.bytes
    assert found.compute_cycles == plain.compute_cycles


@pytest.mark.parametrize("writes", [False, True])
def test_channels_of_the_simulation_serve_as_one_that_is_compared_with_dramsim3(writes):
    """The simulator's requests come to each channel by themselves; of one channel that is what a trace does whose
    requests all arrive in cycle 0, as those are compared with DRAMsim3 (test_dram.py)."""
    random = np.random.default_rng(5)
    blocks = np.concatenate([np.arange(2000), 4096 + random.permutation(40_000)[:1500]])
    wrote = (random.random(len(blocks)) < 0.3) & writes
    whole, channel = dram.serve(HBM, blocks, wrote), HBM.parts(blocks)[0]
    alone = [Trace(blocks[here], wrote[here], np.zeros(int(here.sum()), np.int64)).served(HBM)
             for here in (channel == one for one in range(HBM.channels))]  # fmt: skip
    assert whole.cycles == max(one.cycles for one in alone)
    assert (whole.hits, whole.activations) == tuple(sum(getattr(one, of) for one in alone)
                                                    for of in ("hits", "activations"))  # fmt: skip


def test_renumbering_nodes_changes_nothing_where_nothing_is_cached():
    """GROW with no buffer reads a row for each edge, whatever the order."""
    one = network(400)
    order = np.random.default_rng(3).permutation(400)
    place = np.argsort(order)
    counts = np.diff(one.indptr)[order]
    edges = [np.sort(place[one.indices[one.indptr[n] : one.indptr[n + 1]]]) for n in order]
    other = one._replace(indptr=np.concatenate([[0], np.cumsum(counts)]), indices=np.concatenate(edges))
    bare = Chip(buffer=1, aggregation=1)
    whole = [one._replace(parts=lambda parts: np.zeros(400, np.int32)) for one in (one, other)]
    assert simulate("grow", whole[0], bare).bytes == simulate("grow", whole[1], bare).bytes


def test_grow_numbers_nodes_by_cluster():
    """Parts that interleave are served as those of the graph that was numbered by hand."""
    one = network(400)
    parts = (np.arange(400) * 7 % 5).astype(np.int32)
    order = np.argsort(parts, kind="stable")
    place = np.argsort(order)
    edges = [place[one.indices[one.indptr[n] : one.indptr[n + 1]]] for n in order]
    indptr = np.concatenate([[0], np.cumsum(np.diff(one.indptr)[order])])
    other = Network(indptr, np.concatenate(edges), lambda count: parts[order], one.layers)
    small = Chip(buffer=4096)
    mixed, renumbered = (simulate("grow", each, small) for each in (one._replace(parts=lambda count: parts), other))
    assert mixed == renumbered


def test_grow_reads_what_a_cluster_uses_most_once_and_all_else_at_each_edge():
    """Two clusters of 10 nodes: sources 3 (three edges), 5 (two), 7 and 1; then 3 and 4 (twice)."""
    keys = np.array([3, 5, 3, 7, 3, 5, 1, 13, 14, 14])
    found = simulator._kept_and_missed(keys, 10, 1)
    assert found.tolist() == [3, 5, 7, 5, 1, 14, 13]
    assert simulator._kept_and_missed(keys, 10, 9).tolist() == [1, 3, 5, 7, 13, 14]


@pytest.mark.parametrize("name", DATAFLOWS)
def test_the_trace_of_an_inference_goes_out_and_comes_in_again(name, tmp_path):
    """Its requests are those that are counted from the graph; a file brings back each."""
    given_ = network(400)
    out = simulator.trace(name, given_)
    assert len(out.blocks) * HBM.block == simulate(name, given_).bytes
    assert [int((~out.writes).sum()), int(out.writes.sum())] == counted(name, given_)
    write_trace(tmp_path / "trace", HBM, out)
    back = read_trace(tmp_path / "trace", HBM)
    assert np.array_equal(back.blocks, out.blocks)
    assert np.array_equal(back.writes, out.writes)
    assert back.served(HBM) == out._replace(arrivals=np.zeros(len(out.blocks), np.int64)).served(HBM)


def counted(name: str, given_: Network) -> list[int]:
    """Blocks read and written, from the edges one by one. All of X W fits the buffer."""
    nodes, edges, read, wrote = 400, list(given_.indices), 0, 0
    for at, layer in enumerate(given_.layers):
        i, o = layer.inputs, layer.outputs
        if name == "hygcn":
            rows = (128 << 10) // (4 * i)
            for first in range(0, nodes, rows):
                begin, end = given_.indptr[first], given_.indptr[min(nodes, first + rows)]
                for source in set(edges[begin:end]):
                    read += len({byte // 64 for byte in range(4 * i * source, 4 * i * (source + 1))})
        else:
            read += math.ceil(stored(name, layer) / 64)
        read += math.ceil(i * o * (0.5 if name == "mega" else 4) / 64)
        read += math.ceil((8 if name in ("gcnax", "grow") else 4) * len(edges) / 64)
        further = given_.layers[at + 1 :]
        wrote += math.ceil((stored(name, further[0]) if further else 4 * nodes * o) / 64)
    return [read, wrote]


def test_condensed_messages_move_what_is_counted_edge_by_edge():
    """MEGA where messages of 4 bits do not fit the buffer: all of them are written, and for each part those that its
    edges need from outside once more; both are read in sequence."""
    sources, chip = np.random.default_rng(0).integers(0, 600, 1800), Chip(buffer=4000, aggregation=16 << 10)
    given_ = network(600)._replace(indptr=3 * np.arange(601), indices=sources)
    edges = [(at // 3, source) for at, source in enumerate(sources.tolist())]
    phases = list(DATAFLOWS["mega"](chip, given_))
    for layer, combined, summed in zip(given_.layers, phases[::2], phases[1::2], strict=True):
        parts = math.ceil(600 * layer.outputs * 2 / chip.aggregation)
        part = given_.parts(parts).tolist()
        needed = {(part[target], source) for target, source in edges if part[target] != part[source]}
        assert len({source for _, source in needed}) <= len(needed) < (parts - 1) * 600
        blocks = sum(math.ceil(rows * layer.outputs / 2 / 64) for rows in (600, len(needed)))
        assert len(combined.writes) == blocks
        assert len(summed.reads) == blocks + math.ceil(4 * len(edges) / 64)
        assert (np.diff(summed.reads) == 1).all()
    assert simulate("mega", given_, chip).bytes == 64 * sum(len(one.reads) + len(one.writes) for one in phases)


def test_requests_arrive_when_the_trace_says(tmp_path):
    given = Trace(np.arange(9), np.arange(9) % 2 > 0, 100 * np.arange(9))
    write_trace(tmp_path / "trace", HBM, given)
    assert (tmp_path / "trace").read_text().splitlines()[1] == f"{HBM.block:#x} WRITE 100"
    back = read_trace(tmp_path / "trace", HBM)
    assert np.array_equal(back.arrivals, given.arrivals)
    assert back.served(HBM).cycles >= 800


@pytest.mark.parametrize("line", ["0x10 READ", "0x10 ROAD 7", "ten READ 7", "0x10 READ 3", "-0x40 READ 9"])
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    (tmp_path / "trace").write_text(f"0x40 READ 5\n{line}\n")
    with pytest.raises(UserError, match="line 2"):
        read_trace(tmp_path / "trace", HBM)


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.trace cannot be read: No such file"):
        read_trace(tmp_path / "none.trace", HBM)
