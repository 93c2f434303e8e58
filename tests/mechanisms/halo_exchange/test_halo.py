"""Halo exchange: a graph that is cut over ranks computes what one rank does, and sends what the formula says."""

from __future__ import annotations

import copy
import dataclasses
import gc

import numpy as np
import pytest
import torch

from espalier import recipe as config
from espalier.comm.base import Traffic
from espalier.comm.channel import Channel
from espalier.graph.data.graph import Graph
from espalier.graph.networks.compiled_aggregate import equip
from espalier.graph.networks.gnn import Gnn, style_of
from espalier.graph.parts import halo
from espalier.graph.sampling.subgraphs import View
from espalier.graph.tasks.answers import summed_loss
from espalier.parallel.workload import to_device
from espalier.recipe.errors import UserError
from espalier.sparse.partition import by_metis, by_sweeps, clusters, installed
from espalier.sparse.rcmpp.pattern import SparsityPattern
from many_ranks import forks, ranks

NODES, WIDTH, CLASSES = 67, 12, 5
NETWORKS = {
    "gcn": config.Gcn(depth=3, width=16, dropout=0.0),
    "sage": config.Sage(depth=3, width=16, dropout=0.0),
    "gat": config.Gat(depth=3, width=16, dropout=0.0, heads=4),
    "gin": config.Gin(depth=3, width=16, dropout=0.0, norm=True),
    "maxk": config.Sage(depth=3, width=16, dropout=0.0, activation="maxk", k=3),
}


def graph_of(edges=200, nodes=NODES, weights=False) -> Graph:
    """The last seven nodes have no edge."""
    random = np.random.default_rng(3)
    ends = random.integers(0, nodes - 7, (2, edges))
    known = {"weights": random.random(edges).astype(np.float32)} if weights else {}
    labels = random.integers(0, CLASSES, nodes)
    features = random.normal(size=(nodes, WIDTH)).astype(np.float32)
    return Graph.from_edges(*ends, features=features, labels=labels, undirected=True, **known)


def parts_of(kind: str, world: int) -> np.ndarray:
    at = np.arange(NODES)
    match kind:
        case "random":
            return np.random.default_rng(5).integers(0, world, NODES)
        case "contiguous":
            return at * world // NODES
        case "unequal":  # the last rank has most nodes
            return np.minimum(np.searchsorted([2, 9, 20], at, side="right"), world - 1)
        case "metis" | "sweeps":
            graph = graph_of()
            return (by_metis if kind == "metis" else by_sweeps)(SparsityPattern.of(graph.indptr, graph.indices), world)
        case "isolated":  # the last rank has only nodes without an edge, and no boundary
            return np.where(at < NODES - 7, at % (world - 1), world - 1)
        case _:  # "empty": only the first rank has nodes
            return np.zeros(NODES, np.int64)


LABELLED = np.flatnonzero(np.arange(NODES) % 3 != 1)
"""The nodes that are trained on; the rank of the first two nodes has one."""


def one_step(network, batch, graph, owned):
    """Logits, gradients and loss of the labelled ones among `owned`, over the number of all labelled nodes."""
    features, blocks = batch
    logits = network(features, blocks)
    chosen = np.flatnonzero(np.isin(owned, LABELLED))
    loss, _ = summed_loss(logits, torch.from_numpy(graph.labels)[owned[chosen]], torch.from_numpy(chosen))
    (loss / len(LABELLED)).backward()
    return logits.detach(), [parameter.grad for parameter in network.parameters()], loss.detach()


def network_of(kind: str, dtype) -> Gnn:
    torch.manual_seed(0)
    return equip(Gnn(NETWORKS[kind], WIDTH, CLASSES)).to(dtype)


def whole(kind, graph, dtype):
    view = View(graph, style_of(NETWORKS[kind]), 3)
    batch = to_device(view.whole(), dtype=dtype)
    return one_step(network_of(kind, dtype), batch, graph, np.arange(NODES))


def over(channel, kind, graph, parts, network):
    """The same on a rank: its logits, the summed gradients and losses, its bytes."""
    view = View(graph, style_of(NETWORKS[kind]), 3)
    cut = halo.boundary(graph.indptr, graph.indices, parts, channel.size())
    own = halo.Halo.of(view.block.indptr, view.block.indices, cut, channel.rank(), channel)
    dtype = next(network.parameters()).dtype
    network = halo.equip(copy.deepcopy(network))
    before = channel.ledger.by_class().get(Traffic.HALO.value, 0)
    features = own.exchange(to_device(view.features[own.owned], dtype=dtype))  # once: they do not change
    batch = (features, to_device(own.blocks(view.block, 3), dtype=dtype))
    logits, gradients, loss = one_step(network, batch, graph, own.owned.numpy())
    sent = channel.ledger.by_class().get(Traffic.HALO.value, 0) - before
    for one in (*gradients, loss):
        torch.distributed.all_reduce(one, group=channel)
    size, rank = 8 if dtype == torch.float64 else 4, channel.rank()
    expected = halo.step_bytes(network, cut.rows, size)[rank] + size * WIDTH * cut.rows.sum(1)[rank]
    return own.owned, logits, gradients, loss, (sent, int(expected))


METIS = pytest.mark.skipif(not installed(), reason="pymetis is not installed")
CUTS = [
    *((1, "random"), (2, "random"), (3, "contiguous"), (4, "random"), (4, "unequal")),
    *((3, "sweeps"), (3, "isolated"), (3, "empty")),
]
BY_METIS = [(2, "metis"), (3, "metis"), (4, "metis")]
FP32 = [pytest.param(kind, torch.float32, marks=[] if kind == "gcn" else pytest.mark.slow) for kind in NETWORKS]


@pytest.mark.extremes
@pytest.mark.parametrize("cuts", [pytest.param(CUTS, id="any"), pytest.param(BY_METIS, id="metis", marks=METIS)])
@pytest.mark.parametrize(("kind", "dtype"), [*FP32, *((kind, torch.float64) for kind in NETWORKS)])
def test_any_number_of_ranks_equals_one(kind, dtype, cuts):
    graph, limit = graph_of(weights=kind == "gcn"), 1e-10 if dtype == torch.float64 else 1e-5
    logits, gradients, loss = whole(kind, graph, dtype)
    for world, name in cuts:
        found = ranks(world, over, kind, graph, parts_of(name, world), network_of(kind, dtype))
        for owned, own_logits, own_gradients, own_loss, (sent, expected) in found:
            torch.testing.assert_close(own_logits, logits[owned], rtol=limit, atol=limit)
            torch.testing.assert_close(own_loss, loss, rtol=limit, atol=limit)
            for one, other in zip(own_gradients, gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=limit, atol=limit)
            assert sent == expected
        assert sorted(torch.cat([one[0] for one in found]).tolist()) == list(range(NODES))
        assert sum(one[4][0] for one in found) == 0 or name != "empty"


def exchanged(channel, graph, parts):
    """Rows that crossed, and the gradient of a product with them that came back."""
    cut = halo.boundary(graph.indptr, graph.indices, parts, channel.size())
    own = halo.Halo.of(graph.indptr, graph.indices, cut, channel.rank(), channel)
    rows = torch.from_numpy(graph.features)[own.owned].double().requires_grad_()
    both = own.exchange(rows)
    weight = torch.sin(torch.arange(both.numel(), dtype=torch.float64)).view_as(both) + channel.rank()
    (both * weight).sum().backward()
    return own.nodes, both.detach(), weight, own.owned, rows.grad


@pytest.mark.parametrize("name", ["random", "unequal", "empty"])
def test_backward_is_the_transpose_of_the_exchange(name):
    graph = graph_of()
    found = ranks(3, exchanged, graph, parts_of(name, 3))
    total = torch.zeros(NODES, WIDTH, dtype=torch.float64)
    for nodes, both, weight, _, _ in found:
        torch.testing.assert_close(both, torch.from_numpy(graph.features)[nodes].double(), rtol=0, atol=0)
        total.index_add_(0, nodes, weight)
    for *_, owned, gradient in found:
        torch.testing.assert_close(gradient, total[owned], rtol=1e-12, atol=1e-12)


def over_gloo(channel, kind, graph, parts, network):
    torch.set_num_threads(1)
    return over(channel, kind, graph, parts, network)


@pytest.mark.parametrize("kind", ["sage", "gin"])
def test_own_rows_are_computed_while_rows_travel_both_ways(kind):
    """In a layer that aggregates rows as they are the map of own rows stands between a message and the wait for it."""
    graph, parts, happened = graph_of(), parts_of("random", 2), []

    def told(own, sent, received, crossing):
        arrive = halo.synchronous(own, sent, received, crossing)
        happened.append((*crossing, "leaves"))

        def done():
            arrive()
            happened.append((*crossing, "arrives"))

        return done

    def mapped(inner):
        def project(rows, weight, start=None):
            if not happened.count("own rows"):  # later ones are of sums
                happened.append("own rows")
                rows.register_hook(lambda gradient: happened.append("gradients of own rows"))
                rows = rows * 1.0  # the hook is called when the map has gone backward
            return inner(rows, weight, start)

        return project

    view = View(graph, style_of(NETWORKS[kind]), 3)
    cut = halo.boundary(graph.indptr, graph.indices, parts, 2)

    def life(channel):
        own = halo.Halo.of(view.block.indptr, view.block.indices, cut, channel.rank(), channel)
        own = dataclasses.replace(own, layer=1, transport=halo.synchronous if channel.rank() else told)
        block = own.block(view.block)._replace(halo=own)
        layer = halo.equip(network_of(kind, torch.float32)).layers[1]
        if not channel.rank():
            layer.project = mapped(layer.project)
        rows = torch.randn(len(own.owned), 16, requires_grad=True)
        layer(block, rows * 1.0).sum().backward()

    ranks(2, life)
    order = [happened.index(one) for one in [(1, False, "leaves"), "own rows", (1, False, "arrives")]]
    assert order == sorted(order)
    order = [happened.index(one) for one in [(1, True, "leaves"), "gradients of own rows", (1, True, "arrives")]]
    assert order == sorted(order)


def test_rows_that_crossed_are_freed_with_the_graph():
    """Without the collector of cycles, which does not see those through autograd."""
    graph = graph_of()
    cut = halo.boundary(graph.indptr, graph.indices, parts_of("random", 2), 2)

    def life(channel):
        own = halo.Halo.of(graph.indptr, graph.indices, cut, channel.rank(), channel)
        own.exchange(torch.ones(len(own.owned), 3, requires_grad=True) * 1.0).sum().backward()

    gc.collect()
    gc.disable()
    try:
        ranks(2, life)
        assert not [one for one in gc.get_objects() if type(one) is halo._Trip]
    finally:
        gc.enable()


def test_two_runs_over_processes_give_the_same_bits():
    graph, network = graph_of(), network_of("gat", torch.float32)
    first, second = (forks(2, over_gloo, "gat", graph, parts_of("random", 2), network) for _ in range(2))
    logits, gradients, _ = whole("gat", graph, torch.float32)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[1], other[1])
        assert all(map(torch.equal, one[2], other[2]))
        torch.testing.assert_close(one[1], logits[one[0]], rtol=1e-5, atol=1e-5)
        assert one[4][0] == one[4][1] > 0
        for mine, alone in zip(one[2], gradients, strict=True):
            torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-5)


def test_boundary_rows_are_counted_once_for_each_receiver():
    graph = graph_of()
    parts = parts_of("random", 4)
    expected = np.zeros((4, 4), int)
    for receiver in range(4):
        heard = {
            int(u) for v in np.flatnonzero(parts == receiver) for u in graph.indices[slice(*graph.indptr[v : v + 2])]
        }
        for owner in {*range(4)} - {receiver}:
            expected[owner, receiver] = sum(parts[u] == owner for u in heard)
    np.testing.assert_array_equal(halo.boundary(graph.indptr, graph.indices, parts, 4).rows, expected)


@pytest.mark.parametrize(
    ("parts", "world", "message"),
    [
        (np.zeros(NODES - 1, int), 2, "67 nodes"),
        (np.zeros(NODES), 2, "one whole number for each node"),
        (np.full(NODES, 2), 2, "parts has 2 for node 0, and there are 2 ranks"),
        (np.arange(NODES) % 3 - 1, 2, "parts has -1 for node 0"),
        (np.zeros(NODES, int), NODES + 1, "cannot be cut over 68 ranks"),
    ],
)
def test_parts_that_do_not_cover_the_graph_are_refused(parts, world, message):
    graph = graph_of()
    with pytest.raises(UserError, match=message):
        halo.boundary(graph.indptr, graph.indices, parts, world)


def test_rows_that_are_not_the_own_ones_are_refused():
    graph = graph_of()
    own = halo.Halo.of(
        graph.indptr, graph.indices, halo.boundary(graph.indptr, graph.indices, parts_of("random", 2), 2), 0
    )
    with pytest.raises(UserError, match="one row for each of"):
        own.exchange(torch.zeros(NODES, 3))


def test_parts_for_another_number_of_ranks_are_refused():
    graph = graph_of()

    def wrong(channel):
        cut = halo.boundary(graph.indptr, graph.indices, parts_of("random", 3), 3)
        halo.Halo.of(graph.indptr, graph.indices, cut, channel.rank(), channel)

    with pytest.raises(UserError, match="3 parts are not for a group of 2 ranks"):
        ranks(2, wrong)


def plain_group(channel, graph, parts):
    """The exchange over a group of torch's own."""
    group = torch.distributed.new_group(backend="gloo")
    assert not isinstance(group, Channel)
    return exchanged(group, graph, parts)


def test_any_process_group_carries_the_exchange():
    graph, parts = graph_of(), parts_of("random", 2)
    expected = ranks(2, exchanged, graph, parts)
    for found, other in zip(forks(2, plain_group, graph, parts), expected, strict=True):
        assert all(map(torch.equal, found, other))


@pytest.mark.parametrize("layer", [0, 2])
def test_nan_from_a_peer_is_named_by_rank_layer_and_node(layer):
    graph, parts = graph_of(), parts_of("contiguous", 3)
    cut = halo.boundary(graph.indptr, graph.indices, parts, 3)
    node = int(cut.node[(cut.receiver == 0) & (cut.owner == 2)][1])
    graph.features[node, 3] = np.nan

    def received(channel):
        own = dataclasses.replace(halo.Halo.of(graph.indptr, graph.indices, cut, channel.rank(), channel), layer=layer)
        own.exchange(torch.from_numpy(graph.features)[own.owned])

    expected = f"received NaN for layer {layer + 1}: the row of node {node}, which rank 2 owns"
    with pytest.raises(UserError, match=expected):
        ranks(3, received)


def test_infinite_rows_cross_as_they_are():
    graph, parts = graph_of(), parts_of("contiguous", 2)
    graph.features[::2], graph.features[1::2] = np.inf, -np.inf
    for nodes, both, *_ in ranks(2, exchanged, graph, parts):
        torch.testing.assert_close(both, torch.from_numpy(graph.features)[nodes].double(), rtol=0, atol=0)


def test_more_ranks_than_nodes_are_refused_by_the_partition_too():
    graph = graph_of()
    with pytest.raises(UserError, match="cannot be made of 67 nodes"):
        clusters(graph.indptr, graph.indices, NODES + 1)


def test_a_halo_on_another_device_is_the_same_cut():
    graph = graph_of()
    cut = halo.boundary(graph.indptr, graph.indices, parts_of("random", 2), 2)
    moved = halo.Halo.of(graph.indptr, graph.indices, cut, 0).to("meta")
    tensors = (moved.owned, moved.outer, moved.edges, moved.indptr, moved.indices, *moved.sends)
    assert all(one.device.type == "meta" for one in tensors)
    assert moved.sources == len(cut.node[cut.receiver == 0]) + int((cut.parts == 0).sum())
