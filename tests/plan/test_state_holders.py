"""Planned bytes of parameters, gradients and optimizer states are those that ranks allocate, experts over ranks too."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from asked import processor
from test_ledger import compared
from tests.mechanisms.pipeline.runs import corpus

import espalier
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.plan.axes.flat_layout import Sized
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.sharding import Division
from espalier.plan.axes.state_holders import fullest, nested
from espalier.plan.base import Plan
from espalier.recipe import Recipe, defaults, recipe_file
from espalier.train import rank_spec, trainer, worker
from espalier.train.rank_setup import RankSetup
from many_ranks import ranks

KINDS = ("params", "grads", "optimizer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return corpus(tmp_path_factory.mktemp("corpus"))


def mixture(folder: Path, model: Mapping[str, Any], train: Mapping[str, Any]) -> Recipe:
    sizes = {"kind": "moe", "depth": 4, "width": 16, "heads": 4, "kv_heads": 2, "experts": 6, "feed_forward": 24}
    steps = {"steps": 1, "sequence": 16, "batch_tokens": 128, "precision": "fp32", "optimizer": {"kind": "adamw"}}
    table = {
        "model": {**sizes, **model},
        "data": {"path": str(folder), "cache": str(folder.parent / "cache"), "validation": 0.2},
        "train": {**steps, "validate_every": 100, "validate_tokens": 160, **train},
        "faults": {"memory": 0},
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def planned(recipe: Recipe, world: int, shards: Sequence[int], **pins: Any) -> Plan:
    shard = dict(zip(("params", "grads", "optimizer"), shards, strict=True))
    plan = espalier.make_plan(recipe, processor(cores=world), ranks=world, shard=shard, **pins)
    assert plan.executable
    return plan


def allocated(recipe: Recipe, plan: Plan, steps: bool) -> dict[str, int]:
    """Bytes by kind on the rank that has most; `steps`: after training, by processes instead of threads."""
    opened, places = open_language(recipe), rank_spec.places(plan)

    def bytes_of(channel: Any, place: Any) -> dict[str, int]:
        made = trainer.Trainer(RankSetup(recipe, plan, opened, place), channel)
        if steps:
            made.run()
        sizes = made.built.sharding.bytes_held()
        states = made.built.optimizer.state_dict().values()
        moments = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.ndim)
        made.built.close()
        return {"params": sizes["params"], "grads": sizes["grads"], "optimizer": sizes["masters"] + moments}

    def life(place: Any) -> dict[str, int]:
        with worker.joined(place, 90.0) as channel:
            return bytes_of(channel, place)

    if steps:
        each = agent.run(life, places)
    else:
        each = ranks(len(places), lambda channel: bytes_of(channel, places[channel.rank()]))
    return {kind: max(rank[kind] for rank in each) for kind in KINDS}


def foretold(plan: Plan) -> dict[str, float]:
    assert plan.predicted is not None
    return {kind: plan.predicted.memory_bytes[kind] for kind in KINDS}


class Draw(NamedTuple):
    """Sizes of a model, its training, and the ranks that each state is split over."""

    model: dict[str, Any]
    train: dict[str, Any]
    degrees: dict[str, Any]


def drawn(draw: random.Random) -> Draw:
    """A small model on at most eight ranks, experts over some of them."""
    tp, pp, data = draw.choice([(1, 1, 2), (1, 1, 4), (1, 1, 6), (1, 2, 4), (2, 1, 4), (2, 2, 2), (4, 1, 2), (1, 3, 2)])
    divisors = [degree for degree in range(1, data + 1) if data % degree == 0]
    whole = tp * pp == 1  # the model; where it is cut, experts on every rank are priced as a dense model is
    ep, optimizer = draw.choice(divisors if whole else divisors[1:]), draw.choice(divisors)
    grads = draw.choice([degree for degree in divisors if optimizer % degree == 0])
    params = draw.choice([degree for degree in divisors if grads % degree == 0])
    depth = draw.choice((3, 4, 5))
    # Of tied tables and uneven layers the first rank may have most parameters and the last most optimizer states.
    model = {
        "depth": depth,
        "experts": draw.choice((6, 7, 8)),
        "feed_forward": draw.choice((20, 24, 36)),
        "tied": depth % pp == 0 and draw.random() < 0.5,
        "balancing": draw.choice(("loss", "bias")),
        "shared": draw.choice((0, 8)),
    }
    low = optimizer > 1 and draw.random() < 0.5  # else parameters stay fp32 and autocast copies them
    precision = "bf16" if low else draw.choice(("fp32", "fp64"))
    degrees = {"tp": tp, "pp": pp, "ep": ep, "shards": (params, grads, optimizer), "world": tp * pp * data}
    return Draw(model, {"precision": precision}, degrees)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 1 else ()) for seed in range(25)]
)
def test_planned_bytes_are_allocated_bytes(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(8):
        model, train, degrees = drawn(draw)
        recipe = mixture(folder, model, train)
        plan = planned(recipe, **degrees)
        assert allocated(recipe, plan, steps=False) == foretold(plan), (model, train, degrees)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "pins"),
    [
        (4, {"ep": 2, "shards": (1, 1, 4)}),
        (4, {"ep": 4, "shards": (1, 2, 2)}),
        (4, {"ep": 2, "shards": (2, 4, 4)}),
        (4, {"ep": 2, "pp": 2, "shards": (1, 1, 2)}),
        (8, {"ep": 2, "pp": 2, "shards": (2, 2, 4)}),
    ],
)
def test_ranks_that_train_hold_what_is_planned(folder: Path, world: int, pins: dict[str, Any]) -> None:
    recipe = mixture(folder, {}, {"precision": "fp32"})
    plan = planned(recipe, world, **pins)
    assert allocated(recipe, plan, steps=True) == foretold(plan)


def test_matrices_that_muon_moves_count_with_one_moment(folder: Path) -> None:
    recipe = mixture(folder, {}, {"optimizer": {"kind": "muon"}})
    for ep, shards in ((2, (1, 2, 4)), (4, (1, 1, 4)), (4, (1, 4, 4)), (2, (1, 1, 1))):
        plan = planned(recipe, 4, shards, pp=1, ep=ep)
        assert allocated(recipe, plan, steps=False) == pytest.approx(foretold(plan), rel=1e-12)


@pytest.mark.parametrize(
    "shards",
    [(1, 2, 4), *(pytest.param(shards, marks=pytest.mark.slow) for shards in ((1, 1, 1), (1, 1, 2), (2, 4, 4)))],
)
def test_gradients_of_experts_are_sent_to_the_ranks_that_share_them(folder: Path, shards: Any) -> None:
    """Of four ranks two hold the same experts: what a step sends of gradients and parameters is on the ledger."""
    recipe = mixture(folder, {}, {"steps": 8})
    plan = planned(recipe, 4, shards, ep=2, micro_batch=1)
    real, told = compared(recipe, plan)
    names = [name for name in ("gradients", "parameters") if name in told]
    assert [real[name] for name in names] == pytest.approx([told[name] for name in names], rel=1e-12)


def test_an_experts_states_are_split_over_the_ranks_that_hold_it() -> None:
    holders = np.array([1, 2, 3, 6, 8, 12])
    factors = nested(ShardFactors(2, 4, 8), holders)
    assert factors.optimizer.tolist() == [1, 2, 3, 6, 8, 6]
    assert factors.grads.tolist() == [1, 2, 3, 3, 4, 3]
    assert factors.params.tolist() == [1, 2, 1, 1, 2, 1]
    everything = Division(grads=np.array([1, 2, 8]), optimizer=np.array([1, 4, 8]), ranks=8, stride=2, machine=4)
    experts = everything.of_experts(4)
    assert experts.optimizer.tolist() == [1, 2, 2]
    assert experts.grads.tolist() == [1, 2, 2]
    assert (experts.ranks, experts.stride, experts.machine) == (2, 8, 1)


def test_the_fullest_rank_of_a_pipeline() -> None:
    kind = ("torch.float32", True)

    def elements(table: int, head: int, stages: int, chunks: int = 1, ep: int = 1) -> int:
        """Of five layers of two experts."""
        layers = [Sized(10, 4, block, kind, True, range(2), 2) for block in range(5)]
        tensors = [Sized(table, 4, None, kind, False), *layers, Sized(head, 4, None, kind, False)]
        return sum(tensor.elements * tensor.copies for tensor in fullest(tensors, ep, stages, chunks))

    assert elements(7, 8, 1) == 7 + 100 + 8
    assert elements(7, 8, 1, ep=2) == 7 + 50 + 8
    assert elements(7, 8, 2) == 60 + 8
    assert elements(90, 8, 2) == 90 + 40
    assert elements(7, 8, 2, chunks=2) == 60 + 8
