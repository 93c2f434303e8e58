"""Rounds of local steps whose outer model is on a node equal those of one process, whatever is killed meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import (
    FAST,
    TOKEN,
    Plain,
    again,
    client,
    equal,
    first,
    free_port,
    gradient,
    job,
    link_bytes,
    node,
    on_disk,
    pulled,
)
from torch import Tensor

from espalier.comm.base import Traffic
from espalier.kernels import fixed_point
from espalier.mechanisms.optimizer_node.local_steps import LocalRound, LocalSteps
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.optim.diloco_slowmo import METHODS
from espalier.optim.outer_optimizer import OuterUpdate
from espalier.plan.axes.node_layout import NodeJob
from espalier.recipe.errors import UserError

EVERY, ROUNDS = 3, 4
RATE = 0.01


class Killed(Exception):
    """In the place of SIGKILL: nothing after it happens in this worker."""


def slope(one: NodeJob, parameters: Sequence[Tensor], step: int, rank: int) -> list[Tensor]:
    """Gradients that depend on the parameters."""
    return [gradient(one, layer, step, rank) + 0.3 * parameters[layer] for layer in range(len(one.layers))]


def take_step(worker: LocalSteps, rank: int) -> None:
    one, step = worker.job, worker.step
    found = slope(one, pulled(worker, step), step, rank)  # type: ignore[arg-type]
    for layer in reversed(range(len(one.layers))):
        worker.wait(worker.push(layer, step, found[layer]))
    worker.totals(step, torch.zeros(0))
    worker.move(step, 0.5, 1.0)


def train(worker: LocalSteps, rank: int, until: int = ROUNDS) -> list[Tensor]:
    """From where its files stand to the end of round `until`."""
    while worker.outer.step < until:
        begun = worker.outer.step * EVERY
        assert worker.run == begun
        while worker.step < begun + EVERY:
            take_step(worker, rank)
        assert worker.end_round(begun + EVERY, RATE, stop=False) is False
    return pulled(worker, worker.step)  # type: ignore[arg-type]


def local(address: Any, one: NodeJob, folder: Path, rank: int = 0, weight: float = 1.0) -> LocalSteps:
    return LocalSteps(client(address, one, rank), folder / f"worker-{rank}", LocalRound(EVERY, EVERY, weight))


def in_one_process(one: NodeJob, weights: Sequence[float]) -> list[Tensor]:
    """The same rounds, with models and optimizers in memory; sums as the wire makes them."""
    assert one.outer is not None
    workers = [Plain(one) for _ in weights]
    outer = [first(one, layer) for layer in range(len(one.layers))]
    updates = [OuterUpdate(values, one.outer) for values in outer]
    for begun in range(0, ROUNDS * EVERY, EVERY):
        for rank, worker in enumerate(workers):
            for step in range(begun, begun + EVERY):
                worker.step(slope(one, worker.parameters(), step, rank), 0.5)
        for layer, values in enumerate(outer):
            went = [
                (values - worker.parameters()[layer]) * weight for worker, weight in zip(workers, weights, strict=True)
            ]
            mean = summed(one, layer, went)
            mean *= 1.0 / sum(weights)
            updates[layer].apply(mean, RATE)
        for worker in workers:
            for tensors, values, layer in zip(worker.tensors, outer, one.layers, strict=True):
                for tensor, view in zip(tensors, layer.views(values), strict=True):
                    tensor.detach().copy_(view)
    return outer


def summed(one: NodeJob, layer: int, parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].clone()
    form = (32, fixed_point.shift(32, len(parts)))
    found = []
    for chunk in one.chunks[layer]:
        cut = [part[chunk.start : chunk.stop].contiguous() for part in parts]
        shared = torch.stack([fixed_point.exponents(part) for part in cut]).amax(0)
        total = torch.zeros(chunk.elements, dtype=torch.int32)
        for part in cut:
            room = torch.empty(4 * chunk.elements, dtype=torch.uint8)
            fixed_point.add(total, fixed_point.encode(part, shared, form, room))
        values = torch.empty(chunk.elements)
        fixed_point.decode(total, shared, form[1], values)
        found.append(values)
    return torch.cat(found)


@pytest.mark.extremes
@pytest.mark.parametrize("method", ["local_sgd", "slowmo", "diloco"])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.5)])
def test_rounds_at_a_node_are_those_of_one_process_to_the_last_bit(
    tmp_path: Path, method: str, weights: tuple[float, ...]
) -> None:
    one = job(outer=METHODS[method], workers=len(weights))
    expected = in_one_process(one, weights)
    with node(one) as (_, address), ThreadPoolExecutor(len(weights)) as pool:
        made = [pool.submit(local, address, one, tmp_path, rank, weight) for rank, weight in enumerate(weights)]
        workers = [future.result(20) for future in made]
        ends = [future.result(20) for future in [pool.submit(train, one, rank) for rank, one in enumerate(workers)]]
        for found in ends:
            assert equal(found, expected)
        for worker in workers:
            worker.close()


def test_a_round_sends_and_pulls_the_model_once_however_many_steps_it_has(tmp_path: Path) -> None:
    one = job(outer=METHODS["diloco"])
    size = sum(4 * layer.numel for layer in one.layers)
    with node(one) as (_, address):
        worker = local(address, one, tmp_path)
        begun, first_read = link_bytes(worker.outer)[1], worker.read()
        train(worker, 0)
        received, read = link_bytes(worker.outer)[1] - begun, worker.read()
        assert first_read["pulled"] == 0
        assert read["pushed"] == read["pulled"] == ROUNDS * size
        assert worker.outer.ledger.bytes == {(Traffic.OUTER_STEP, "send"): ROUNDS * size}
        assert ROUNDS * size <= received < ROUNDS * size * 1.5 + 50_000  # heartbeats, exponents, headers
        worker.close()


def strike(worker: LocalSteps, where: str) -> None:
    """The worker dies there, in its second round."""
    owner: Any = worker.outer if where == "push" else worker._state if "commit" in where else worker
    name = where.removesuffix(", after")
    plain, count = getattr(owner, name), [0]

    def call(*arguments: Any) -> Any:
        count[0] += worker.outer.step >= 1 and (name != "_take" or arguments[0] == 2)
        last = name == "push" and count[0] < 2  # in the second push
        if not count[0] or last:
            return plain(*arguments)
        if name == "_take":
            worker.outer.settle(2)
        if where.endswith(", after"):
            plain(*arguments)
        raise Killed

    setattr(owner, name, call)


@pytest.mark.extremes
@pytest.mark.parametrize(
    "where",
    ["move, after", "commit", "commit, after", "push", "_take"],
)
def test_a_worker_killed_anywhere_in_a_round_changes_no_bit(tmp_path: Path, where: str) -> None:
    one = job(outer=METHODS["diloco"])
    expected = in_one_process(one, (1.0,))
    with node(one) as (made, address):
        worker = local(address, one, tmp_path)
        strike(worker, where)
        with pytest.raises(Killed):
            train(worker, 0)
        for connection in worker.outer._connections:
            connection.close()
        worker._pool.shutdown()
        worker._state.close()
        again = local(address, one, tmp_path)
        assert (again.run, again.step) == ((6, 6) if where == "_take" else (3, 3))
        assert made.state.step == again.outer.step == again.run // EVERY
        assert equal(train(again, 0), expected)
        again.close()


@pytest.mark.parametrize("committed", [False, True])
def test_a_node_that_starts_again_in_the_exchange_changes_no_bit(tmp_path: Path, committed: bool) -> None:
    one, address = job(outer=METHODS["diloco"]), ("127.0.0.1", free_port())
    expected = in_one_process(one, (1.0,))

    def start() -> OptimizerNode:
        return OptimizerNode(one, on_disk(one, tmp_path), socket.create_server(address), TOKEN, FAST).start()

    nodes = [start()]
    worker = local(address, one, tmp_path)
    plain = worker._take if committed else worker.outer.totals

    def struck(*arguments: Any) -> Any:
        if worker.outer.step + (not committed) == 2 and len(nodes) == 1:
            if committed:
                worker.outer.settle(2)
            nodes[0].close()
            nodes.append(again(start))
        return plain(*arguments)

    setattr(*((worker, "_take", struck) if committed else (worker.outer, "totals", struck)))
    assert equal(train(worker, 0), expected)
    assert len(nodes) == 2
    worker.close()
    nodes[1].close()


def test_a_worker_whose_files_are_gone_goes_on_from_the_nodes_parameters(tmp_path: Path) -> None:
    one = job(outer=METHODS["local_sgd"])
    with node(one) as (_, address):
        worker = local(address, one, tmp_path)
        outer = train(worker, 0, until=2)
        worker.close()
        again = local(address, one, tmp_path / "elsewhere")
        assert (again.run, again.step) == (2 * EVERY, 0)
        assert equal(pulled(again, 0), outer)  # type: ignore[arg-type]
        again.close()


def test_files_of_a_later_round_than_the_nodes_are_refused(tmp_path: Path) -> None:
    one = job(outer=METHODS["local_sgd"])
    with node(one) as (_, address):
        worker = local(address, one, tmp_path)
        train(worker, 0, until=2)
        worker.close()
    with node(one) as (_, address), pytest.raises(UserError, match=r"(?s)of round 2, and those of.*of round 0.*try: "):
        local(address, one, tmp_path)


def test_workers_and_nodes_of_different_rounds_are_told(tmp_path: Path) -> None:
    one = job(outer=METHODS["diloco"])
    with node(one) as (_, address), pytest.raises(UserError, match="do not agree on 'outer'"):
        client(address, replace(one, outer=METHODS["slowmo"]))
