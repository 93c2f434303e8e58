"""DRAM and accelerators: cases by hand, floors that nothing is below, more bits never faster; edges are served once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from espalier.errors import UserError
from espalier.quant.mega import dram, simulator
from espalier.quant.mega.condense import Condensed, condense
from espalier.quant.mega.dram import Trace, read_trace, write_trace
from espalier.quant.mega.simulator import DATAFLOWS, Chip, LayerShape, Network, simulate

HBM = dram.device("HBM2_8Gb_x128")


def graph(nodes: int, degree: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    counts = np.minimum(random.zipf(1.8, nodes) + degree - 1, nodes - 1)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return indptr, np.concatenate([np.sort(random.choice(nodes, one, replace=False)) for one in counts])


def network(nodes: int = 3000, bits: int = 2, seed: int = 0) -> Network:
    indptr, indices = graph(nodes, 4, seed)
    shapes = ((500, 64, 50), (64, 16, 32))
    layers = [
        LayerShape(i, o, np.full(nodes, n), np.full(nodes, bits), 4, nodes * (n * bits + i) / 8) for i, o, n in shapes
    ]
    return Network(indptr, indices, lambda parts: (np.arange(nodes) * parts // nodes).astype(np.int32), layers)


def test_one_read_opens_a_row_and_the_next_in_it_follows_by_the_burst():
    one, two = (dram.serve(HBM, np.arange(count)) for count in (1, 2))
    refresh = 1 + HBM.rfc / HBM.refi
    assert one.cycles == pytest.approx((HBM.rcd + HBM.cl + HBM.transfer) * refresh)
    assert two.cycles - one.cycles == pytest.approx(max(HBM.ccd_long, HBM.transfer) * refresh)
    assert (one.hits, two.hits, two.activations) == (0, 1, 1)


def test_another_row_of_one_bank_waits_until_the_first_may_be_closed():
    per_row = HBM.columns // HBM.burst
    stride = per_row * HBM.channels * HBM.banks * HBM.groups
    found = dram.serve(HBM, np.array([0, stride]))
    expected = HBM.ras + HBM.rp + HBM.rcd + HBM.cl + HBM.transfer
    assert found.hits == 0
    assert found.cycles == pytest.approx(expected * (1 + HBM.rfc / HBM.refi))


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


def test_energy_of_20_000_reads_in_100_000_cycles_is_that_of_dramsim3():
    """DRAMsim3 counts 7.03e7 (in sequence) and 8.64e7 (at random) for HBM2_8Gb_x128."""
    when = np.arange(20_000) * 5
    for blocks, known in ((np.arange(20_000), 7.03e7), (np.random.default_rng(1).integers(0, 1 << 24, 20_000), 8.64e7)):
        assert dram.serve(HBM, blocks, arrivals=when).picojoules == pytest.approx(known, rel=0.05)


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


@pytest.mark.parametrize("name", DATAFLOWS)
def test_no_accelerator_is_faster_than_its_bandwidth_or_its_products(name):
    found, chip = simulate(name, network()), Chip()
    assert found.cycles >= found.bytes / chip.dram.peak
    assert found.cycles >= 0.999 * found.compute_cycles / 2
    assert found.joules > 0


@pytest.mark.parametrize("name", DATAFLOWS)
def test_more_bandwidth_never_takes_longer(name):
    slow = Chip(dram=replace(HBM, channels=4))
    assert simulate(name, network()).cycles <= simulate(name, network(), slow).cycles
    late = Chip(dram=replace(HBM, cl=28, rcd=28, rp=28))
    assert simulate(name, network()).cycles <= simulate(name, network(), late).cycles


def test_fewer_bits_never_take_longer_or_move_more():
    results = [simulate("mega", network(bits=bits)) for bits in (1, 2, 4, 8)]
    for less, more in itertools.pairwise(results):
        assert less.cycles <= more.cycles
        assert less.bytes <= more.bytes
        assert less.joules <= more.joules


def test_a_network_of_eight_nodes_moves_what_is_counted_by_hand():
    """A ring of 8, two values in and two out. HyGCN: 8 rows of 8 bytes, 8 edges, a 2 x 2 matrix, 8 rows written: a
    block each, rows one by one."""
    indptr, indices = np.arange(9), (np.arange(8) + 1) % 8
    layer = LayerShape(2, 2, np.full(8, 2), np.full(8, 2), 4, 16.0)
    ring = Network(indptr, indices, lambda parts: np.zeros(8, np.int32), [layer])
    assert simulate("hygcn", ring).bytes == HBM.block * (8 + 1 + 1 + 1)
    assert simulate("mega", ring).bytes == HBM.block * (1 + 1 + 1)
    (phase,) = simulator.hygcn(Chip(), ring)
    assert (phase.sums, phase.products) == (16, 32)


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
    """Its requests are those that the result counts; a file brings back each."""
    out = simulator.trace(name, network(400))
    assert len(out.blocks) * HBM.block == simulate(name, network(400)).bytes
    write_trace(tmp_path / "trace", HBM, out)
    back = read_trace(tmp_path / "trace", HBM)
    assert np.array_equal(back.blocks, out.blocks)
    assert np.array_equal(back.writes, out.writes)
    assert back.served(HBM) == out.served(HBM)


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
