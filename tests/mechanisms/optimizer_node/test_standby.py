"""A node that is killed, or stopped, and does not come back: its standby goes on with the same bits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nodes import TOKEN, MemorySums, equal, free_port, job, memory, on_disk
from test_recovery import expected, train

from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.standby import Replica, Standby
from espalier.mechanisms.optimizer_node.wire import Address, Times
from espalier.plan.axes.node_layout import NodeJob
from espalier.recipe.errors import RunFailed

TIMES = Times(heartbeat=0.02, resend=0.1, silence=0.4, patience=10.0, answer=20.0)


def standby(one: NodeJob) -> tuple[Standby, Address]:
    door = socket.create_server(("127.0.0.1", 0))
    made = Standby(replace(one, workers=1), (memory(one), MemorySums()), door, TOKEN, TIMES).start()
    return made, door.getsockname()


def primary(one: NodeJob, folder: Path, port: int, behind: Address) -> None:
    """The life of a node's process."""
    torch.set_num_threads(1)
    made = OptimizerNode(one, on_disk(one, folder), socket.create_server(("127.0.0.1", port)), TOKEN, TIMES)
    made.replica = Replica(one, (behind, TOKEN), made.name, TIMES)
    try:
        made.start().wait()
    except RunFailed as error:
        (folder / "error").write_text(str(error))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_standby_goes_on_where_the_node_does_not(how: signal.Signals, tmp_path: Path) -> None:
    one, steps, port = job(workers=1), 14, free_port()
    behind, address = standby(one)
    process = multiprocessing.get_context("fork").Process(
        target=primary, args=(one, tmp_path, port, address), daemon=True
    )
    process.start()
    worker = Client([[("127.0.0.1", port), address]], 0, one, TOKEN, TIMES)
    done: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(train, worker, steps, lambda step: (done.append(step), time.sleep(0.02)))
        while len(done) < 5:
            time.sleep(0.01)
        assert not behind.promoted
        assert behind.state.step >= 3
        os.kill(process.pid, how)
        assert equal(run.result(60), expected(one, steps)[steps])
    assert behind.promoted
    if how == signal.SIGSTOP:  # it wakes up, and is refused
        os.kill(process.pid, signal.SIGCONT)
        process.join(20)
        assert "has taken over" in (tmp_path / "error").read_text()
    worker.close()
    behind.close()
    process.kill()
    process.join(10)


def test_a_standby_that_comes_later_is_sent_the_whole_state(tmp_path: Path) -> None:
    one, port = job(), free_port()
    with socket.create_server(("127.0.0.1", port)) as door:
        alone = OptimizerNode(one, on_disk(one, tmp_path), door, TOKEN, TIMES).start()
        worker = Client([[("127.0.0.1", port)]], 0, one, TOKEN, TIMES)
        train(worker, 3)
        worker.close()
        alone.close()
    behind, address = standby(one)
    made = OptimizerNode(one, on_disk(one, tmp_path), socket.create_server(("127.0.0.1", 0)), TOKEN, TIMES)
    made.replica = Replica(one, (address, TOKEN), made.name, TIMES)
    made.start()
    assert behind.state.step == 3
    worker = Client([[made.door.getsockname(), address]], 0, one, TOKEN, TIMES)
    train(worker, 5)
    made.close()
    assert equal(train(worker, 7), expected(one, 7)[7])
    assert behind.promoted
    worker.close()
    behind.close()


def test_a_standby_lets_no_worker_in_while_the_primary_is_there(tmp_path: Path) -> None:
    one = job()
    behind, address = standby(one)
    made = OptimizerNode(one, on_disk(one, tmp_path), socket.create_server(("127.0.0.1", 0)), TOKEN, TIMES)
    made.replica = Replica(one, (address, TOKEN), made.name, TIMES)
    made.start()
    try:
        with pytest.raises(Exception, match="could not reach the optimizer node"):
            Client([[address]], 0, one, TOKEN, replace(TIMES, patience=1.0))
        assert not behind.promoted
    finally:
        made.close()
        behind.close()
