"""Nodes that are killed, workers that come and go: every step is whole, and the result is that of an unbroken run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from nodes import FAST, TOKEN, Plain, client, equal, filler, free_port, gradient, job, node, on_disk, pulled, push_all
from torch import Tensor

from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.state_file import open_state, read_layer
from espalier.mechanisms.optimizer_node.wire import Address, Times
from espalier.parallel.layer_client import StepLost
from espalier.plan.axes.node_layout import NodeJob
from espalier.recipe.errors import PeerLost, RunFailed, UserError


def serve(one: NodeJob, folder: Path, port: int) -> None:
    """The life of a node's process."""
    torch.set_num_threads(1)
    door = socket.create_server(("127.0.0.1", port))
    OptimizerNode(one, on_disk(one, folder), door, TOKEN, FAST).start().wait()


def begun(one: NodeJob, folder: Path, port: int) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=serve, args=(one, folder, port), daemon=True)
    process.start()
    return process


def train(worker: Client, until: int, each: Callable[[int], None] = lambda _: None) -> list[Tensor]:
    """Steps up to `until`, whatever happens to the nodes; the parameters then."""
    step = worker.step
    while True:
        try:
            if step == until:
                return pulled(worker, step)
            pulled(worker, step)
            each(step)
            count = len(worker.job.layers)
            push_all(worker, step, [gradient(worker.job, layer, step, worker.rank) for layer in range(count)])
            worker.totals(step, torch.zeros(1))
            worker.move(step, 1.0, 1.0, following=1.0)
            step += 1
        except StepLost:
            step = worker.recover()


def expected(one: NodeJob, steps: int) -> list[list[Tensor]]:
    """The parameters of a worker alone before each step."""
    plain, found = Plain(one), []
    for step in range(steps + 1):
        found.append(plain.parameters())
        plain.step([gradient(one, layer, step) for layer in range(len(one.layers))])
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_a_node_killed_at_random_points_restarts_at_a_whole_step(seed: int, tmp_path: Path) -> None:
    one, steps, draw = job(chunk=128), 12, random.Random(seed)
    port = free_port()
    plain = expected(one, steps)
    process = begun(one, tmp_path, port)
    with ThreadPoolExecutor(1) as pool:
        worker = Client([[("127.0.0.1", port)]], 0, one, TOKEN, FAST)
        run = pool.submit(train, worker, steps)
        for _ in range(4):
            time.sleep(draw.random() * 0.12)
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            with open_state(tmp_path, one, filler(one)) as state:
                masters = [read_layer(state, one, number) for number in range(3)]
                assert equal(masters, plain[state.step]), state.step
            process = begun(one, tmp_path, port)
        assert equal(run.result(60), plain[steps])
        worker.close()
    process.kill()
    process.join(10)


def test_a_worker_that_has_not_read_the_totals_of_a_committed_step_gets_them_of_the_restarted_node(
    tmp_path: Path,
) -> None:
    one, address = job(workers=2), ("127.0.0.1", free_port())

    def start() -> OptimizerNode:
        return OptimizerNode(one, on_disk(one, tmp_path), socket.create_server(address), TOKEN, FAST).start()

    made = start()
    first, second = (Client([[address]], rank, one, TOKEN, FAST) for rank in range(2))
    with ThreadPoolExecutor(2) as pool:
        for worker in (first, second):
            pool.submit(push_all, worker, 0, [gradient(one, layer, 0, worker.rank) for layer in range(3)])
        asked = [pool.submit(worker.totals, 0, torch.full((2,), worker.rank + 1.0)) for worker in (first, second)]
        (sums, norms), _ = (one.result(20) for one in asked)
    first.move(0, 1.0, 1.0)
    first.settle(1)
    made.close()  # before `second` has used what it was told
    made = start()
    assert second.recover() == 1
    assert equal(second.ended(0), (sums, norms))
    assert sums.tolist() == [3.0, 3.0]
    with pytest.raises(StepLost):
        second.ended(1)
    for worker in (first, second):
        worker.close()
    made.close()


def test_nodes_of_one_run_go_back_to_the_same_step(tmp_path: Path) -> None:
    """One of two has lost a step that the other has committed."""
    one, port = job(), free_port()
    parts = [part for _, part in one.parts(2)]
    addresses = [[("127.0.0.1", port)], [("127.0.0.1", free_port())]]
    plain = expected(one, 6)

    def fill(place: int) -> Callable[[int, Tensor], None]:
        numbers, _ = one.parts(2)[place]
        return lambda number, out: filler(one)(numbers[number], out)

    def start(place: int) -> OptimizerNode:
        folder = tmp_path / str(place)
        state = open_state(folder, parts[place], fill(place))
        sums = on_disk(parts[place], folder)[1]
        return OptimizerNode(
            parts[place], (state, sums), socket.create_server(addresses[place][0]), TOKEN, FAST
        ).start()

    nodes = [start(0), start(1)]
    worker = Client(addresses, 0, one, TOKEN, FAST)
    assert equal(train(worker, 3), plain[3])
    nodes[0].close()
    nodes[0].state.revert()  # as if it had been killed a moment before
    nodes[0] = start(0)
    again = []
    assert equal(train(worker, 6, again.append), plain[6])
    assert again in ([3, 2, 3, 4, 5], [2, 3, 4, 5])
    worker.close()
    for made in nodes:
        made.close()


def test_a_node_whose_disk_was_removed_does_not_begin_again_unnoticed(tmp_path: Path) -> None:
    one, port = job(), free_port()
    process = begun(one, tmp_path / "disk", port)
    worker = Client([[("127.0.0.1", port)]], 0, one, TOKEN, FAST)
    train(worker, 5)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    (tmp_path / "disk").rename(tmp_path / "removed")
    process = begun(one, tmp_path / "disk", port)
    with pytest.raises(RunFailed, match=r"(?s)stand at step 0, and this worker at step 5.*were removed"):
        train(worker, 7)
    process.kill()
    process.join(10)


@pytest.mark.slow
def test_a_node_with_a_slow_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = job()
    times = Times(heartbeat=0.02, resend=0.1, silence=0.3, patience=0.5, answer=20.0)
    with node(one, tmp_path, times) as (made, address):
        worker = client(address, one, times=times)
        write = made.state.write
        monkeypatch.setattr(made.state, "write", lambda *arguments: (time.sleep(0.15), write(*arguments)))
        assert equal(train(worker, 2), expected(one, 2)[2])
        worker.close()


def test_nodes_from_different_times_are_refused(tmp_path: Path) -> None:
    one = job()
    with node(one, tmp_path) as (made, address):
        worker = client(address, one)
        train(worker, 3)
        with pytest.raises(UserError, match=r"(?s)holds step 3, and another node of the run step 1.*one time"):
            made.reset(1, "")


def test_a_worker_killed_in_a_push_is_left_out_and_the_others_go_on() -> None:
    """Its process ends between two chunks of a layer: each chunk is the sum of those who pushed it."""
    one = job(workers=2, chunk=128)
    times = replace(FAST, patience=0.5)
    with node(one, times=times) as (made, address), ThreadPoolExecutor(1) as pool:

        def stay() -> list[Tensor]:
            worker = client(address, one, 0, times=replace(FAST, patience=20.0))
            return train(worker, 4)

        other = multiprocessing.get_context("fork").Process(target=dies_in_a_push, args=(address, one), daemon=True)
        other.start()
        found = pool.submit(stay).result(30)
        other.join(10)
        assert other.exitcode == -signal.SIGKILL
        assert sorted(made.members) == [0]
        assert all(bool(one.isfinite().all()) for one in found)


def dies_in_a_push(address: Address, one: NodeJob) -> None:
    torch.set_num_threads(1)
    worker = client(address, one, 1)
    train(worker, 1)
    worker.push(2, 1, gradient(one, 2, 1, 1))
    chunks = 0

    def counted(*arguments: object) -> tuple[Tensor, int]:
        nonlocal chunks
        chunks += 1
        if chunks == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(*arguments)

    encode = worker.encode
    worker.encode = counted
    worker.wait(worker.push(1, 1, gradient(one, 1, 1, 1)))
    time.sleep(30)


def vanish(worker: Client) -> None:
    """As a process that is killed."""
    worker.close(leave=False)


@pytest.mark.extremes
@pytest.mark.parametrize("where", ["before its push", "in its push", "behind its push"])
@pytest.mark.parametrize("lost", [False, True], ids=["comes again", "is lost first"])
def test_where_a_step_needs_all_workers_it_is_made_again_with_one_that_comes_for_a_lost_one(
    where: str, lost: bool
) -> None:
    one, steps = job(workers=2), 4
    times = replace(FAST, patience=0.3) if lost else FAST

    def run(struck: bool) -> list[Tensor]:
        with node(one, times=times) as (made, address), ThreadPoolExecutor(2) as pool:
            made.complete = True
            stays = pool.submit(lambda: train(client(address, one, 0), steps))
            goes = client(address, one, 1)
            train(goes, 2)
            if struck:
                gradients = [gradient(one, layer, 2, 1) for layer in range(3)]
                pulled(goes, 2)
                if where == "in its push":
                    goes.wait(goes.push(2, 2, gradients[2]))
                elif where == "behind its push":
                    push_all(goes, 2, gradients)
                vanish(goes)
                until = time.monotonic() + 10.0
                while lost and 1 in made.members and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(0.1)
                assert made.state.step == 2
                assert not stays.done()
                goes = client(address, one, 1)
                assert goes.step == 2
            found = train(goes, steps)
            assert equal(stays.result(20), found)
            assert made.state.step == steps
            return found

    assert equal(run(struck=True), run(struck=False))


def test_a_worker_that_comes_takes_part_from_the_next_step_and_one_that_leaves_is_not_waited_for() -> None:
    one = job(workers=1)
    with node(one) as (made, address), ThreadPoolExecutor(1) as pool:
        first = client(address, one, 0)
        train(first, 2)
        second = client(address, one, 1)
        assert second.step == 2
        both = pool.submit(train, second, 4)
        train(first, 4)
        both.result(20)
        second.close()
        train_on = train(first, 6)
        assert sorted(made.members) == [0]
        first.close()
    plain = Plain(one)
    for step in range(6):
        ranks = (0, 1) if 2 <= step < 4 else (0,)
        plain.step([sum(gradient(one, layer, step, rank) for rank in ranks) for layer in range(3)])
    assert all(torch.allclose(mine, its, atol=1e-6) for mine, its in zip(train_on, plain.parameters(), strict=True))


def test_a_stopped_node_is_named_and_goes_on_when_it_is_continued(tmp_path: Path) -> None:
    one, port = job(), free_port()
    times = Times(heartbeat=0.02, resend=0.1, silence=0.3, patience=1.5)
    process = begun(one, tmp_path, port)
    worker = Client([[("127.0.0.1", port)]], 0, one, TOKEN, replace(times, patience=30.0))
    hasty = None
    train(worker, 2)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(PeerLost, match="could not reach the optimizer node"):
            hasty = Client([[("127.0.0.1", port)]], 1, one, TOKEN, replace(times, patience=0.5))
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert hasty is None
    assert equal(train(worker, 4), expected(one, 4)[4])
    worker.close()
    process.kill()
    process.join(10)
