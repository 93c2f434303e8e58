"""Links between workers and nodes: nothing lost changes a bit; strangers, other versions and silence are told."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lossy_proxy import LossyProxy
from nodes import FAST, Plain, client, equal, gradient, job, node, pulled, push_all
from torch import Tensor

from espalier.mechanisms.optimizer_node import wire
from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.wire import Address, Times
from espalier.recipe.errors import PeerLost, UserError


def steps_of(worker: Client, plain: Plain, steps: range) -> None:
    """Trains beside the plain form, which it must equal after each step."""
    for step in steps:
        assert equal(pulled(worker, step), plain.parameters()), step
        gradients = [gradient(worker.job, layer, step) for layer in range(3)]
        push_all(worker, step, gradients)
        worker.totals(step, torch.zeros(1))
        worker.move(step, 1.0, 1.0, following=1.0)
        plain.step(gradients)


def test_one_percent_of_frames_lost_or_damaged_changes_no_bit() -> None:
    one = job(chunk=64)
    with node(one) as (_, address):
        proxy = LossyProxy(address, loss=0.01, damage=0.01)
        worker = client(proxy.address, one)
        steps_of(worker, Plain(one), range(6))
        assert proxy.lost > 5
        assert proxy.damaged > 1
        worker.close()
        proxy.close()


def test_lossy_links_of_several_workers_change_no_bit_of_their_sum() -> None:
    one = job(chunk=128, workers=2, push="int16")

    def work(at: tuple[int, Address]) -> list[Tensor]:
        worker = client(at[1], one, at[0])
        for step in range(3):
            pulled(worker, step)
            push_all(worker, step, [gradient(one, layer, step, at[0]) for layer in range(3)])
            worker.totals(step, torch.zeros(1))
            worker.move(step, 1.0, 1.0, following=1.0)
        found = pulled(worker, 3)
        worker.close()
        return found

    results = []
    for loss in (0.0, 0.02):
        with node(one) as (_, address), ThreadPoolExecutor(2) as pool:
            proxies = [LossyProxy(address, loss=loss, seed=rank) for rank in range(2)]
            results += pool.map(work, enumerate(proxy.address for proxy in proxies))
            assert all(bool(proxy.lost) == bool(loss) for proxy in proxies)
            for proxy in proxies:
                proxy.close()
    assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        (2.0, Times(heartbeat=0.02, resend=0.2, silence=0.5, patience=20.0)),
        pytest.param(30.0, Times(), marks=pytest.mark.slow),
    ],
)
def test_a_link_that_is_cut_for_a_while_changes_no_bit(seconds: float, times: Times) -> None:
    one, told = job(chunk=64), list[float]()
    with node(one, times=times) as (_, address):
        proxy = LossyProxy(address)
        worker = client(proxy.address, one, times=replace(times, unheard=lambda: told.append(time.monotonic())))
        plain = Plain(one)
        steps_of(worker, plain, range(2))
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(steps_of, worker, plain, range(2, 6))
            time.sleep(0.02)
            proxy.cut()
            begun = time.monotonic()
            time.sleep(seconds)
            assert not rest.done()
            told = [begun, *(one for one in told if one > begun), time.monotonic()]
            assert max(after - before for before, after in pairwise(told)) < 0.5 * seconds, "it is said all the time"
            proxy.mend()
            rest.result(60)
        assert proxy.connections > 2
        worker.close()
        proxy.close()


def test_a_node_that_cannot_be_reached_is_named_after_the_patience() -> None:
    door = socket.create_server(("127.0.0.1", 0))
    address = door.getsockname()
    door.close()
    with pytest.raises(PeerLost, match=rf"worker 0 could not reach the optimizer node at 127.0.0.1:{address[1]}"):
        client(address, job(), times=Times(heartbeat=0.05, patience=0.3))


def test_a_network_that_stays_cut_ends_the_wait_with_who_waits_for_whom() -> None:
    one, times = job(), Times(heartbeat=0.02, resend=0.1, silence=0.3, patience=0.8)
    with node(one) as (_, address):
        proxy = LossyProxy(address)
        worker = client(proxy.address, one, times=times)
        pulled(worker, 0)
        proxy.cut()
        with pytest.raises(PeerLost, match="worker 0 could not reach the optimizer node at"):
            push_all(worker, 0, [gradient(one, layer, 0) for layer in range(3)])
        proxy.close()


def test_a_wait_for_other_workers_ends_with_what_was_waited_for() -> None:
    one = job(workers=2)
    with node(one) as (_, address):
        worker = client(address, one, times=replace(FAST, answer=0.4))
        handle = worker.push(2, 0, gradient(one, 2, 0))
        with pytest.raises(PeerLost, match=r"(?s)worker 0 has waited 0.4 s for .*layer 2 at step 0.*node"):
            worker.wait(handle)


def test_a_worker_with_another_token_is_refused() -> None:
    one = job()
    with node(one) as (made, address):
        with pytest.raises(UserError, match=r"(?s)refuses this process.*another token"):
            Client([[address]], 0, one, "another", FAST)
        assert not made.members


def test_a_node_that_does_not_know_the_token_is_not_believed() -> None:
    """Something listens there that lets everybody in."""
    door = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        connection, _ = door.accept()
        connection.sendall(wire._CHALLENGE.pack(b"espluwu\0", wire.VERSION, bytes(32)))
        wire._exactly(connection, bytearray(wire._CHALLENGE.size))
        wire._hear(connection)
        wire._say(connection, bytes(32) + b"\x80")
        connection.close()

    threading.Thread(target=impostor, daemon=True).start()
    with pytest.raises(UserError, match="does not know the token of this run"):
        client(door.getsockname(), job())
    door.close()


def test_another_version_is_named() -> None:
    door = socket.create_server(("127.0.0.1", 0))

    def old() -> None:
        connection, _ = door.accept()
        connection.sendall(wire._CHALLENGE.pack(b"espluwu\0", 0, bytes(32)))
        connection.close()

    threading.Thread(target=old, daemon=True).start()
    with pytest.raises(UserError, match=r"(?s)speaks version 0 of the protocol, this process version 1.*same version"):
        client(door.getsockname(), job())
    door.close()


def test_what_is_no_node_is_told() -> None:
    door = socket.create_server(("127.0.0.1", 0))

    def other() -> None:
        connection, _ = door.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100)
        connection.close()

    threading.Thread(target=other, daemon=True).start()
    with pytest.raises(UserError, match="is no optimizer node"):
        client(door.getsockname(), job())
    door.close()


def test_a_worker_of_another_model_is_told_what_differs() -> None:
    one = job()
    with node(one) as (_, address):
        with pytest.raises(UserError, match=r"(?s)do not agree on 'layers'.*2 layers.*3 layers"):
            client(address, job(layers=one.layers[:2]))
        with pytest.raises(UserError, match=r"(?s)do not agree on 'push'.*int8.*fp32"):
            client(address, job(push="int8"))


def test_strangers_that_say_nothing_keep_nobody_out() -> None:
    one = job()
    with node(one) as (_, address):
        strangers = [socket.create_connection(address) for _ in range(80)]
        worker = client(address, one, times=replace(FAST, patience=20.0))
        pulled(worker, 0)
        worker.close()
        for stranger in strangers:
            stranger.close()
