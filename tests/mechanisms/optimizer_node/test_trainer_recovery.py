"""Trainers whose node is killed, or steps before the norm is known: to the bits of an unbroken run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import FAST, TOKEN, free_port
from tests.mechanisms.optimizer_node.test_window import plain, plan, recipe

from espalier.language.workload import open_language
from espalier.mechanisms.optimizer_node import mechanism as luwu
from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import NodeStep, OptimizerNode
from espalier.mechanisms.optimizer_node.role import job_of
from espalier.mechanisms.optimizer_node.state_file import open_state, open_sums
from espalier.parallel.layer_client import filler, layers_of
from espalier.plan import base as plans
from espalier.plan.axes.node_layout import FlatLayer, NodeJob
from espalier.recipe import Recipe
from espalier.train import table, trainer
from espalier.train.mechanism import Build
from espalier.train.rank_setup import RankSetup
from espalier.train.rank_spec import RankSpec

STEPS = 24


class Nodes:
    """A node of a recipe's run in a process of its own, or here. Has state."""

    def __init__(self, asked: Recipe, how: plans.Plan, folder: Path) -> None:
        self.workload, self.folder, self.address = open_language(asked), folder, ("127.0.0.1", free_port())
        model, self.value = self.workload.skeleton()
        pieces = self.workload.pieces(model)
        assert pieces is not None
        self.job: NodeJob = job_of(asked, how, layers_of(model, pieces)[0])
        open_state(folder, self.job, filler(self.job.layers, self.value)).close()

    def made(self) -> OptimizerNode:
        kept = open_state(self.folder, self.job, lambda *_: None), open_sums(self.folder, self.job)
        return OptimizerNode(self.job, kept, socket.create_server(self.address), TOKEN, FAST).start()

    def begin(self) -> None:
        def serve() -> None:
            torch.set_num_threads(1)
            self.made().wait()

        self.process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
        self.process.start()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


def worker(asked: Recipe, how: plans.Plan, nodes: Nodes, rank: int = 0) -> trainer.Trainer:
    def connect(context: Build, layers: Sequence[FlatLayer]) -> Client:
        return Client([[nodes.address]], rank, nodes.job, TOKEN, FAST)

    def choose(recipe: Recipe, plan: plans.Plan) -> Any:
        return luwu.ModelOnNodes(connect)

    setting = RankSetup(asked, how, nodes.workload, RankSpec(rank=rank, world=1))
    with pytest.MonkeyPatch.context() as patched:
        rows = tuple(
            choose if getattr(row, "function", "") == "choose" and row.module == "optimizer_node.mechanism" else row
            for row in table.AWAY
        )
        patched.setattr(table, "AWAY", rows)
        return trainer.Trainer(setting, None)


def losses(made: trainer.Trainer, steps: int) -> list[tuple[float, float]]:
    """Of every step; the model is looked at in between as the trainer does."""
    found = []
    while made.step < steps:
        agreed = made.train_step(made.workload.batches(made.step, made.setting.shard))
        found.append((agreed.loss, agreed.gradient_norm))
        if made.step % 8 == 0:
            made._whole(made.validate)
            made._whole(made.built.sharding.settle)
    made.built.close()
    return found


def strike(nodes: Nodes, draw: random.Random, made: trainer.Trainer) -> None:
    """Kills and restarts the node three times, at random moments of a random step."""
    for step in sorted(draw.sample(range(1, STEPS - 2), 3)):
        while made.step < step:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)
        nodes.kill()
        nodes.begin()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_killed_at_random_points_costs_two_trainers_no_bit(tmp_path: Path, seed: int) -> None:
    asked, how = recipe(tmp_path / "data", steps=STEPS, clip=0.5), plan(4, 1, 2)

    def run(folder: Path, strikes: bool) -> list[list[tuple[float, float]]]:
        nodes = Nodes(asked, how, folder)
        nodes.begin()
        try:
            with ThreadPoolExecutor(2) as pool:
                made = [worker(asked, how, nodes, rank) for rank in range(2)]
                runs = [pool.submit(losses, one, STEPS) for one in made]
                if strikes:
                    strike(nodes, random.Random(seed), made[0])
                return [one.result(50) for one in runs]
        finally:
            nodes.kill()

    unbroken = run(tmp_path / "unbroken", strikes=False)
    assert unbroken[0] == unbroken[1]
    assert run(tmp_path / "struck", strikes=True) == unbroken


def test_steps_taken_before_the_norm_is_known_are_those_of_a_second_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(tmp_path / "data", steps=STEPS, clip=2.2)
    expected, parameters = plain(asked, 4, STEPS)
    how, decided = plan(4, 4), []
    finish = OptimizerNode._finish

    def watched(node: OptimizerNode, step: NodeStep) -> None:
        decided.append((step.expected, step.decision))
        finish(node, step)

    monkeypatch.setattr(OptimizerNode, "_finish", watched)
    for ahead in (True, False):
        nodes = Nodes(asked, how, tmp_path / str(ahead))
        node, made = nodes.made(), worker(asked, how, nodes)
        sharding = made.built.sharding
        assert isinstance(sharding, luwu.NodeSharding)
        sharding.rate = sharding.rate if ahead else None
        decided.clear()
        found = []
        for step in range(STEPS):
            agreed = made.train_step(made.workload.batches(step, made.setting.shard))
            found.append((agreed.loss, agreed.gradient_norm))
        assert found == expected
        sharding.detach()
        assert all(one.equal(parameters[name]) for name, one in made.built.model.named_parameters())
        taken = [one == decision for one, decision in decided if one is not None]
        assert (sum(taken) >= 3 and not all(taken)) if ahead else not taken, decided
        made.built.close()
        node.close()
