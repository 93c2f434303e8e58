"""Runs whose model is on an optimizer node: real processes and sockets, files on the disk, against plain runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from nodes import link_bytes, pushed_bytes
from tests.mechanisms.optimizer_node.test_window import plain, plan, recipe
from torch.distributed.fsdp import fully_shard

from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.optim.schedules import factor
from espalier.parallel.workload import Shard
from espalier.plan import base as plans
from espalier.plan.axes.node_cost import Layers
from espalier.recipe import Adamw, DiskOptions, Recipe
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup
from many_ranks import forks


class Trained(NamedTuple):
    """What a worker showed."""

    steps: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    pulled: int
    pushed: dict[str, float]
    first: int


def run(asked: Recipe, how: plans.Plan, folder: Path, until: int) -> list[Trained]:
    """Of the workers: from the step of the node's files to `until`."""
    workload = open_language(asked)

    def life(place: launch.RankSpec) -> Any:
        setting = RankSetup(asked, how, workload, place, folder=folder)
        with worker.joined(place, 90.0) as channel:
            if place.role == "optimizer":
                return worker.as_optimizer(setting, channel)
            made = trainer.Trainer(setting, channel)
            made.step = first = made.built.resumed() or 0
            found = []
            for step in range(first, until):
                agreed = made.train_step(workload.batches(step, setting.shard))
                found.append((agreed.loss, agreed.gradient_norm))
            made.built.sharding.detach()
            weights = {name: one.detach().clone() for name, one in made.built.model.named_parameters()}
            client = made.built.sharding.client
            told = link_bytes(client)[1], {str(kind): count for (kind, _), count in client.ledger.bytes.items()}, first
            made.built.close()
        return (found, weights, *told)

    told = agent.run(life, launch.places(how))
    return [Trained(*one) for one, rank in zip(told, how.ranks, strict=True) if rank.role == "trainer"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nodes", [1, 2])
def test_one_worker_and_its_nodes_train_to_the_last_bit_as_plain_adamw(tmp_path: Path, nodes: int) -> None:
    asked = recipe(tmp_path / "data", steps=20, clip=0.5)
    expected, parameters = plain(asked, 2, 20)
    (found,) = run(asked, plan(4, 2, nodes=nodes), tmp_path / "run", 20)
    assert found.steps == expected
    for name, value in found.weights.items():
        assert torch.equal(value, parameters[name]), name
    assert len(list((tmp_path / "run" / "optimizer").glob("node-*/state"))) == nodes


def test_a_run_goes_on_from_the_nodes_files_to_the_last_bit(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=12)
    expected, parameters = plain(asked, 2, 12)
    (first,) = run(asked, plan(4, 2), tmp_path / "run", 5)
    (then,) = run(asked, plan(4, 2), tmp_path / "run", 12)
    assert (first.first, then.first) == (0, 5)
    assert first.steps + then.steps == expected
    assert all(torch.equal(value, parameters[name]) for name, value in then.weights.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [2, 4])
def test_several_workers_train_as_one_and_end_with_the_same_bits(tmp_path: Path, workers: int) -> None:
    asked = recipe(tmp_path / "data", steps=10, optimizer={"kind": "adamw", "learning_rate": 0.002})
    expected, parameters = plain(asked, 1, 10)
    ranks = run(asked, plan(4, 1, workers), tmp_path / "run", 10)
    for one in ranks:
        assert one.steps == ranks[0].steps
        assert all(torch.equal(value, ranks[0].weights[name]) for name, value in one.weights.items())
    for (loss, norm), (like, like_norm) in zip(ranks[0].steps, expected, strict=True):
        assert abs(loss - like) <= 1e-6 * abs(like)
        assert abs(norm - like_norm) <= 1e-5 * like_norm
    for name, value in ranks[0].weights.items():
        assert torch.allclose(value, parameters[name], atol=1e-5), name


@pytest.mark.parametrize(("codec", "width"), [("exact", 4), ("int8", 1)])
def test_the_ledger_has_the_bytes_that_the_cost_says(tmp_path: Path, codec: str, width: int) -> None:
    asked = recipe(tmp_path / "data", steps=3)
    how = plan(4, 1, 2, exchanges=(plans.Exchange(traffic="gradients", codec=codec),))
    ranks = run(asked, how, tmp_path / "run", 3)
    numel = sum(one.numel() for one in ranks[0].weights.values())
    for one in ranks:
        assert one.pushed["gradients"] == 3 * pushed_bytes(Layers((numel,), ((0,),)), width)


def test_workers_with_unequal_shares_train_as_one(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=10, optimizer={"kind": "adamw", "learning_rate": 0.002})
    expected, parameters = plain(asked, 1, 10)
    how = plan(4, 1, 2)
    shares = ((0, 3), (3, 4), (0, 0))
    how = msgspec.structs.replace(
        how,
        ranks=tuple(msgspec.structs.replace(one, share=share) for one, share in zip(how.ranks, shares, strict=True)),
    )
    ranks = run(asked, how, tmp_path / "run", 10)
    assert ranks[0].steps == ranks[1].steps
    for (loss, _), (like, _) in zip(ranks[0].steps, expected, strict=True):
        assert abs(loss - like) <= 1e-6 * abs(like)
    for name, value in ranks[0].weights.items():
        assert torch.equal(value, ranks[1].weights[name])
        assert torch.allclose(value, parameters[name], atol=1e-5), name


def test_a_run_goes_on_with_other_workers(tmp_path: Path) -> None:
    """Workers hold no state: a run of one goes on with two, then with one; the samples of a step stay the same."""
    asked = recipe(tmp_path / "data", steps=12, optimizer={"kind": "adamw", "learning_rate": 0.002})
    expected, parameters = plain(asked, 1, 12)
    found: list[tuple[float, float]] = []
    for workers, until in ((1, 4), (2, 8), (1, 12)):
        ranks = run(asked, plan(4, 1, workers), tmp_path / "run", until)
        assert ranks[0].first == len(found)
        found += ranks[0].steps
    for (loss, _), (like, _) in zip(found, expected, strict=True):
        assert abs(loss - like) <= 1e-5 * abs(like)
    assert all(torch.allclose(value, parameters[name], atol=1e-5) for name, value in ranks[0].weights.items())


def test_a_node_whose_files_are_on_two_disks_serves_the_same_bits(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=3)
    two = msgspec.structs.replace(asked, store=DiskOptions(path=(str(tmp_path / "a"), str(tmp_path / "b"))))
    (one,), (striped,) = (run(how, plan(4, 2), tmp_path / "run", 3) for how in (asked, two))
    assert one.steps == striped.steps
    sizes = [(tmp_path / name / "node-0" / "state").stat().st_size for name in ("a", "b")]
    assert min(sizes) > 0.4 * sum(sizes)


def fully_sharded(asked: Recipe, steps: int) -> list[float]:
    """Losses of two ranks of FSDP2 over Gloo, each with half of the samples."""
    samples = asked.train.batch_tokens // asked.train.sequence  # type: ignore[operator]
    options, workload = asked.train.optimizer, open_language(asked)
    assert isinstance(options, Adamw)

    def life(channel: Any) -> list[float]:
        rank = channel.rank()
        model, found = workload.build(torch.device("cpu"), torch.float32), []
        for block in (*workload.blocks(model), model):
            fully_shard(block, reshard_after_forward=True)
        kinds = [[one for one in model.parameters() if (one.ndim >= 2) is matrix] for matrix in (True, False)]
        groups = [{"params": kinds[0], "weight_decay": options.weight_decay}, {"params": kinds[1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=options.betas, eps=options.epsilon, fused=True
        )
        for step in range(steps):
            (batch,) = workload.batches(step, Shard(rank * samples // 2, (rank + 1) * samples // 2, samples // 2))
            value, weight = workload.loss(model, batch)
            (2 * value / workload.nominal_weight).backward()  # FSDP2 divides by the number of ranks
            rate = factor(asked.train.schedule, step, asked.train.steps or 0)
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * rate
            optimizer.step()
            optimizer.zero_grad()
            sums = torch.stack([value.detach().double(), weight.double()])
            dist.all_reduce(sums)
            found.append(float(sums[0] / sums[1]))
        return found

    return forks(2, life)[0]


def test_two_workers_lose_what_fully_sharded_ranks_do_within_rounding(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=10, clip=0.0, optimizer={"kind": "adamw", "learning_rate": 0.002})
    peers = fully_sharded(asked, 10)
    ranks = run(asked, plan(4, 2, 2), tmp_path / "run", 10)
    for (loss, _), like in zip(ranks[0].steps, peers, strict=True):
        assert abs(loss - like) <= 1e-6 * abs(like)
