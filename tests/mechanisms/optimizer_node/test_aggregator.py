"""Aggregators change no bit of the sums, and what crosses the link to the node does not grow with the workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nodes import FAST, TOKEN, again, client, equal, free_port, gradient, job, node, pulled, push_all
from test_recovery import begun, train
from torch import Tensor

from espalier.mechanisms.optimizer_node.aggregator import Aggregator
from espalier.mechanisms.optimizer_node.role import site_of
from espalier.mechanisms.optimizer_node.wire import Address
from espalier.parallel.layer_client import StepLost
from espalier.plan.axes.node_cost import Route
from espalier.plan.axes.node_layout import NodeJob
from espalier.plan.base import Plan, Rank


@contextmanager
def sites(one: NodeJob, address: Address, count: int) -> Iterator[list[Aggregator]]:
    made = [
        Aggregator(
            replace(one, workers=one.workers // count),
            ([address], TOKEN),
            socket.create_server(("127.0.0.1", 0)),
            site,
            FAST,
        ).start()
        for site in range(count)
    ]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def trained(one: NodeJob, addresses: list[Address], steps: int = 3) -> list[Tensor]:
    """The parameters, sums of totals and norms that all workers have got."""

    def work(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        worker = client(addresses[rank], one, rank)
        totals = []
        for step in range(steps):
            pulled(worker, step)
            push_all(worker, step, [gradient(one, layer, step, rank) for layer in range(3)])
            sums, norms = worker.totals(step, torch.tensor([0.1 * 10**rank, 1.0], dtype=torch.float64))
            totals += [sums, norms]
            worker.move(step, 1.0 if step else 0.5, 1.0, following=1.0)
        found = pulled(worker, steps)
        worker.close()
        return found, totals

    with ThreadPoolExecutor(len(addresses)) as pool:
        results = list(pool.map(work, range(len(addresses))))
    assert all(equal(results[0][0], other[0]) and equal(results[0][1], other[1]) for other in results)
    return results[0][0] + results[0][1]


@pytest.mark.extremes
@pytest.mark.parametrize("push", ["fp32", "int16", "int8", "int8:stochastic"])
def test_sums_by_sites_are_bitwise_those_of_all_workers_at_the_node(push: str) -> None:
    one = job(workers=4, push=push)
    with node(one) as (_, address):
        direct = trained(one, [address] * 4)
    with node(one) as (_, address), sites(one, address, 2) as made:
        doors = [each.door.getsockname() for each in made]
        by_sites = trained(one, [doors[0], doors[0], doors[1], doors[1]])
    assert equal(direct, by_sites)


def test_the_node_sends_and_receives_as_much_as_for_one_worker() -> None:
    one = job(workers=4)
    bytes_of_layers = 4 * sum(layer.numel for layer in one.layers)
    with node(one) as (made, address), sites(one, address, 1) as site:
        trained(one, [site[0].door.getsockname()] * 4)
        session = site[0].session
        assert session is not None
        sent = session.links["push"].bytes_sent
        received = session.links["control"].bytes_received
        assert sorted(made.members) == [-1]
    assert 3 * bytes_of_layers < sent < 3 * 1.2 * bytes_of_layers
    assert 4 * bytes_of_layers < received < 4 * 1.2 * bytes_of_layers


@pytest.mark.parametrize(("push", "width", "summed"), [("fp32", 4, 4), ("int8", 1, 2)])
def test_links_carry_the_bytes_of_the_plan_to_the_byte(push: str, width: int, summed: int) -> None:
    one, steps = job(workers=4, push=push), 3
    numel = sum(layer.numel for layer in one.layers)
    pulled = 4 * numel * (steps + 1)  # once more than it pushes
    links = Route(4, 1, "host", 2).links(pulled, width * numel * steps, summed * numel * steps)
    with node(one) as (made, address), sites(one, address, 2) as between:
        doors = [each.door.getsockname() for each in between]
        trained(one, [doors[0], doors[0], doors[1], doors[1]], steps)
    node_sent, node_received = made.ledger.bytes["parameters", "send"], made.ledger.bytes["gradients", "receive"]
    assert (node_sent, node_received) == links["node"]
    for aggregator in between:
        down, up = aggregator.ledger.bytes["parameters", "send"], aggregator.ledger.bytes["gradients", "receive"]
        assert (down + node_received / 2, up + node_sent / 2) == links["aggregator"]
        assert down == 2 * links["worker"][0]
        assert up == 2 * links["worker"][1]


def test_without_aggregators_the_node_sends_and_receives_for_each_worker() -> None:
    one, steps = job(workers=3), 2
    size = 4 * sum(layer.numel for layer in one.layers)
    with node(one) as (made, address):
        trained(one, [address] * 3, steps)
    counted = made.ledger.bytes["parameters", "send"], made.ledger.bytes["gradients", "receive"]
    assert counted == Route(3).links(size * (steps + 1), size * steps, size * steps)["node"]


@pytest.mark.parametrize(
    ("machines", "served", "sites"),
    [
        ((0, 1, 2, 3), (5, 6), [5, 5, 6, 6]),
        ((0, 1, 2), (9,), [4, 4, 4]),
        ((0, 0, 1, 1), (0, 1), [5, 5, 6, 6]),
        ((0, 0, 1), (0,), [4, 4, None]),
        ((0, 1), (), [None, None]),
    ],
)
def test_workers_reach_nodes_by_the_aggregator_of_their_machine_or_by_one_of_those_on_other_machines(
    machines: tuple[int, ...], served: tuple[int, ...], sites: list[int | None]
) -> None:
    ranks = [Rank(node=machine) for machine in machines] + [Rank(role="optimizer", node=4)]
    plan = Plan(ranks=(*ranks, *(Rank(role="aggregator", node=machine) for machine in served)))
    assert [site_of(plan, rank) for rank in range(len(machines))] == sites


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", ["worker", "aggregator"])
def test_where_a_step_needs_all_workers_it_is_made_again_at_all_sites(which: str) -> None:
    one, steps = job(workers=4), 4
    with node(one) as (_, address), ThreadPoolExecutor(4) as pool:
        workers = [client(address, one, rank) for rank in range(4)]
        unbroken = next(iter(pool.map(lambda worker: train(worker, steps), workers)))
    with node(one) as (made, address), sites(one, address, 2) as aggregators, ThreadPoolExecutor(4) as pool:
        for server in (made, *aggregators):
            server.complete = True
        doors = [each.door.getsockname() for each in aggregators]
        runs = [pool.submit(lambda rank: train(client(doors[rank // 2], one, rank), steps), rank) for rank in range(3)]
        last = client(doors[1], one, 3)
        train(last, 2)
        last.wait(last.push(2, 2, gradient(one, 2, 2, 3)))
        if which == "worker":
            last.close(leave=False)
            last = client(doors[1], one, 3)
        else:
            aggregators[1].close()
            door = again(lambda: socket.create_server(doors[1]))
            aggregators[1] = Aggregator(replace(one, workers=2), ([address], TOKEN), door, 1, FAST)
            aggregators[1].complete = True
            aggregators[1].start()
            with pytest.raises(StepLost):
                last.wait(last.pull(0, 9, torch.empty(one.layers[0].numel)))
        assert last.recover() == 2 if which == "aggregator" else last.step == 2
        runs.append(pool.submit(train, last, steps))
        assert all(equal(run.result(30), unbroken) for run in runs)


def test_workers_of_a_site_go_on_when_the_node_behind_their_aggregator_was_killed(tmp_path: Path) -> None:
    one, port, steps = job(workers=2), free_port(), 12
    with node(one) as (_, address), ThreadPoolExecutor(2) as pool:
        workers = [client(address, one, rank) for rank in range(2)]
        unbroken = next(iter(pool.map(lambda worker: train(worker, steps), workers)))
    process = begun(one, tmp_path, port)
    with sites(one, ("127.0.0.1", port), 1) as made, ThreadPoolExecutor(2) as pool:
        door = made[0].door.getsockname()
        runs = [
            pool.submit(lambda rank: train(client(door, one, rank), steps, lambda _: time.sleep(0.02)), rank)
            for rank in range(2)
        ]
        for _ in range(2):
            time.sleep(0.35)
            process.kill()
            process.join(10)
            process = begun(one, tmp_path, port)
        assert all(equal(run.result(30), unbroken) for run in runs)
    process.kill()
    process.join(10)
