"""An optimizer node moves parameters as plain AdamW does, to the last bit, whoever comes first and whatever is lost."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nodes import FAST, Plain, client, equal, first, gradient, job, link_bytes, node, pulled, push_all
from torch import Tensor

from espalier.mechanisms.optimizer_node.wire import Address, Frame, FrameKind
from espalier.plan.axes.node_layout import FlatLayer, NodeJob
from espalier.recipe.errors import RunFailed


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("chunk", "steps", "disk"), [(128, 8, False), (1 << 20, 50, False), (512, 50, True)])
def test_one_worker_on_an_fp32_wire_is_plain_adamw(chunk: int, steps: int, disk: bool, tmp_path: Path) -> None:
    one = job(chunk=chunk)
    plain = Plain(one)
    with node(one, tmp_path if disk else None) as (_, address):
        worker = client(address, one)
        for step in range(steps):
            assert equal(pulled(worker, step), plain.parameters()), step
            gradients = [gradient(one, layer, step) for layer in range(3)]
            push_all(worker, step, gradients)
            scale, rate = (1.0, 1.0) if step % 3 else (0.37, 1 / (step + 1))
            plain.step(gradients, scale, rate)
            worker.move(step, scale, rate, following=1.0)
        assert equal(pulled(worker, steps), plain.parameters())
        worker.close()


def test_sums_of_four_workers_are_bitwise_the_same_in_any_order_of_arrival() -> None:
    one = job(workers=4)
    found = [trained(one, shuffle) for shuffle in (None, 1, 2)]
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def trained(one: NodeJob, shuffle: int | None) -> list[Tensor]:
    """The parameters after three steps of all workers; with `shuffle` each sleeps before each push."""
    draw = random.Random(shuffle)

    def work(address: Address, rank: int, sleeps: list[float]) -> list[Tensor]:
        worker = client(address, one, rank)
        for step in range(3):
            pulled(worker, step)
            for number in (2, 1, 0):
                time.sleep(sleeps.pop())
                worker.wait(worker.push(number, step, gradient(one, number, step, rank)))
            worker.totals(step, torch.tensor([1.0]))
            worker.move(step, 1.0, 1.0)
        last = pulled(worker, 3)
        worker.close()
        return last

    with node(one) as (_, address), ThreadPoolExecutor(4) as pool:
        sleeps = [[draw.random() * 0.03 if shuffle else 0.0 for _ in range(9)] for _ in range(4)]
        done = [pool.submit(work, address, rank, sleeps[rank]) for rank in range(4)]
        results = [one.result(60) for one in done]
    assert all(equal(results[0], other) for other in results[1:])
    return results[0]


def test_totals_are_the_sums_of_all_workers_and_torchs_norms() -> None:
    one = job(workers=1, chunk=1 << 20)
    with node(one) as (_, address):
        worker = client(address, one)
        gradients = [gradient(one, layer, 0) for layer in range(3)]
        push_all(worker, 0, gradients)
        sums, norms = worker.totals(0, torch.tensor([3.0, 0.1], dtype=torch.float64))
        assert sums.tolist() == [3.0, 0.1]
        plain = Plain(one)
        plain.step(gradients)
        tensors = [tensor for tensors in plain.tensors for tensor in tensors]
        assert norms.tolist() == [float(torch.linalg.vector_norm(one.grad)) for one in tensors]
        worker.close()


def test_a_push_does_not_wait_until_parameters_that_were_asked_for_before_have_arrived() -> None:
    one = job()
    read = threading.Event()
    with node(one) as (_, address):
        worker = client(address, one)
        (connection,) = worker._connections
        plain = connection.buffer

        def buffer(frame: Frame, size: int) -> memoryview:
            if frame.kind == FrameKind.PARAMETERS:
                assert read.wait(10)
            return plain(frame, size)

        connection.buffer = buffer  # type: ignore[method-assign]
        out = torch.empty(one.layers[2].numel)
        pull = worker.pull(2, 0, out)
        push_all(worker, 0, [gradient(one, layer, 0) for layer in range(3)])
        assert pull.left
        read.set()
        worker.wait(pull)
        assert torch.equal(out, first(one, 2))
        worker.close()


@pytest.mark.parametrize("push", ["fp32", "int16", "int8"])
def test_the_norms_of_a_sum_are_the_same_on_all_workers(push: str) -> None:
    one = job(workers=3, push=push)

    def work(address: Address, rank: int) -> list[Tensor]:
        worker = client(address, one, rank)
        push_all(worker, 0, [gradient(one, layer, 0, rank) for layer in range(3)])
        _, norms = worker.totals(0, torch.zeros(1))
        worker.move(0, 1.0, 1.0)
        worker.close()
        return list(norms)

    with node(one) as (_, address), ThreadPoolExecutor(3) as pool:
        found = [done.result(20) for done in [pool.submit(work, address, rank) for rank in range(3)]]
    assert found[0] == found[1] == found[2]
    sums = [torch.stack([gradient(one, layer, 0, rank) for rank in range(3)]).sum(0) for layer in range(3)]
    norms = [view.norm() for layer, each in zip(one.layers, sums, strict=True) for view in layer.views(each)]
    tolerance = {"fp32": 1e-6, "int16": 1e-3, "int8": 2e-2}[push]
    assert all(abs(mine - its) <= tolerance * its for mine, its in zip(found[0], norms, strict=True))


def test_error_feedback_makes_sums_of_int8_gradients_right_in_the_long_run() -> None:
    """Of a gradient that stays the same, the sum of what arrives is off by one step's rounding, not by one a step."""
    one = job(push="int8", layers=(FlatLayer("only", (("bias", (300,)),)),))
    gradients = gradient(one, 0, 0)
    came = torch.zeros(300, dtype=torch.float64)
    with node(one) as (made, address):
        worker, steps = client(address, one), 30
        for step in range(steps):
            worker.wait(worker.push(0, step, gradients))
            worker.totals(step, torch.zeros(1))
            kept = torch.empty(300)
            made._sums.read(made.chunks[0][0].name, kept, pending=True)
            came += kept
            worker.move(step, 0.0, 1.0)
            pulled(worker, step + 1)
        worker.close()
    step = 2.0 ** (torch.frexp(gradients.abs().max()).exponent - 7)
    assert float((came - steps * gradients.double()).abs().max()) <= 2 * step


def test_workers_that_push_in_different_orders_are_told() -> None:
    one = job(workers=2)
    with node(one) as (_, address), ThreadPoolExecutor(2) as pool:

        def work(rank: int) -> None:
            worker = client(address, one, rank, replace(FAST, answer=2.0))
            order = (2, 1, 0) if rank else (0, 1, 2)
            for handle in [worker.push(number, 0, gradient(one, number, 0, rank)) for number in order]:
                worker.wait(handle)

        errors = [done.exception(20) for done in [pool.submit(work, rank) for rank in range(2)]]
    assert any("where another worker pushed layer" in str(error) for error in errors)


def test_parameters_of_a_step_that_is_over_are_not_mixed_with_the_next() -> None:
    one = job()
    with node(one) as (_, address):
        worker = client(address, one)
        push_all(worker, 0, [gradient(one, layer, 0) for layer in range(3)])
        worker.move(0, 1.0, 1.0)
        pulled(worker, 1)
        with pytest.raises(RunFailed, match=r"pulled layer \d of step 0 after step 0 ended"):
            pulled(worker, 0)


def test_what_the_client_counts_is_what_it_sent() -> None:
    one = job()
    elements = sum(layer.numel for layer in one.layers)
    with node(one) as (_, address):
        worker = client(address, one)
        for step in range(3):
            pulled(worker, step)
            push_all(worker, step, [gradient(one, layer, step) for layer in range(3)])
            worker.move(step, 1.0, 1.0)
        assert worker.ledger.by_class() == {"gradients": 3 * 4 * elements}
        assert all(12 * elements < size < 12 * elements * 1.2 for size in link_bytes(worker))
        worker.close()


def test_without_room_for_what_rounding_leaves_8_bit_gradients_are_rounded_at_random_and_nothing_is_kept() -> None:
    """The same node serves a worker that keeps it and one that does not."""
    one = job(push="int8", workers=2)
    with node(one) as (_, address), ThreadPoolExecutor(2) as pool:
        workers = [client(address, one, rank) for rank in range(2)]
        workers[1].feedback = False
        for step in range(3):
            given = [gradient(one, layer, 0, 1) for layer in range(3)]
            list(pool.map(lambda worker, step=step, given=given: push_all(worker, step, given), workers))
            told = list(pool.map(lambda worker, step=step: worker.totals(step, torch.zeros(1)), workers))
            exact = torch.stack(
                [torch.linalg.vector_norm(2 * v) for n in range(3) for v in one.layers[n].views(given[n])]
            )
            assert told[0][1].sub(exact).abs().max() < 0.02 * exact.max()
            for worker in workers:
                worker.move(step, 1.0, 1.0)
        assert [len(worker.residuals._values) for worker in workers] == [3, 0]
        for worker in workers:
            worker.close()
