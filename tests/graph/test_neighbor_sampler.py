"""The sampler: a function of (seed, step, layer, node) alone, without replacement, uniform, exact at full fan-out."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from awkward import pretend_threads
from hypothesis import given
from hypothesis import strategies as st
from tests.graph.conftest import made

from espalier import recipe as config
from espalier.graph.data.graph import Graph
from espalier.graph.networks import compiled_aggregate, gnn
from espalier.graph.sampling import neighbor_sampler
from espalier.graph.sampling.neighbor_sampler import ALL, Sampler, Style

NETWORKS = {"gcn": config.Gcn, "sage": config.Sage, "gat": config.Gat, "gin": config.Gin}


def network(kind: str, **options) -> gnn.Gnn:
    torch.manual_seed(1)
    values = {"depth": 2, "width": 8, "activation": "relu", "dropout": 0.0, **options}
    return gnn.Gnn(NETWORKS[kind](**values), 5, 3).double().eval()


def style(model: gnn.Gnn) -> Style:
    return Style(model.layers[0].loops, model.layers[0].scale)


def doubled(blocks):
    from espalier.parallel.workload import to_device

    return to_device(tuple(blocks), dtype=torch.float64)


def whole_output(model, graph):
    block = neighbor_sampler.whole(graph, style(model))
    return model(torch.from_numpy(graph.features).double(), doubled([block] * len(model.layers)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
def test_full_fan_out_is_the_whole_graph(kind, kernels, weighted):
    graph = made(weights=np.random.default_rng(5).random(240) + 0.5) if weighted else made()
    model = network(kind)
    if kernels:
        compiled_aggregate.equip(model)
    drawn = Sampler(graph, style(model)).draw(np.array([3, 59, 0, 17]), (ALL, ALL))
    some = model(torch.from_numpy(graph.features[drawn.nodes]).double(), doubled(drawn.blocks))
    # Scales are computed in float32.
    torch.testing.assert_close(some, whole_output(model, graph)[[3, 59, 0, 17]], rtol=1e-6, atol=1e-6)


@given(st.integers(0, 2**31), st.integers(1, 70), st.booleans())
def test_draws_are_distinct_neighbours(seed, fanout, loops):
    graph = made(nodes=90, edges=2500, seed=2)
    seeds = np.arange(90)
    drawn = Sampler(graph, Style(loops, "none")).draw(seeds, (fanout,), seed=seed)
    block = drawn.blocks[0]
    for at, node in enumerate(seeds):
        row = drawn.nodes[block.indices[block.indptr[at] : block.indptr[at + 1]].numpy()].tolist()
        if loops:
            assert row.pop(0) == node
        near = set(graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist())
        assert len(row) == len(set(row)) == min(fanout, len(near))
        assert set(row) <= near


@pytest.mark.parametrize("fanout", [3, 60])
def test_every_neighbour_is_drawn_as_often_as_any_other(fanout):
    nodes = 81  # the middle of a star of 80
    graph = Graph.from_edges(np.arange(1, nodes), np.zeros(nodes - 1, int), features=np.ones((nodes, 1)))
    sampler = Sampler(graph, Style(False, "none"))
    counts = np.zeros(nodes)
    rounds = 2000
    for step in range(rounds):
        counts[sampler.draw(np.array([0]), (fanout,), step=step).nodes[1:]] += 1
    expected = rounds * fanout / 80
    spread = np.sqrt(expected * (1 - fanout / 80))
    assert counts[0] == 0
    assert np.abs(counts[1:] - expected).max() < 5 * spread


def test_a_batch_is_the_same_for_any_cut_and_any_threads():
    graph = made(nodes=500, edges=4000)
    sampler = Sampler(graph, Style(True, "symmetric"))
    seeds = np.random.default_rng(0).permutation(500)[:64]
    together = sampler.draw(seeds, (4, 3), seed=7, step=9)
    for cut in (1, 13, 32):
        for at in range(0, 64, cut):
            own = seeds[at : at + cut]
            apart = sampler.draw(own, (4, 3), seed=7, step=9)
            for i in range(len(own)):
                assert _row(apart, i) == _row(together, at + i)
    before = torch.get_num_threads()
    try:
        pretend_threads(min(2, numba.config.NUMBA_NUM_THREADS))
        again = sampler.draw(seeds, (4, 3), seed=7, step=9)
    finally:
        pretend_threads(before)
    assert np.array_equal(again.nodes, together.nodes)
    assert torch.equal(again.blocks[0].weights, together.blocks[0].weights)
    assert not np.array_equal(sampler.draw(seeds, (4, 3), seed=7, step=10).nodes, together.nodes)


def _row(drawn, target):
    last = drawn.blocks[-1]
    return drawn.nodes[last.indices[last.indptr[target] : last.indptr[target + 1]].numpy()].tolist()


@pytest.mark.parametrize("kind", NETWORKS)
def test_relabelling_changes_nothing_but_rounding(kind):
    from espalier.graph.data.graph import relabelled

    graph, model = made(), network(kind)
    order = np.random.default_rng(1).permutation(graph.nodes)
    there = whole_output(model, relabelled(graph, order))
    torch.testing.assert_close(there, whole_output(model, graph)[order], rtol=1e-6, atol=1e-6)


def test_drawn_sums_are_right_on_average():
    graph = made(nodes=40, edges=400)
    sampler = Sampler(graph, Style(False, "none"))
    full = (
        network("gin")
        .layers[0]
        .aggregate(neighbor_sampler.whole(graph, Style(False, "none")), torch.from_numpy(graph.features))
    )
    total = torch.zeros_like(full)
    rounds = 3000
    for step in range(rounds):
        drawn = sampler.draw(np.arange(40), (3,), step=step)
        total += gnn.aggregate(drawn.blocks[0], torch.from_numpy(graph.features[drawn.nodes]))
    assert (total / rounds - full).abs().max() < 0.12 * full.abs().max()


def test_isolated_nodes_hear_only_themselves():
    graph = Graph.from_edges([0], [1], features=np.ones((3, 5)), undirected=True)
    for kind in NETWORKS:
        model = network(kind)
        found = whole_output(model, graph)
        assert torch.isfinite(found).all()
        drawn = Sampler(graph, style(model)).draw(np.array([2]), (2, 2))
        torch.testing.assert_close(
            model(torch.from_numpy(graph.features[drawn.nodes]).double(), doubled(drawn.blocks)), found[2:]
        )
