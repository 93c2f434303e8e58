"""What rounding leaves of 8-bit pushes is there again for the step that is made next, whatever was killed."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nodes import FAST, TOKEN, again, client, equal, free_port, gradient, job, node, on_disk, push_all
from test_recovery import train
from torch import Tensor

from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.residuals import PushResiduals
from espalier.parallel.layer_client import StepLost
from espalier.plan.axes.node_layout import NodeJob
from espalier.recipe.errors import UserError

INT8 = job(push="int8", workers=2)


def kept(made: PushResiduals, step: int, one: NodeJob = INT8) -> list[Tensor]:
    """As a step does: what is left of each layer, rewritten."""
    left = []
    for layer in range(len(one.layers)):
        values = made.of(layer, step)
        left.append(values.clone())
        values.copy_(gradient(one, layer, step))
        made.keep(layer, step + 1, values)
    return left


def test_a_process_that_comes_later_has_what_the_steps_before_left(tmp_path: Path) -> None:
    file = tmp_path / "worker-0" / "residuals"
    made = PushResiduals(INT8, 0, file)
    assert not made.lacking(0)
    for step in range(3):
        kept(made, step)
    made.of(1, 3).zero_()  # killed in a push
    for step in (2, 3):
        other = PushResiduals(INT8, 0, file)
        assert not other.lacking(step)
        assert equal(kept(other, step), [gradient(INT8, layer, step - 1) for layer in range(3)])
        other.close()
    made.close()


def test_a_step_that_is_made_again_begins_with_what_it_had(tmp_path: Path) -> None:
    made = PushResiduals(INT8, 0, tmp_path / "residuals")
    for step in range(3):
        kept(made, step)
    before = kept(made, 2)
    half = made.of(0, 3)
    assert equal(kept(made, 2), before)
    made.keep(0, 4, half)  # late, of the push that was given up
    assert equal([made.of(0, 3)], [gradient(INT8, 0, 2)])
    made.close()


@pytest.mark.parametrize("what", ["a bit", "another rank", "other workers", "another step", "no file"])
def test_what_is_not_of_this_worker_and_step_is_lacking(tmp_path: Path, what: str) -> None:
    file = tmp_path / "residuals"
    made = PushResiduals(INT8, 0, file)
    kept(made, 0)
    made.close()
    step, rank, one = 1, 0, INT8
    if what == "a bit":
        content = bytearray(file.read_bytes())
        content[-100] ^= 4
        file.write_bytes(content)
    elif what == "another rank":
        rank = 1
    elif what == "other workers":
        one = replace(INT8, workers=3)
    elif what == "another step":
        step = 3
    else:
        file.unlink()
    made = PushResiduals(one, rank, file)
    assert made.lacking(step)
    assert not any(values.any() for values in kept(made, step)[-1:])
    made.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "worker-0").write_text("a file")
    with pytest.raises(UserError, match=r"(?s)Cannot write .*worker-0/residuals.*comm.codec=exact"):
        PushResiduals(INT8, 0, tmp_path / "worker-0" / "residuals")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("struck", ["node", "worker", "both"])
def test_int8_steps_after_a_kill_are_those_of_an_unbroken_run(tmp_path: Path, struck: str) -> None:
    """Struck when one worker has pushed a layer of the step and the other all of it."""

    def run(folder: Path, what: str) -> list[Tensor]:
        address = ("127.0.0.1", free_port())

        def start() -> OptimizerNode:
            files = on_disk(INT8, folder)
            made = OptimizerNode(INT8, files, socket.create_server(address), TOKEN, FAST)
            made.complete = True
            return made.start()

        def worker(rank: int) -> Client:
            made = client(address, INT8, rank)
            made.residuals = PushResiduals(INT8, rank, folder / f"residuals-{rank}")
            return made

        made = start()
        with ThreadPoolExecutor(2) as pool:
            workers = [worker(rank) for rank in range(2)]
            list(pool.map(lambda each: train(each, 3), workers))
            if what:
                pushed = pool.submit(push_all, workers[0], 3, [gradient(INT8, layer, 3) for layer in range(3)])
                workers[1].wait(workers[1].push(2, 3, gradient(INT8, 2, 3, 1)))
                if what != "worker":
                    made.close()
                    made = again(start)
                if what != "node":
                    workers[1].close(leave=False)
                    workers[1] = worker(1)
                with pytest.raises(StepLost):
                    pushed.result(20)
                assert workers[0].recover() == 3
                if what == "node":
                    assert workers[1].recover() == 3
            found = list(pool.map(lambda each: train(each, 6), workers))
        for each in workers:
            each.close()
        made.close()
        assert equal(*found)
        return found[0]

    assert equal(run(tmp_path / "struck", struck), run(tmp_path / "unbroken", ""))


def test_without_a_file_error_feedback_is_what_it_was() -> None:
    one = replace(INT8, workers=1)
    with node(one) as (_, address):
        worker = client(address, one)
        train(worker, 3)
        values = worker.residuals.of(0, 3)
        assert bool(values.any())
        assert values is worker.residuals.of(0, 3)
        assert torch.isfinite(values).all()
        worker.close()
