"""Partial sums at the boundary: the rows that cross are a minimum vertex cover, and layers compute what they did."""

from __future__ import annotations

import copy
import dataclasses

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mechanisms.halo_exchange.test_halo import (
    CLASSES,
    NETWORKS,
    NODES,
    WIDTH,
    graph_of,
    network_of,
    one_step,
    parts_of,
    whole,
)

from espalier.comm.base import Traffic
from espalier.graph.data.graph import Graph
from espalier.graph.networks.gnn import style_of
from espalier.graph.parts import halo, partial_sums
from espalier.graph.sampling.subgraphs import View
from espalier.kernels import row_widths
from espalier.mechanisms.halo_exchange.quantized_exchange import Every, Sylvie
from espalier.parallel.workload import to_device
from espalier.recipe.errors import UserError
from many_ranks import ranks


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(20, 30)), min_size=1, max_size=50, unique=True))
def test_every_edge_is_served_once_by_the_fewest_rows_there_can_be(edges):
    sources, targets = np.array(edges).T
    found = partial_sums.cover(sources, targets, np.arange(len(edges)))
    by_row = np.isin(sources, found.sources)
    assert sorted(found.edges.tolist()) == np.flatnonzero(~by_row).tolist()
    assert np.isin(targets[~by_row], found.targets).all()
    assert set(found.targets) == set(targets[~by_row])
    graph = networkx.Graph(edges)
    matching = networkx.bipartite.maximum_matching(graph, set(sources.tolist()))
    assert len(found.sources) + len(found.targets) == len(matching) // 2


def hub_graph() -> Graph:
    """Two nodes that everybody hears from and that hear from everybody, besides some edges."""
    random = np.random.default_rng(4)
    others = np.arange(2, NODES - 7)
    ends = np.concatenate([random.integers(0, NODES - 7, (2, 60)), [others, others % 2]], 1)
    features = random.normal(size=(NODES, WIDTH)).astype(np.float32)
    weights = random.random(ends.shape[1]).astype(np.float32)
    labels = random.integers(0, CLASSES, NODES)
    return Graph.from_edges(*ends, features=features, labels=labels, undirected=True, weights=weights)


def over(channel, kind, graph, parts, network, transport=None):
    """A step on a rank, through sums: as `test_halo.over`, and the rows that crossed."""
    view = View(graph, style_of(NETWORKS[kind]), 3)
    cut = halo.boundary(graph.indptr, graph.indices, parts, channel.size())
    own, first = partial_sums.summing(view.block, cut, channel.rank(), channel)
    dtype = next(network.parameters()).dtype
    network = halo.equip(copy.deepcopy(network))
    features = own.exchange(to_device(view.features[own.owned], dtype=dtype))
    before = channel.ledger.by_class().get(Traffic.HALO.value, 0)
    if transport is not None:
        own = dataclasses.replace(own, transport=transport())
    batch = (features, own.by_layer(to_device(first, dtype=dtype), 3))
    logits, gradients, loss = one_step(network, batch, graph, own.owned.numpy())
    sent = channel.ledger.by_class().get(Traffic.HALO.value, 0) - before
    for one in (*gradients, loss):
        torch.distributed.all_reduce(one, group=channel)
    return own.owned, logits, gradients, loss, (sent, int(sum(own.leaving(halo.Crossing(1, False)))), cut.rows)


@pytest.mark.extremes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
def test_any_number_of_ranks_equals_one(kind, dtype):
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    for graph in (graph_of(weights=kind == "gcn"), hub_graph()):
        logits, gradients, loss = whole(kind, graph, dtype)
        for world, name in [(1, "random"), (2, "random"), (3, "isolated"), (4, "unequal"), (3, "empty")]:
            found = ranks(world, over, kind, graph, parts_of(name, world), network_of(kind, dtype))
            for owned, own_logits, own_gradients, own_loss, _ in found:
                torch.testing.assert_close(own_logits, logits[owned], rtol=limit, atol=limit)
                torch.testing.assert_close(own_loss, loss, rtol=limit, atol=limit)
                for one, other in zip(own_gradients, gradients, strict=True):
                    torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def test_hubs_send_and_receive_a_tenth_of_the_rows():
    graph, parts = hub_graph(), np.minimum(np.arange(NODES), 2) // 2  # both hubs in a part of their own
    found = ranks(2, over, "sage", graph, parts, network_of("sage", torch.float32))
    plain, crossed = found[0][4][2].sum(), sum(one[4][1] for one in found)
    assert 10 * crossed <= plain


def test_bits_by_degree_follow_in_degrees_of_the_whole_graph_where_sums_stand_for_edges():
    graph, parts = hub_graph(), parts_of("random", 2)
    block = View(graph, style_of(NETWORKS["gcn"]), 2).block
    degrees, indices = block.indptr.diff().numpy(), block.indices.numpy()
    cut = halo.boundary(block.indptr, block.indices, parts, 2)
    every = partial_sums.covers(block, cut)
    targets = np.repeat(np.arange(NODES), degrees)

    def seen(channel):
        own, _ = partial_sums.summing(block, cut, channel.rank(), channel, every)
        return [one.numpy() for one in halo.degree_shares(own)]

    found = ranks(2, seen)
    for rank in (0, 1):
        one = every[rank, 1 - rank]
        assert len(one.targets)
        sums = [degrees[indices[one.edges[targets[one.edges] == node]]].max() for node in one.targets]
        expected = row_widths.shares(np.concatenate([degrees[one.sources], sums]))
        np.testing.assert_array_equal(found[rank][0], expected)
        np.testing.assert_array_equal(found[1 - rank][1], expected)


def test_sums_cross_with_few_bits():
    graph, parts = hub_graph(), parts_of("random", 2)
    exact = ranks(2, over, "gcn", graph, parts, network_of("gcn", torch.float32))
    rough = ranks(2, over, "gcn", graph, parts, network_of("gcn", torch.float32), lambda: Sylvie(Every(8)))
    for one, other in zip(rough, exact, strict=True):
        assert one[4][0] < other[4][0]
        torch.testing.assert_close(one[1], other[1], rtol=0.1, atol=0.1)
        assert not torch.equal(one[1], other[1])


@pytest.mark.parametrize("transport", [halo.synchronous, Sylvie(Every(2))])
def test_a_row_that_is_not_finite_is_named_by_the_rank_that_owns_it_not_by_whose_sum_it_is_in(transport):
    graph, parts = hub_graph(), parts_of("random", 2)
    view = View(graph, style_of(NETWORKS["sage"]), 2)
    cut = halo.boundary(graph.indptr, graph.indices, parts, 2)
    sums = partial_sums.summing(view.block, cut, 1)[0].sums
    alone = np.flatnonzero(np.diff(sums.tocsr().indptr) > 1)  # rows that leave as sums
    place = sums.tocsr()[alone].indices[-1]
    node = int(np.flatnonzero(parts == 1)[place])

    def sends(channel):
        own, _ = partial_sums.summing(view.block, cut, channel.rank(), channel)
        own = dataclasses.replace(own, layer=1, transport=transport)
        features = torch.from_numpy(graph.features).float()
        features[node, 3] = np.nan
        own.exchange(features[own.owned])

    with pytest.raises(UserError, match=f"Rank 1 cannot send sums with the row of node {node} for layer 2"):
        ranks(2, sends)
