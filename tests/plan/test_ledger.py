"""The bytes that a plan foretells are the ledger's, to the byte, for every kind of workload and every way to send.

Each run is made twice, a few steps apart: what one step sends is the difference, which start and end have no part in.
Foretold is the rank that sends most; of lossless codecs, whose messages are as long as the values allow, a bound.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asked import processor

import espalier
from espalier.language import gpt, hf
from espalier.language.tokenizer import ByteTokenizer
from espalier.launch.ranks import agent
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan.base import Plan
from espalier.recipe import Recipe, defaults, recipe_file
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker, workload_registry
from espalier.train.rank_setup import RankSetup

FEW, MORE = 2, 1
THEIRS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Thousand(nn.Module):
    # Of one module: in as many modules, loading a state compares each with the names of all.

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(5, 5) / 5 for _ in range(1001))

    def forward(self, x):
        for matrix in self.matrices:
            x = nn.functional.linear(x, matrix)
        return x

def build(norm=False, many=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(67)] if norm else []
    blocks = [nn.Sequential(nn.Linear(67, 67), *middle, nn.Tanh()) for _ in range(3)]
    if many:
        blocks = [nn.Linear(67, 5), Thousand(), nn.Linear(5, 67)]
    model = nn.Sequential(nn.Linear(19, 67), *blocks, nn.Linear(67, 3))
    data = TensorDataset(torch.randn(24, 19), torch.randn(24, 3))

    def loss(model, batch):
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(float(len(y)))

    return model, data, loss
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(60))
        (folder / f"{number}.py").write_text(text)
    return folder


def language(corpus: Path, width: int = 32, **more: Any) -> Recipe:
    train = {"steps": 8, "sequence": 32, "batch_tokens": 384, "validate_every": 1000, "optimizer": {"kind": "adamw"}}
    train["validate_tokens"] = 384
    train |= more.pop("train", {})
    table = {
        "model": {"depth": 3, "width": width, "heads": 2, "feed_forward": 70},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": train,
        **more,
    }
    return recipe_file.from_table(table)


def graph(tmp_path: Path, **more: Any) -> Recipe:
    table = {
        "model": {"kind": "gcn", "depth": 2, "width": 9, "dropout": 0.0},
        "data": {"path": "planted:nodes=300,degree=6,features=13", "cache": str(tmp_path / "cache")},
        "graph": {"fanout": [3, 2]},
        "train": {"steps": 8, "batch_tokens": 24},
        **more,
    }
    return recipe_file.from_table(table)


def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "adamw", **arguments: bool) -> Recipe:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "sent.py").write_text(THEIRS)
    sys.modules.pop("sent", None)
    table = {"model": {"kind": "module", "build": "sent:build", "arguments": arguments}}
    return recipe_file.from_table(table | {"train": {"steps": 8, "batch_tokens": 12, "optimizer": {"kind": kind}}})


def sent(recipe: Recipe, plan: Plan, lengths: Sequence[int]) -> list[list[dict[str, float]]]:
    """Bytes by class that each rank sends in runs of so many steps, one after the other."""
    resolved = workload_registry.settle(recipe, None)

    def life(place: Any) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        with worker.joined(place, 90.0) as channel:
            for steps in lengths:
                train = msgspec.structs.replace(resolved.recipe.train, steps=steps)
                longer = msgspec.structs.replace(resolved.recipe, train=train)
                opened = workload_registry.open_workload(replace(resolved, recipe=longer))
                before = channel.ledger.by_class()
                trainer.Trainer(RankSetup(longer, plan, opened, place), channel).run()
                after = channel.ledger.by_class()
                found.append({kind: size - before.get(kind, 0.0) for kind, size in after.items()})
        return found

    return agent.run(life, launch.places(plan))


def compared(recipe: Recipe, plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """(what a step sends of each class on the rank that sends most, what was foretold)."""
    assert plan.executable
    assert plan.predicted is not None
    steps = plan.state(LocalRoundsState).steps
    few, more = (steps, 2 * steps) if plan.replicas else (FEW, MORE)
    if not plan.replicas:
        runs = sent(recipe, plan, (few, few + more))
    else:  # replicas that met in a store meet no second time
        runs = [[*one, *two] for one, two in zip(*(sent(recipe, plan, [n]) for n in (few, few + more)), strict=True)]
    steps = [{kind: (late[kind] - early.get(kind, 0.0)) / more for kind in late} for early, late in runs]
    found = {kind: max(one[kind] for one in steps) for kind in steps[0]}
    foretold = plan.predicted.sent_bytes
    return tuple({kind: size for kind, size in one.items() if size} for one in (found, foretold))


def equal(recipe: Recipe, ranks: int, count: int = 1, **pins: Any) -> Plan:
    """The plan of so many ranks of one thread, once its bytes were those of the ledger."""
    plan = espalier.make_plan(recipe, processor(cores=ranks // count, count=count), ranks=ranks, **pins)
    assert len(plan.ranks) == ranks
    found, foretold = compared(recipe, plan)
    assert found == pytest.approx(foretold, rel=1e-12), "to the byte; thirds of one are rounded"
    return plan


def shard(params: int, grads: int, optimizer: int) -> dict[str, int]:
    return {"params": params, "grads": grads, "optimizer": optimizer}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "states"),
    [(3, (1, 3, 3)), (2, (1, 1, 1)), (2, (2, 2, 2)), (3, (3, 3, 3))],
)
def test_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, states: Any) -> None:
    equal(module(tmp_path, monkeypatch), ranks, shard=shard(*states), micro_batch=2)


def test_of_a_module_whose_first_rank_gives_its_running_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal(module(tmp_path, monkeypatch, norm=True), 3, shard=shard(1, 1, 1))


def test_of_a_thousand_matrices_dealt_to_three_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equal(module(tmp_path, monkeypatch, "muon", many=True), 3, shard=shard(1, 1, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("frozen", "states"),
    [("bf16", (2, 2, 4)), ("int8", (1, 1, 4)), ("int4", (4, 4, 4))],
)
def test_of_adapters_beside_sharded_weights(tmp_path: Path, frozen: str, states: Any) -> None:
    """Frozen blocks are gathered in forward and backward as they are stored, and never summed."""
    sizes = {"depth": 3, "width": 36, "heads": 2, "feed_forward": 70, "vocabulary": 256, "tied": True}
    table = {"model": sizes, "data": {"path": "python:stdlib", "tokenizer": "bytes"}}
    model = gpt.GPT(defaults.resolve(recipe_file.from_table(table))[0].model)
    gpt.initialise(model, 1)
    hf.export(model, ByteTokenizer(), tmp_path / "base")
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2."}]
    (tmp_path / "chats.jsonl").write_text(40 * (json.dumps({"messages": turns}) + "\n"))
    table["model"] = {**sizes, "initial": str(tmp_path / "base")}
    table["data"] = {"path": str(tmp_path / "chats.jsonl"), "tokenizer": "bytes", "validation": 0.2}
    table["tune"] = {"kind": "lora", "rank": 3, "frozen": frozen}
    table["train"] = {"steps": 8, "sequence": 96, "batch_tokens": 768, "validate_every": 1000, "validate_tokens": 96}
    equal(recipe_file.from_table(table), 4, shard=shard(*states), micro_batch=1)


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("ranks", "states"),
    [(2, (1, 1, 2)), (3, (1, 1, 1)), (3, (3, 3, 3))],
)
def test_of_a_graph(tmp_path: Path, ranks: int, states: Any) -> None:
    equal(graph(tmp_path), ranks, shard=shard(*states))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("states", [(1, 1, 1), (1, 3, 3), (3, 3, 3)])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_of_unequal_buckets_on_three_ranks(corpus: Path, states: Any, kind: str) -> None:
    """Buckets of 20,000 bytes: none is as long as another, and none a multiple of three."""
    recipe = language(corpus, train={"optimizer": {"kind": kind}}, comm={"bucket": "20kB"})
    equal(recipe, 3, shard=shard(*states), micro_batch=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "states",
    [(1, 2, 4), (1, 1, 1), (1, 1, 2), (2, 2, 2), (2, 2, 4)],
)
def test_of_sixteen_bit_shards(corpus: Path, states: Any) -> None:
    """Norms stay in 32 bits beside them."""
    equal(language(corpus, train={"precision": "bf16"}), 4, shard=shard(*states))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "states",
    [(1, 2, 4), (1, 1, 1), (2, 2, 4), (4, 4, 4)],
)
def test_of_two_machines(corpus: Path, states: Any) -> None:
    recipe = language(corpus, sync={"kind": "every_step"}, comm={"codec": "exact", "bucket": "20kB"})
    equal(recipe, 4, count=2, shard=shard(*states), micro_batch=1)


CODECS = ["bf16", "int8", "int4", "int1", "topk:0.03", "zfp:8"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("ranks", "states"), [(2, (1, 1, 2)), (3, (1, 3, 3))])
def test_of_codecs_of_fixed_length(corpus: Path, codec: str, ranks: int, states: Any) -> None:
    """Headers included; what is too small to be encoded goes as it is."""
    recipe = language(corpus, comm={"codec": codec, "bucket": "60kB"})
    plan = equal(recipe, ranks, shard=shard(*states))
    assert [one.codec for one in plan.exchanges] == [codec]


def test_of_a_codec_between_machines(corpus: Path) -> None:
    recipe = language(corpus, sync={"kind": "every_step"}, comm={"codec": "int8"})
    for states in ((1, 1, 1), (1, 2, 4)):
        equal(recipe, 4, count=2, shard=shard(*states))


def test_of_sixteen_bit_shards_that_are_encoded(corpus: Path) -> None:
    equal(language(corpus, train={"precision": "bf16"}, comm={"codec": "int4"}), 2, shard=shard(1, 1, 2))


@pytest.mark.parametrize("codec", ["split", "mpc"])
def test_codecs_without_fixed_length_send_no_more_than_foretold(corpus: Path, codec: str) -> None:
    recipe = language(corpus, comm={"codec": codec})
    plan, raw = (
        espalier.make_plan(one, processor(cores=2), ranks=2, shard=shard(1, 1, 2)) for one in (recipe, language(corpus))
    )
    found, foretold = compared(recipe, plan)
    assert raw.predicted is not None
    assert found["gradients"] <= foretold["gradients"] <= 1.05 * raw.predicted.sent_bytes["gradients"]
    assert {**found, "gradients": 0} == {**foretold, "gradients": 0}


def test_what_a_policy_gathers_without_loss_is_no_more_than_foretold(corpus: Path) -> None:
    recipe = language(corpus, comm={"codec": "zhybrid"})
    plan = espalier.make_plan(recipe, processor(cores=2), ranks=2, shard=shard(1, 1, 2))
    found, foretold = compared(recipe, plan)
    assert found["gradients"] == foretold["gradients"]
    assert found["parameters"] <= foretold["parameters"]


KINDS = ("eager", "co2", "local_sgd", "streaming_diloco")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["exact", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_rounds(corpus: Path, kind: str, codec: str) -> None:
    sync = {"kind": kind, "replicas": 2, "steps": 4, "adapt": False, "codec": codec}
    plan = equal(language(corpus, sync=sync), 2)
    assert plan.replicas
    assert plan.state(LocalRoundsState).steps == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("penalty", ["none", "norm"])
def test_of_rounds_of_replicas_of_two_ranks(corpus: Path, penalty: str) -> None:
    sync = {"kind": "co2", "replicas": 2, "steps": 4, "adapt": True, "codec": "int8", "penalty": penalty}
    plan = equal(language(corpus, sync=sync), 4)
    assert plan.replicas
    assert plan.replicas == ((0, 1), (2, 3))


WIDE = {"sequence": 64, "batch_tokens": 1024, "validate_tokens": 1024}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("codec", ["zhybrid", "naive"])
@pytest.mark.parametrize(
    ("ranks", "machines", "layout"),
    [
        (2, 2, {"pp": 2, "micro_batch": 4}),
        (4, 2, {"pp": 4, "micro_batch": 4}),
        (3, 3, {"pp": 3, "micro_batch": 5}),
        (2, 1, {"pp": 2, "micro_batch": 4}),
        (2, 2, {"tp": 2, "micro_batch": 4}),
        (2, 2, {"sp": 2, "hp": 2, "micro_batch": 16}),
        (2, 2, {"sp": 2, "cp": 2, "micro_batch": 16}),
    ],
)
def test_of_what_stages_tensor_ranks_and_sequences_send(
    corpus: Path, codec: str, ranks: int, machines: int, layout: dict[str, int]
) -> None:
    """Activations, keys and values in the codec of their class, where they leave a machine."""
    sizes = {"depth": 4, "width": 64, "heads": 2, "feed_forward": 70, "tied": False}
    sync = {"kind": "every_step"}
    recipe, exact = (
        language(corpus, sync=sync, comm={"codec": name}, train=WIDE, model=sizes) for name in (codec, "exact")
    )
    plan = equal(recipe, ranks, count=machines, **layout)
    kind = "keys_values" if "cp" in layout else "activations"
    assert kind in {exchange.traffic for exchange in plan.exchanges}
    raw = espalier.make_plan(exact, processor(cores=ranks // machines, count=machines), ranks=ranks, **layout)
    assert plan.predicted is not None
    assert raw.predicted is not None
    assert plan.predicted.sent_bytes[kind] < 0.9 * raw.predicted.sent_bytes[kind]
