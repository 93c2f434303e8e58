"""Sylvie's laws: whole values to the bit, few bits without bias, late rows as simulated, bytes as in the formula."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from tests.mechanisms.halo_exchange.test_halo import LABELLED, METIS, NETWORKS, graph_of, network_of, parts_of

from espalier.comm.base import Traffic
from espalier.graph.networks.gnn import style_of
from espalier.graph.parts import halo
from espalier.graph.sampling.subgraphs import View
from espalier.graph.tasks.answers import summed_loss
from espalier.kernels import quantize_rows, row_bits, row_widths
from espalier.mechanisms.halo_exchange import quantized_exchange as sylvie
from espalier.mechanisms.halo_exchange.options import HaloOptions
from espalier.mechanisms.halo_exchange.quantized_exchange import Adaptive, ByPeer, Every, Sylvie
from espalier.mechanisms.local_rounds.round_length import Length
from espalier.recipe.errors import Corrupted, UserError
from espalier.track.decision_log import Decisions, Recorded
from many_ranks import forks, ranks

STEPS, RATE = 7, 0.3
AGES = [[0, 0, 2], [0, 0, 3], [2, 3, 0]]  # steps that rows may be old, by reader and owner


def part_of(channel, kind, graph, parts):
    view = View(graph, style_of(NETWORKS[kind]), 3)
    cut = halo.boundary(graph.indptr, graph.indices, parts, channel.size())
    return view, halo.Halo.of(view.block.indptr, view.block.indices, cut, channel.rank(), channel)


def loss_of(logits, graph, owned):
    chosen = np.flatnonzero(np.isin(owned, LABELLED))
    labels = torch.from_numpy(graph.labels)[owned[chosen]]
    return summed_loss(logits, labels, torch.from_numpy(chosen))[0] / len(LABELLED)


def descend(network, gradients):
    """One step against gradients, by rank, that are added up in order of rank."""
    with torch.no_grad():
        for parameter, *each in zip(network.parameters(), *gradients, strict=True):
            total = each[0].clone()
            for one in each[1:]:
                total += one
            parameter.sub_(RATE * total)
        network.zero_grad()


def train(channel, kind, graph, parts, made=None, network=None):
    """Logits of this rank's nodes after each of the steps, and bytes of halos by step."""
    view, own = part_of(channel, kind, graph, parts)
    transport = halo.synchronous if made is None else made()
    features = own.exchange(view.features[own.owned])
    travelling = dataclasses.replace(own, transport=transport)
    blocks = travelling.blocks(view.block, 3)
    network, found, sent = halo.equip(copy.deepcopy(network)), [], []
    for step in range(STEPS):
        before = channel.ledger.by_class().get(Traffic.HALO.value, 0)
        if isinstance(transport, Sylvie):
            transport.begin(step)
        logits = network(features, blocks)
        loss_of(logits, graph, own.owned.numpy()).backward()
        sent.append(channel.ledger.by_class().get(Traffic.HALO.value, 0) - before)
        every = [None] * channel.size()
        torch.distributed.all_gather_object(every, [parameter.grad for parameter in network.parameters()])
        descend(network, every)
        found.append(logits.detach())
    if isinstance(transport, Sylvie):
        transport.drain()
    return found, sent


class FakeHalo:
    """Takes down the rows that a layer would exchange, and joins them with given ones; adds to their gradient."""

    def __init__(self, outer=None, homecoming=None):
        self.outer, self.homecoming, self.rows = outer, homecoming, None

    def exchange(self, rows):
        self.rows = rows.detach()
        if self.outer is None:
            return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:]).expand(self.more, *rows.shape[1:])])
        rows = rows.view_as(rows)
        rows.register_hook(lambda gradient: self.homecoming(gradient.clone()))
        return torch.cat([rows, self.outer])

    both = exchange

    def begin(self, rows):
        return self


class Simulator:
    """All parts in one process, layer by layer, without messages: rows of others are of as many steps before as `ages`
    says [reader, owner]; one step before, where it is None."""

    def __init__(self, kind, graph, parts, world, network, ages=None):
        self.ages, self.parts = np.ones((world, world), int) if ages is None else np.array(ages), np.asarray(parts)
        self.graph, view = graph, View(graph, style_of(NETWORKS[kind]), 3)
        cut = halo.boundary(graph.indptr, graph.indices, parts, world)
        self.owns = [halo.Halo.of(view.block.indptr, view.block.indices, cut, rank) for rank in range(world)]
        self.blocks = [one.block(view.block) for one in self.owns]
        self.features = view.features
        self.network = halo.equip(copy.deepcopy(network))
        self.old_rows, self.old_gradients = {}, {}

    def layer(self, at, inputs, late):
        """(outputs, rows of others, hooks) by part."""
        made, sent = [], torch.zeros(0)
        fakes = [FakeHalo() for _ in self.owns]
        if at:
            for fake, one, block, x in zip(fakes, self.owns, self.blocks, inputs, strict=True):
                fake.more = len(one.outer)
                self.network.step(at, block._replace(halo=fake), x)
            sent = torch.zeros(self.graph.nodes, *fakes[0].rows.shape[1:])
            for fake, one in zip(fakes, self.owns, strict=True):
                sent[one.owned] = fake.rows
        known = self.old_rows[at] = [*self.old_rows.get(at, []), sent] if late else [sent]
        for rank, (fake, one, block, x) in enumerate(zip(fakes, self.owns, self.blocks, inputs, strict=True)):
            if at:
                owner = self.parts[one.outer.numpy()]
                oldest = (len(known) - 1 - torch.from_numpy(self.ages[rank][owner])).clamp(min=0)
                fake.outer = torch.stack(known)[oldest, one.outer].requires_grad_()
            else:
                fake.outer = None
            made.append(self.network.step(at, block._replace(halo=fake) if at else block, x))
        return made, fakes

    def home(self, rank, gradients):
        """Adds the gradients that others have of this part's rows."""

        def add(found):
            for peer, other in enumerate(self.owns):
                ends = np.cumsum([0, *other.receives])
                used = gradients[max(0, len(gradients) - 1 - self.ages[rank][peer])][peer]
                found.index_add_(0, self.owns[rank].sends[peer], used[ends[rank] : ends[rank + 1]])
            return found

        return add

    def step(self, late):
        """Logits by part; updates the network."""
        parameters, states = list(self.network.parameters()), []
        rows = [self.features[one.nodes] for one in self.owns]
        for at in range(3):
            rows = [x.detach().requires_grad_(at > 0) for x in rows]
            made, fakes = self.layer(at, rows, late)
            states.append((rows, made, fakes))
            rows = made
        totals = [[torch.zeros_like(one) for one in parameters] for _ in self.owns]
        above = [None] * len(self.owns)
        targets = [loss_of(y, self.graph, one.owned.numpy()) for y, one in zip(rows, self.owns, strict=True)]
        for at in (2, 1, 0):
            rows, made, fakes = states[at]
            targets = made if at < 2 else targets
            if at:
                fresh = [
                    torch.autograd.grad(target, fake.outer, weight, retain_graph=True)[0]
                    for target, fake, weight in self._hooked(targets, fakes, above)
                ]
                self.old_gradients[at] = [*self.old_gradients.get(at, []), fresh] if late else [fresh]
            found = []
            for rank, (target, fake, weight) in enumerate(zip(targets, fakes, above, strict=True)):
                fake.homecoming = self.home(rank, self.old_gradients[at]) if at else None
                every = torch.autograd.grad(
                    target, parameters + rows[rank : rank + 1] * (at > 0), weight, allow_unused=True
                )
                for total, part in zip(totals[rank], every, strict=False):
                    total.add_(0 if part is None else part)
                found.append(every[-1])
            above = found
        logits = [y.detach() for y in states[2][1]]
        descend(self.network, totals)
        return logits

    def _hooked(self, targets, fakes, above):
        for target, fake, weight in zip(targets, fakes, above, strict=True):
            fake.homecoming = lambda gradient: gradient
            yield target, fake, weight


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gcn", pytest.param("sage", marks=pytest.mark.slow), "gat", "gin"])
@pytest.mark.parametrize("synchronize", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_late_rows_give_the_bits_of_a_simulator_of_stale_halos(kind, synchronize):
    graph, network = graph_of(), network_of(kind, torch.float32)
    for world, name in [(2, "random"), (3, "isolated"), (4, "unequal")]:
        parts = parts_of(name, world)
        simulator = Simulator(kind, graph, parts, world, network)
        late = [step > 0 and not (synchronize and (step + 1) % synchronize == 0) for step in range(STEPS)]
        expected = [simulator.step(one) for one in late]
        made = lambda: Sylvie(Every(synchronize=synchronize))  # noqa: E731
        found = ranks(world, train, kind, graph, parts, made, network)
        for rank, (logits, _) in enumerate(found):
            for step in range(STEPS):
                assert torch.equal(logits[step], expected[step][rank]), (world, rank, step)


@pytest.mark.parametrize(("kind", "synchronize"), [("gcn", 0), ("gat", 6)])
def test_rows_of_unlike_age_give_the_bits_of_a_simulator_with_these_ages(kind, synchronize):
    graph, network, parts = graph_of(), network_of(kind, torch.float32), parts_of("random", 3)
    simulator = Simulator(kind, graph, parts, 3, network, AGES)
    late = [step > 0 and not (synchronize and (step + 1) % synchronize == 0) for step in range(STEPS)]
    expected = [simulator.step(one) for one in late]

    def life(channel):
        made = lambda: Sylvie(Every(synchronize=synchronize), peers=ByPeer(ages=AGES[channel.rank()]))  # noqa: E731
        return train(channel, kind, graph, parts, made, network)

    for rank, (logits, _) in enumerate(ranks(3, life)):
        for step in range(STEPS):
            assert torch.equal(logits[step], expected[step][rank]), (rank, step)


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "random") for kind in NETWORKS), *(pytest.param(kind, "metis", marks=METIS) for kind in ("gcn", "sage"))],
)
def test_whole_values_in_synchronous_steps_are_the_plain_exchange_to_the_bit(kind, name):
    graph, network, parts = graph_of(), network_of(kind, torch.float32), parts_of(name, 3)
    plain = ranks(3, train, kind, graph, parts, None, network)
    found = ranks(3, train, kind, graph, parts, lambda: Sylvie(Every()), network)
    for (one, _), (other, _) in zip(found, plain, strict=True):
        assert all(map(torch.equal, one, other))


def expected_bytes(own, widths, columns, alone):
    """Of a step that leaves this rank: layers 2 and 3, forward and backward. `alone`: every row has a scale."""
    total = 0
    for layer in (1, 2):
        for backward in (False, True):
            counts = own.leaving(halo.Crossing(layer, backward))
            total += sum(sylvie.STAMP for count in counts if count)
            if alone:
                total += int((4 + np.ceil(np.asarray(widths[backward], int) * columns[layer] / 8)).sum())
                continue
            bits, together = int(widths[backward][0]), 64 // columns[layer]
            total += sum(-(-count // together) * (4 + -(-bits * columns[layer] * together // 8)) for count in counts)
    return total


@pytest.mark.extremes
@pytest.mark.parametrize("by_degree", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_of_few_bits_are_those_of_the_formula(bits, by_degree):
    graph, network, parts = graph_of(), network_of("gcn", torch.float32), parts_of("random", 3)

    def counted(channel):
        made = lambda: Sylvie(Every(bits), by_degree=by_degree)  # noqa: E731
        _, sent = train(channel, "gcn", graph, parts, made, network)
        _, own = part_of(channel, "gcn", graph, parts)
        shares = halo.degree_shares(own)
        every = [row_widths.widths_of(bits, one.numpy()) for one in shares]
        widths = every if by_degree else [np.full_like(one, bits) for one in every]
        return sent, expected_bytes(own, widths, {1: 16, 2: 5}, by_degree), [one.tolist() for one in shares], own

    found = ranks(3, counted)
    view = View(graph, style_of(NETWORKS["gcn"]), 3)
    cut = halo.boundary(view.block.indptr, view.block.indices, parts, 3)
    planned = sylvie.step_bytes(network, cut.rows, HaloOptions(bits=bits, by_degree=by_degree)).sum(1)
    for (sent, expected, shares, own), plan in zip(found, planned, strict=True):
        assert plan == expected
        leaving = own.leaving(halo.Crossing(0, False))
        assert sent == [expected + by_degree * sum(leaving)] + [expected] * (STEPS - 1)  # shares of degrees, once
        for one, part in zip(torch.tensor(shares[0]).split(leaving), own.sends, strict=True):
            order = own.indptr.diff()[part]
            assert (torch.sort(one).indices == torch.argsort(order, stable=True)).all() or not len(one)


def test_the_mean_of_rows_with_bits_by_degree_is_the_row():
    """A z-test by value: their variance is a quarter of the squared step between codes at most."""
    graph, parts, draws = graph_of(), parts_of("random", 2), 400

    def seen(channel):
        _, own = part_of(channel, "gcn", graph, parts)
        transport = Sylvie(Every(1), by_degree=True)
        travelling = dataclasses.replace(own, transport=transport, layer=1)
        rows = torch.from_numpy(np.random.default_rng(2).normal(size=(graph.nodes, 40)).astype(np.float32))[own.owned]
        exact, total = own.exchange(rows)[len(own.owned) :].double(), 0.0
        for step in range(draws):
            transport.begin(step)
            total = total + travelling.exchange(rows)[len(own.owned) :].double()
        widths = row_widths.widths_of(1, halo.degree_shares(own)[1].numpy())
        return exact, total / draws, torch.from_numpy(widths)

    for exact, mean, widths in ranks(2, seen):
        assert set(widths.tolist()) == {1, 2, 4, 8}
        step = (exact.amax(1) - exact.amin(1)) * 1.02 / (2.0 ** widths.double() - 1)  # with rounded scales
        z = (mean - exact).abs() / (step / (2 * draws**0.5))[:, None]
        assert float(z.max()) < 5
        assert float(z.square().mean()) > 0.1, "some of them do vary"


@pytest.mark.parametrize(("bits", "delta"), [(32, False), (8, True)])
def test_rows_of_each_peer_are_as_old_as_its_bound_says_and_never_older(bits, delta):
    """Rows are the number of the step; the 6th waits for all, and one is left out as after a restart."""
    graph = graph_of()
    cut = halo.boundary(graph.indptr, graph.indices, np.arange(graph.nodes) % 3, 3)

    def life(channel):
        rank, found, begun = channel.rank(), [], 0
        own = halo.Halo.of(graph.indptr, graph.indices, cut, rank, channel)
        transport = Sylvie(Every(bits, 6), delta=delta, peers=ByPeer(ages=AGES[rank]))
        travelling = dataclasses.replace(own, transport=transport, layer=1)
        for step in (*range(9), 12, 13, 14, 15):
            transport.begin(step)
            begun = step if step in (0, 5, 12) else begun
            rows = torch.full((len(own.owned), 3), float(step), requires_grad=True)
            both = travelling.exchange(rows)
            (both * (step + 1.0)).sum().backward()
            for peer, part in enumerate(both[len(own.owned) :].detach().split(own.receives)):
                assert torch.allclose(part, torch.tensor(float(max(begun, step - AGES[rank][peer]))), atol=0.05)
            home = [len(one) * (1 + max(begun, step - AGES[rank][peer])) for peer, one in enumerate(own.sends)]
            assert float(rows.grad.sum()) / 3 == pytest.approx(sum(home) + (step + 1) * len(own.owned), rel=0.01)
            found.append(step)
        transport.drain()
        return found

    assert all(len(one) == 13 for one in ranks(3, life))


class Tampered(Sylvie):
    """Reads another byte at a place of the stamp of what rank 1 sent forward."""

    place = value = 0

    def _read(self, sent, received, crossing, ages):
        flight = sent[1][-1]
        message = flight.arriving.split(flight.layout.splits)[1]
        if len(message) and not crossing.backward:
            message[self.place] = self.value
        super()._read(sent, received, crossing, ages)


@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, 3, "rows for layer 2 of step 3 with {bits}"),
        (4, 2, "rows for layer 3 of step 4 with {bits}"),
        (6, 1, "gradients for layer 2 of step 4 with {bits}"),
        (7, 8, "rows for layer 2 of step 4 with 8"),
    ],
)
def test_a_message_of_another_step_layer_direction_or_width_is_refused(bits, place, value, said):
    """As an error that is raised without Python's assertions too."""
    graph, parts = graph_of(), parts_of("random", 2)

    def life(channel):
        _, own = part_of(channel, "gcn", graph, parts)
        transport = Tampered(Every(bits))
        transport.place, transport.value = place, value
        transport.begin(4)
        dataclasses.replace(own, transport=transport, layer=1).exchange(torch.ones(len(own.owned), 3))

    awaited = f"rows for layer 2 of step 4 with {bits} bits a value were to come"
    expected = f"A message of rank 1 in step 4 is {said.format(bits=bits)} bits a value, where {awaited}"
    with pytest.raises(Corrupted, match=expected):
        ranks(2, life)


class Older(Sylvie):
    """Reads late rows where fresh ones are due."""

    def _read(self, sent, received, crossing, ages):
        super()._read(sent, received, crossing, [0 for _ in ages])


def test_rows_that_are_older_than_they_may_be_are_refused():
    graph, parts = graph_of(), parts_of("random", 2)

    def life(channel):
        _, own = part_of(channel, "gcn", graph, parts)
        transport = Older(Every(32, 0))
        travelling = dataclasses.replace(own, transport=transport, layer=2)
        for step in range(2):
            transport.begin(step)
            travelling.exchange(torch.ones(len(own.owned), 3))

    said = r"Rows for layer 3 of rank [01] are 1 step old in step 1\.\n  why: they may be 0 steps old"
    with pytest.raises(Corrupted, match=said):
        ranks(2, life)


def test_fresh_rows_of_a_near_peer_do_not_wait_for_a_far_one():
    """The far rank comes only after the near ones are through with their step."""
    graph = graph_of()
    cut = halo.boundary(graph.indptr, graph.indices, np.arange(graph.nodes) % 3, 3)

    def life(channel):
        rank = channel.rank()
        own = halo.Halo.of(graph.indptr, graph.indices, cut, rank, channel)
        transport = Sylvie(Every(32, 0), peers=ByPeer(ages=[[0, 0, 1], [0, 0, 1], [1, 1, 0]][rank]))
        travelling = dataclasses.replace(own, transport=transport, layer=1)
        for step in range(2):
            transport.begin(step)
            if step and rank == 2:
                for near in range(2):
                    channel.recv([torch.zeros(1)], near, 99).wait()
            travelling.exchange(torch.full((len(own.owned), 3), float(step)))
            if step and rank < 2:
                channel.send([torch.zeros(1)], 2, 99).wait()
        transport.drain()

    forks(3, life)


def test_each_peer_layer_and_direction_has_its_bits():
    """Errors of rows from a peer of more bits are smaller, and bytes are those of the formula by crossing and pair."""
    graph, network, parts = graph_of(), network_of("gcn", torch.float32), parts_of("random", 3)
    draw = np.random.default_rng(3)
    bits = {one: draw.choice([1, 2, 4, 8], (3, 3)) for one in sylvie.crossings(network)}
    bits[halo.Crossing(1, False)] = np.array([[1, 8, 1], [8, 1, 1], [1, 1, 1]])
    bits[halo.Crossing(2, True)] = np.full((3, 3), 32)

    def counted(channel):
        rank = channel.rank()
        peers = lambda crossing: (bits[crossing][rank].tolist(), bits[crossing][:, rank].tolist())  # noqa: E731
        made = lambda: Sylvie(Every(1), peers=ByPeer(peers))  # noqa: E731
        _, sent = train(channel, "gcn", graph, parts, made, network)
        _, own = part_of(channel, "gcn", graph, parts)
        rows = torch.from_numpy(np.random.default_rng(1).normal(size=(graph.nodes, 80)).astype(np.float32))[own.owned]
        found = dataclasses.replace(own, transport=made(), layer=1).exchange(rows) - own.exchange(rows)
        errors = [float(one.abs().mean()) for one in found[len(own.owned) :].split(list(own.receives)) if len(one)]
        return sent, errors

    view = View(graph, style_of(NETWORKS["gcn"]), 3)
    cut = halo.boundary(view.block.indptr, view.block.indices, parts, 3)
    expected = sylvie.step_bytes(network, cut.rows, HaloOptions(bits=1), 4, bits)
    for rank, (sent, errors) in enumerate(ranks(3, counted)):
        assert sent == [expected[rank].sum()] * STEPS
        if rank < 2:
            assert errors[0] < 0.05 * errors[1]


def over_sockets(channel, graph, parts, network, bits):
    torch.set_num_threads(1)
    made = lambda: Sylvie(Every(bits, 3), seed=5)  # noqa: E731
    return train(channel, "gcn", graph, parts, made, network)


def test_late_rows_of_few_bits_are_the_same_over_processes_and_in_another_run():
    graph, network, parts = graph_of(), network_of("gcn", torch.float32), parts_of("random", 2)
    runs = [forks(2, over_sockets, graph, parts, network, 1) for _ in range(2)]
    threads = ranks(2, over_sockets, graph, parts, network, 1)
    for one, other, third in zip(*runs, threads, strict=True):
        assert all(map(torch.equal, one[0], other[0]))
        assert all(map(torch.equal, one[0], third[0]))
        assert one[1] == other[1] == third[1]


def test_one_bit_rows_arrive_without_bias():
    """A z-test of every value of the halo rows, over seeds of the transport."""
    graph, parts, draws = graph_of(), parts_of("random", 2), 300

    def drawn(channel):
        _, own = part_of(channel, "gcn", graph, parts)
        rows = torch.from_numpy(np.random.default_rng(1).normal(size=(graph.nodes, 9)).astype(np.float32))[own.owned]
        exact, found = own.exchange(rows), []
        for seed in range(draws):
            transport = Sylvie(Every(1), seed=seed)
            transport.begin(0)
            found.append(dataclasses.replace(own, transport=transport).exchange(rows))
        return exact, torch.stack(found)

    for exact, found in ranks(2, drawn):
        error = found.double().mean(0) - exact
        spread = found.double().std(0).clamp(min=1e-9)
        outer = spread > 1e-6
        z = (error / (spread / draws**0.5))[outer]
        assert outer.any()
        assert z.abs().max() < 5
        assert abs(float(z.square().mean()) - 1) < 0.25


@pytest.mark.parametrize("ages", [None, [2, 2, 2]])
def test_ranks_without_nodes_or_boundary_send_nothing_of_few_bits(ages):
    graph, network, parts = graph_of(), network_of("gcn", torch.float32), parts_of("empty", 3)
    found = ranks(3, train, "gcn", graph, parts, lambda: Sylvie(Every(1, 3), peers=ByPeer(ages=ages)), network)
    assert [len(logits[-1]) for logits, _ in found] == [graph.nodes, 0, 0]
    assert all(not any(sent) for _, sent in found)


def test_a_row_that_is_not_finite_is_named_by_rank_layer_and_node():
    graph, parts = graph_of(), parts_of("contiguous", 3)
    cut = halo.boundary(graph.indptr, graph.indices, parts, 3)
    node = int(cut.node[(cut.receiver == 0) & (cut.owner == 2)][1])
    graph.features[node, 3] = np.inf

    def sent(channel):
        own = halo.Halo.of(graph.indptr, graph.indices, cut, channel.rank(), channel)
        dataclasses.replace(own, layer=1, transport=Sylvie(Every(2))).exchange(
            torch.from_numpy(graph.features)[own.owned]
        )

    with pytest.raises(UserError, match=f"Rank 2 cannot send the row of node {node} for layer 2: it is not finite"):
        ranks(3, sent)


def test_ranks_in_unlike_steps_notice_it():
    graph, parts = graph_of(), parts_of("random", 2)

    def mixed(channel):
        own = part_of(channel, "gcn", graph, parts)[1]
        transport = Sylvie(Every(synchronize=0))
        transport.begin(channel.rank())
        dataclasses.replace(own, transport=transport).exchange(torch.from_numpy(graph.features)[own.owned])

    with pytest.raises(Corrupted, match=r"A message of rank [01] in step [01] is rows for layer 1 of step [01]"):
        ranks(2, mixed)


def test_a_step_that_does_not_follow_the_last_is_synchronous():
    graph, parts = graph_of(), parts_of("random", 2)

    def left_out(channel):
        own = part_of(channel, "gcn", graph, parts)[1]
        transport = Sylvie(Every(synchronize=0))
        travelling = dataclasses.replace(own, transport=transport)
        rows = torch.from_numpy(graph.features)[own.owned]
        seen = []
        for step in (0, 1, 2, 5, 6):
            transport.begin(step)
            seen.append(float(travelling.exchange(torch.full_like(rows, step))[-1, 0]))
        return seen

    assert ranks(2, left_out) == [[0, 0, 1, 5, 5]] * 2


def test_one_bit_at_width_256_is_less_than_a_27th():
    assert 27 * sylvie.row_bytes(256, 1) <= sylvie.row_bytes(256, 32)
    assert sylvie.row_bytes(256, 1) == quantize_rows.SCALES + row_bits.row_bytes(256, 1) == 36


def test_bits_double_where_the_loss_slows_down_and_halve_where_it_speeds_up():
    policy = Adaptive(2, 4)
    for loss in np.exp(-0.05 * np.arange(40)):  # the average's speed rises at first, then falls
        policy.heard([float(loss)]).turned({})
    assert policy.bits == 8
    assert not policy.late
    assert policy.next(0).synchronous
    for loss in 1 + 0.01 * np.arange(30) ** 2:
        policy.heard([float(loss)]).turned({})
    assert policy.bits < 8
    assert policy.late
    assert [policy.next(step).synchronous for step in range(4)] == [False, False, False, True]


def test_equal_speeds_decide_nothing_and_a_restored_rule_goes_on_as_it_was():
    policy = Adaptive(2, 4)
    for _ in range(50):
        policy.heard([0.0]).turned({})
    assert policy.bits == 2
    assert policy.late
    losses = np.random.default_rng(0).normal(size=60).cumsum()
    whole, first = Adaptive(2, 4), Adaptive(2, 4)
    for loss in losses[:30]:
        whole.heard([loss]).turned({}), first.heard([loss]).turned({})
    second = Adaptive(1, 4)
    second.load_state_dict(first.state_dict())
    for loss in losses[30:]:
        whole.heard([loss]).turned({}), second.heard([loss]).turned({})
        assert whole.next(0) == second.next(0)
    assert whole.state_dict() == second.state_dict()


def test_what_a_log_says_counts_more_than_what_is_heard():
    """The rule of bits and lateness and that of CO2's rounds are replayed by the same `Decisions`."""
    losses = np.random.default_rng(0).normal(size=80).cumsum()
    first, told = Decisions(Adaptive(2, 4), "speed of the loss"), []
    first.tell = lambda *decided: told.append(decided)
    chosen = []
    for step, loss in enumerate(losses):
        first.turn(step)
        chosen.append(first.now.next(step))
        first.heard([loss])
    assert {rule for rule, _, _ in told} == {"graph.halo.bits", "graph.halo.late"} == set(first.now.values)
    logs = {
        rule: Recorded(tuple((at, value) for name, at, value in told if name == rule), 70) for rule in first.now.values
    }
    again = Decisions(Adaptive(2, 4), "speed of the loss")
    again.replay({rule: [Recorded(), log] for rule, log in logs.items()})
    begun = min(at for _, at, _ in told)
    for step in range(len(losses)):
        again.turn(step)
        assert again.now.next(step) == (chosen[step] if begun <= step <= 70 else again.now.next(step))
        again.heard([0.0])
    rounds = Decisions(Length(4, True), "measured waits")
    rounds.replay({"sync.steps": [Recorded(((0, 4), (8, 6)), 12)]})
    for step, steps in ((0, 4), (8, 6), (14, 9)):
        rounds.heard([9.0])
        rounds.turn(step)
        assert rounds.now.values == {"sync.steps": steps}
