"""A worker that holds a window of layers trains as one that holds all of the model."""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from nodes import pulled_bytes, pushed_bytes
from tests.mechanisms.optimizer_node.plain_node import PlainClient, PlainNode
from tests.mechanisms.pipeline.runs import corpus, recipe_of

from espalier.language import hf
from espalier.language.workload import open_language
from espalier.machine import resource_limits
from espalier.mechanisms.optimizer_node import mechanism as luwu
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.parallel.layer_client import LayerClient, filler
from espalier.plan import base as plans
from espalier.plan.axes.node_cost import Layers
from espalier.plan.axes.node_layout import FlatLayer
from espalier.recipe import Adamw, Recipe
from espalier.recipe.errors import Anomaly, UserError
from espalier.train import table, trainer
from espalier.train.layer_window import window_size
from espalier.train.mechanism import Build
from espalier.train.rank_setup import RankSetup
from espalier.train.rank_spec import RankSpec


def recipe(folder: Path, **train: Any) -> Recipe:
    folder.mkdir(exist_ok=True)
    model = {"depth": 3, "tied": False} | train.pop("model", {})
    rows = {"precision": "fp32", "batch_tokens": 64, "validate_every": 10**6, "validate_tokens": 160}
    return recipe_of(corpus(folder), model, rows | train)


def plan(samples: int, micro_batch: int, workers: int = 1, **more: Any) -> plans.Plan:
    shares = [(samples * one // workers, samples * (one + 1) // workers) for one in range(workers)]
    nodes = (plans.Rank(role="optimizer"),) * more.pop("nodes", 1)
    return plans.Plan(
        ranks=(*(plans.Rank(share=share) for share in shares), *nodes),
        micro_batch=micro_batch,
        precision="fp32",
        **more,
    )


class Run:
    """A trainer on one rank, its node in this process."""

    def __init__(self, recipe: Recipe, how: plans.Plan, rank: int = 0, node: PlainNode | None = None) -> None:
        self.node = node
        workload = open_language(recipe)

        def connect(context: Build, layers: Sequence[FlatLayer]) -> LayerClient:
            if self.node is None:
                value = workload.skeleton().value
                options = recipe.train.optimizer
                assert isinstance(options, Adamw)
                fill = filler(layers, value)
                self.node = PlainNode(layers, options, fill)
            return PlainClient(self.node, rank)

        def choose(recipe: Recipe, plan: plans.Plan) -> Any:
            return luwu.ModelOnNodes(connect) if luwu.on_nodes(plan) else None

        rows = tuple(
            choose if getattr(row, "function", "") == "choose" and row.module == "optimizer_node.mechanism" else row
            for row in table.AWAY
        )
        self.setting = RankSetup(recipe, how, workload, RankSpec(rank=rank, world=1))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(table, "AWAY", rows)
            self.trainer = trainer.Trainer(self.setting, None)

    def steps(self, count: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(count):
            batches = self.setting.workload.batches(self.trainer.step, self.setting.shard)
            agreed = self.trainer.train_step(batches)
            found.append((agreed.loss, agreed.gradient_norm))
        return found


def plain(recipe: Recipe, micro_batch: int, count: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    samples = recipe.train.batch_tokens // recipe.train.sequence  # type: ignore[operator]
    whole = plans.Plan(ranks=(plans.Rank(share=(0, samples)),), micro_batch=micro_batch, precision="fp32")
    run = Run(recipe, whole)
    return run.steps(count), dict(run.trainer.built.model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro_batch", "clip"),
    [(4, 0.0), (1, 0.5), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((4, 0.5), (1, 0.0)))],
)
def test_fifty_steps_are_those_of_plain_adamw_to_the_last_bit(tmp_path: Path, micro_batch: int, clip: float) -> None:
    asked = recipe(tmp_path / "data", steps=50, clip=clip)
    expected, parameters = plain(asked, micro_batch, 50)
    run = Run(asked, plan(4, micro_batch))
    assert run.steps(50) == expected
    run.trainer.built.sharding.detach()
    for name, value in run.trainer.built.model.named_parameters():
        assert torch.equal(value, parameters[name]), name


def test_a_tied_table_is_a_layer_of_its_own_and_its_gradient_is_sent_once(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=5, model={"tied": True})
    expected, parameters = plain(asked, 4, 5)
    run = Run(asked, plan(4, 4))
    assert run.steps(5) == expected
    assert run.node is not None
    first = run.node.layers[0]
    assert [name for name, _ in first.tensors] == ["embedding.weight"]
    run.trainer.built.sharding.detach()
    for name, value in run.trainer.built.model.named_parameters():
        assert torch.equal(value, parameters[name]), name


def test_with_a_tied_table_accumulated_steps_differ_by_rounding_only(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=10, model={"tied": True})
    expected, _ = plain(asked, 1, 10)
    found = Run(asked, plan(4, 1)).steps(10)
    for (loss, norm), (like, like_norm) in zip(found, expected, strict=True):
        assert abs(loss - like) < 1e-5
        assert abs(norm - like_norm) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("micro_batch", "size"), [(4, 1), (1, 2), (4, 3), (4, 4)])
def test_a_step_pulls_and_pushes_what_the_cost_says_whatever_its_micro_batches(
    tmp_path: Path, tied: bool, micro_batch: int, size: int
) -> None:
    asked = recipe(tmp_path / "data", steps=5, model={"tied": tied})
    run = Run(asked, plan(4, micro_batch, choices={"optimizer_node": OptimizerNodeState(layer_window=size)}))
    run.steps(2)
    assert run.node is not None
    sharding = run.trainer.built.sharding
    sharding.window.drop()  # what was pulled ahead of the third step
    before = run.node.bytes.copy()
    run.steps(1)
    layers = Layers(tuple(one.numel for one in run.node.layers), tuple(map(tuple, sharding.window.uses)))
    size = sharding.window.size  # a tied table and a norm are needed at once
    ahead = sum(4 * run.node.layers[index].numel for index in sharding.window.usual[:size])
    assert run.node.bytes["pulled"] - before["pulled"] == pulled_bytes(layers, window=size) + ahead
    assert run.node.bytes["pushed"] - before["pushed"] == pushed_bytes(layers)
    assert sharding.window.peak <= sum(sorted(4 * one.numel for one in run.node.layers)[-size:])


def test_validation_and_samples_pull_what_they_need_and_change_nothing(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=4)
    expected, _ = plain(asked, 2, 4)
    run = Run(asked, plan(4, 2))
    found = run.steps(2)
    whole = Run(asked, plans.Plan(ranks=(plans.Rank(share=(0, 4)),), micro_batch=2, precision="fp32"))
    whole.steps(2)
    assert run.trainer.validate() == whole.trainer.validate()
    assert run.trainer.sample() == whole.trainer.sample()
    assert found + run.steps(2) == expected


def test_no_parameter_is_here_between_steps_but_those_pulled_ahead(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=3)
    run = Run(asked, plan(4, 4, choices={"optimizer_node": OptimizerNodeState(layer_window=1)}))
    run.steps(2)
    window = run.trainer.built.sharding.window
    assert window.held == 4 * window.layers[0].layer.numel
    window.drop()
    assert window.held == 0


def test_no_activation_outlives_its_step(tmp_path: Path) -> None:
    def graphs() -> int:
        gc.collect()
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))  # no proxy is asked
        return sum(each.grad_fn is not None for each in tensors)

    before = graphs()
    run = Run(recipe(tmp_path, steps=3), plan(4, 2))
    run.steps(2)
    assert graphs() == before


def test_a_gradient_that_is_not_finite_names_the_rank_and_moves_nothing(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=3)
    run = Run(asked, plan(4, 4))
    run.steps(1)
    assert run.node is not None
    before = [flat.clone() for flat in run.node.flats]
    run.node.flats[-1][0] = float("inf")
    with pytest.raises(Anomaly, match="not finite in step 2 on rank 0"):
        run.steps(1)
    assert run.node.step == 1
    assert all(torch.equal(*pair) for pair in zip(before[:-1], run.node.flats[:-1], strict=True))


def test_a_layer_that_a_worker_cannot_hold_is_refused_with_the_least_memory() -> None:
    layers = [FlatLayer("table", (("table", (1024, 256)),)), FlatLayer("head", (("head", (64, 256)),))]
    told = r"A worker has 1.00 MiB, and layer 'table' has 1.00 MiB .*\n.*at least: 2.00 MiB"
    with pytest.raises(UserError, match=told):
        window_size(layers, [[0], [1]], 0, 2**20)
    assert window_size(layers, [[0], [1]], 0, 2**23) == 3
    assert window_size(layers, [[0], [1], [0, 1]], 1, 2**23) == 2


def test_a_run_refuses_a_layer_larger_than_what_its_worker_may_hold(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=3)
    small = msgspec.structs.replace(asked, plan=msgspec.structs.replace(asked.plan, memory="3KiB"))
    with pytest.raises(UserError, match=r"A worker has .*, and layer '[\w.]+' has .*of parameters\.\n.*at least: "):
        Run(small, plan(4, 4))
    Run(msgspec.structs.replace(asked, plan=msgspec.structs.replace(asked.plan, memory="1MiB")), plan(4, 4)).steps(1)


def test_the_rest_of_the_address_space_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource_limits.address_space() == float("inf")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**40, 2**40))
    assert 2**39 < resource_limits.address_space() < 2**40


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"recompute": "block"}, "luwu and recompute_block cannot run together"),
        ({"compile": True}, "compile and luwu|luwu and compile"),
        ({"stages": (plans.Stage(ranks=(0,), tensor=2),)}, "cannot run"),
    ],
)
def test_what_cannot_run_with_it_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    asked = recipe(tmp_path / "data", steps=3)
    with pytest.raises(UserError, match=told):
        Run(asked, plan(4, 4, **changes))


def test_muon_is_refused_and_the_nodes_adamw_named(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=3, optimizer={"kind": "muon"})
    with pytest.raises(UserError, match="muon needs whole matrices"):
        Run(asked, plan(4, 4))


@pytest.mark.parametrize("kind", ["gpt", "moe"])
def test_a_skeletons_values_are_those_of_the_whole_model(tmp_path: Path, kind: str) -> None:
    workload = open_language(recipe(tmp_path / "data", steps=3, model={"kind": kind}))
    whole, skeleton = workload.build(torch.device("cpu"), torch.float32), workload.skeleton()
    assert all(one.is_meta for one in skeleton.model.parameters())
    for name, value in whole.named_parameters():
        assert torch.equal(skeleton.value(name), value), name
    for name, value in whole.named_buffers():
        assert torch.equal(skeleton.model.get_buffer(name), value), name


def test_a_skeleton_of_exported_weights_reads_them_one_by_one(tmp_path: Path) -> None:
    asked = recipe(tmp_path / "data", steps=3)
    first = open_language(asked)
    hf.export(first.build(torch.device("cpu"), torch.float32), first.tokenizer, tmp_path / "export")
    model = msgspec.structs.replace(asked.model, initial=str(tmp_path / "export"))
    workload = open_language(msgspec.structs.replace(asked, model=model))
    skeleton = workload.skeleton()
    for name, value in workload.build(torch.device("cpu"), torch.float32).named_parameters():
        assert torch.equal(skeleton.value(name), value), name
