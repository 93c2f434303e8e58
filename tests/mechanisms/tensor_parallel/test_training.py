"""A run whose ranks share matrices has the curve and the weights of one rank, and resumes under any other cut."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from decoders import whole

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli import resolve_recipe
from espalier.language import generate, hf
from espalier.language.gpt import roles
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.machine import cluster
from espalier.parallel.tensor_roles import check, modules_with_roles
from espalier.plan import base as plans
from espalier.plan.layout_estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.recipe import Recipe, defaults, recipe_file
from espalier.recipe.errors import Interrupted, UserError
from espalier.train import rank_spec as launch
from espalier.train import table, trainer, worker
from espalier.train.rank_setup import RankSetup
from espalier.train.workload_registry import Resolved

STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(60))
        (folder / f"{number}.py").write_text(text)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _short_samples() -> Iterator[None]:
    """Of 30 tokens, twice what a window holds."""
    plain = generate.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "generate", lambda *given, tokens, **how: plain(*given, tokens=30, **how))
        yield


def recipe_of(corpus: Path, model: dict[str, Any] | None = None, **train: Any) -> Recipe:
    table = {
        "model": {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 50, **(model or {})},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": {
            "steps": STEPS, "sequence": 15, "batch_tokens": 120, "validate_tokens": 240, "precision": "fp64",
            "clip": 0.5, "optimizer": {"kind": "adamw"}, **train,
        },
    }  # fmt: skip
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(recipe: Recipe, ranks: int, tensor: int, shard: Any = (1, 1, 1), **more: Any) -> plans.Plan:
    cut = {name: more.pop(name, 1) for name in ("heads", "context")}
    width = tensor * cut["heads"] * cut["context"]
    samples, groups = recipe.train.batch_tokens // recipe.train.sequence, ranks // width
    share = [(samples * group // groups, samples * (group + 1) // groups) for group in range(groups)]
    held = {
        name: tuple(range(0, ranks, tensor))[:size] if size > 1 else ()
        for name, size in zip(("params", "grads", "optimizer"), shard, strict=True)
    }
    stages = (plans.Stage(ranks=tuple(range(ranks)), layers=(0, 2), tensor=tensor, **cut),) if tensor > 1 else ()
    given: dict[str, Any] = {"micro_batch": 2, "algorithm": "megatron" if tensor > 1 else "data", **more}
    return plans.Plan(
        ranks=tuple(plans.Rank(share=share[rank // width % groups]) for rank in range(ranks)),
        units=(plans.Unit(**held),),
        stages=stages,
        precision=recipe.train.precision,
        **given,
    )


def trained(
    recipe: Recipe, plan: plans.Plan, folder: Path, stop_after: int | None = None, *, sample: bool = False
) -> dict[str, Any]:
    """Curve, norms and validation of rank 0, and a sample on demand; its checkpoints are in `folder`."""
    workload = open_language(recipe)

    def life(place: Any) -> Any:
        found: dict[str, Any] = {"loss": [], "gradient_norm": [], "validation": [], "bytes": []}

        def emit(event: str, **fields: Any) -> None:
            for name in ("loss", "gradient_norm", "bytes") if event == "step" else ():
                found[name].append(fields[name])
            if event == "validation":
                found["validation"].append(fields["loss"])

        setting = RankSetup(recipe, plan, workload, place, folder, emit, stop_after=stop_after)
        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(setting, channel)
            saved = Checkpoints(folder / "checkpoints", keep=2, group=worker.saving_group(channel))
            one.restore(saved)
            try:
                one.run(saved)
            except Interrupted:
                assert stop_after is not None
            found["sample"] = [artifact.fields for artifact in one.sample()] if sample else []
            saved.wait()
            found["matrices"] = {n: tuple(p.shape) for n, p in one.built.model.named_parameters()}
        return found

    results = agent.run(life, launch.places(plan))
    assert all(one["loss"] == results[0]["loss"] for one in results)
    found: dict[str, Any] = results[0]
    return found


@pytest.fixture(scope="module")
def one_rank(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(what one rank's run showed, its folder) of a model, made once."""
    known: dict[str, Any] = {}

    def made(model: dict[str, Any]) -> tuple[dict[str, Any], Path]:
        if str(model) not in known:
            recipe, folder = recipe_of(corpus, model), tmp_path_factory.mktemp("one")
            known[str(model)] = trained(recipe, plan_of(recipe, 1, 1), folder, sample=True), folder
        return known[str(model)]

    return made


def weights(recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint holds, read by one rank."""
    model = open_language(recipe).build(torch.device("cpu"), torch.float64)
    Checkpoints(folder / "checkpoints").load({"model": model})
    return model.state_dict()


def same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    for name in ("loss", "gradient_norm", "validation"):
        assert ours[name] == pytest.approx(theirs[name], rel=tolerance), name


CASES = {
    "tensor of 4, more ranks than key-value heads, tied": (4, 4, (1, 1, 1), {}, {"tied": True}),
    "2 replicas of 2, all states sharded, FSP": (4, 2, (2, 2, 2), {"algorithm": "fsp"}, {"tied": True}),
    "2 by 2 heads of a sequence": (4, 2, (1, 1, 1), {"heads": 2}, {}),
    "norms of heads, shards": (4, 2, (1, 2, 2), {}, {"family": "qwen3", "head_size": 16}),
    "experts": (2, 2, (1, 1, 1), {}, {"kind": "moe", "experts": 3, "active": 2}),
    "experts picked with a bias": (
        *(2, 2, (1, 1, 1), {}),
        {"kind": "moe", "experts": 3, "active": 2, "balancing": "bias", "z_loss": 0.01},
    ),
}


NORMAL = (
    "tensor of 4, more ranks than key-value heads, tied",
    "2 replicas of 2, all states sharded, FSP",
    "experts picked with a bias",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in NORMAL else pytest.mark.slow) for case in CASES]
)
def test_curve_weights_validation_and_sample_are_those_of_one_rank(
    corpus: Path, one_rank: Any, tmp_path: Path, case: str
) -> None:
    ranks, tensor, shard, more, model = CASES[case]
    recipe = recipe_of(corpus, model)
    one, folder = one_rank(model)
    cut = trained(recipe, plan_of(recipe, ranks, tensor, shard, **more), tmp_path / "cut", sample=True)
    same(cut, one, 1e-9)
    assert cut["sample"] == one["sample"]
    wanted, found = weights(recipe, folder), weights(recipe, tmp_path / "cut")
    assert wanted.keys() == found.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-10)
    assert cut["matrices"]["blocks.0.attention.out.weight"] == (32, 4 * model.get("head_size", 8) // tensor)


MUON = {
    "tensor of 4, more ranks than key-value heads": (4, 4, (1, 1, 1), {}),
    "2 replicas of 2, optimizer states sharded": (4, 2, (1, 1, 2), {"algorithm": "fsp"}),
    "2 replicas of 2, all states sharded": (4, 2, (2, 2, 2), {}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "4" in case[:11] else pytest.mark.slow) for case in MUON]
)
def test_muon_over_cut_matrices_has_the_curve_and_weights_of_one_rank(corpus: Path, tmp_path: Path, case: str) -> None:
    ranks, tensor, shard, more = MUON[case]
    recipe = recipe_of(corpus, optimizer={"kind": "muon"})
    one = trained(recipe, plan_of(recipe, 1, 1), tmp_path / "one")
    plan = plan_of(recipe, ranks, tensor, shard, **more)
    plan = msgspec.structs.replace(plan, units=(msgspec.structs.replace(plan.units[0], whole=shard[2] > 1),))
    trained(recipe, plan, tmp_path / "cut", stop_after=2)
    cut = trained(recipe, plan, tmp_path / "cut")
    assert cut["loss"] == pytest.approx(one["loss"][2:], rel=1e-9)
    assert cut["validation"] == pytest.approx(one["validation"], rel=1e-9)
    wanted, found = weights(recipe, tmp_path / "one"), weights(recipe, tmp_path / "cut")
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-10)
    if tensor == 2:
        machine = cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
        factors = dict(zip(("params", "grads", "optimizer"), shard, strict=True))
        layout = Layouts(algorithm=plan.algorithm, dp=2, tp=2, micro_batch=2, **factors)
        predicted = estimate(resolve_recipe.request(Resolved(recipe)), machine, layout).sent_bytes
        assert cut["bytes"][-1]["parameters"] == pytest.approx(predicted["parameters"], rel=0.03)


OTHER_CUTS = {"1": (1, 1, (1, 1, 1)), "4": (4, 4, (1, 1, 1)), "dp": (2, 1, (2, 2, 2))}
"""Ranks, ranks of each matrix, and shards."""


@pytest.mark.parametrize("cuts", [["dp"], pytest.param(["1", "4"], marks=pytest.mark.slow)])
def test_a_checkpoint_of_one_cut_resumes_under_any_other(
    corpus: Path, one_rank: Any, tmp_path: Path, cuts: list[str]
) -> None:
    recipe = recipe_of(corpus)
    unbroken, _ = one_rank({})
    begun = plan_of(recipe, 4, 2, (1, 2, 2))
    trained(recipe, begun, tmp_path / "begun", stop_after=2)
    saved = weights(recipe, tmp_path / "begun")
    for name in cuts:
        ranks, tensor, shard = OTHER_CUTS[name]
        shutil.copytree(tmp_path / "begun", tmp_path / name)
        again = trained(recipe, plan_of(recipe, ranks, tensor, shard), tmp_path / name)
        assert again["loss"] == pytest.approx(unbroken["loss"][2:], rel=1e-9)
        assert again["validation"] == pytest.approx(unbroken["validation"], rel=1e-9)
    # What another cut takes up and saves at once is the same to the bit.
    plan = plan_of(recipe, 4, 4)
    shutil.copytree(tmp_path / "begun", tmp_path / "kept")

    def life(place: Any) -> None:
        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(RankSetup(recipe, plan, open_language(recipe), place), channel)
            kept = Checkpoints(tmp_path / "kept" / "checkpoints", keep=2, group=worker.saving_group(channel))
            one.restore(kept)
            one.step = 3
            one.save(kept, None, wait=True)

    agent.run(life, launch.places(plan))
    for name, value in weights(recipe, tmp_path / "kept").items():
        assert torch.equal(value, saved[name]), name


@pytest.mark.slow
def test_bfloat16_follows_the_curve_of_one_rank(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, precision="bf16")
    one = trained(recipe, plan_of(recipe, 1, 1), tmp_path / "one")
    for algorithm in ("megatron", "fsp"):
        plan = plan_of(recipe, 4, 2, (1, 1, 2), algorithm=algorithm)
        cut = trained(recipe, plan, tmp_path / algorithm)
        assert cut["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert cut["gradient_norm"][0] == pytest.approx(one["gradient_norm"][0], rel=1e-3)  # of the same weights
        assert cut["validation"] == pytest.approx(one["validation"], rel=1e-3)


def test_a_run_that_was_cut_is_exported_as_one_that_was_not(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, precision="fp32")
    trained(recipe, plan_of(recipe, 2, 2), tmp_path / "cut")
    workload = open_language(recipe)
    model = workload.build(torch.device("cpu"), torch.float32)
    Checkpoints(tmp_path / "cut" / "checkpoints").load({"model": model})
    hf.export(model, workload.tokenizer, tmp_path / "export")
    _, state = hf.load(tmp_path / "export", torch.float32)
    found = weights(recipe, tmp_path / "cut")
    assert state.keys() == found.keys()
    assert all(torch.equal(state[name].double(), value) for name, value in found.items())


@pytest.mark.parametrize(
    ("tensor", "model", "said", "near"),
    [
        (3, {}, "blocks.0.attention.query: its query heads (4) and key-value heads (2) do not divide", "tp = 2"),
        (
            4,
            {"kv_heads": 4, "feed_forward": 3},
            "feed_forward.gate: its columns of the feed-forward",
            "tp = 3",
        ),
        (8, {"kv_heads": 2}, "query heads (4)", "tp = 4"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_with_the_nearest(tensor: int, model: Any, said: str, near: str) -> None:
    changes = {"heads": 4, "kv_heads": 2, **model}
    decoder = whole(**changes)
    with pytest.raises(UserError) as caught:
        check(modules_with_roles(decoder, roles(decoder)), tensor)
    assert said in caught.value.what
    assert caught.value.do == near


def test_what_cannot_stand_beside_cut_matrices_is_refused_by_name(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    assert table.refusal(recipe, plan_of(recipe, 2, 2)) is None
    refused = table.refusal(recipe, plan_of(recipe, 2, 2, compile=True))
    assert refused is not None
    assert set(refused.pair) == {"compile", "tensor_parallel"}
    limited = recipe_of(corpus, {"family": "mistral", "window": 8})
    refused = table.refusal(limited, plan_of(limited, 4, 2, heads=2))
    assert refused is not None
    assert set(refused.pair) == {"limited_attention", "loongtrain"}
    assert table.refusal(limited, plan_of(limited, 2, 2)) is None
    normed = recipe_of(corpus, {"family": "olmo2"})
    refused = table.refusal(normed, plan_of(normed, 2, 2))
    assert refused is not None
    assert set(refused.pair) == {"norms_of_all_heads", "tensor_parallel"}
    assert table.refusal(normed, plan_of(normed, 2, 1)) is None


@pytest.mark.slow
def test_error_feedback_goes_on_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """Each rank's is of its own matrices."""
    recipe = recipe_of(corpus, precision="fp32")
    plan = plan_of(recipe, 4, 2, (1, 1, 2), exchanges=(plans.Exchange(traffic="gradients", codec="int8"),))
    unbroken = trained(recipe, plan, tmp_path / "unbroken")
    exact = trained(recipe, plan_of(recipe, 1, 1), tmp_path / "exact")
    assert unbroken["loss"] != exact["loss"]
    assert unbroken["loss"] == pytest.approx(exact["loss"], rel=1e-2)
    trained(recipe, plan, tmp_path / "broken", stop_after=2)
    again = trained(recipe, plan, tmp_path / "broken")
    assert again["loss"] == unbroken["loss"][2:]
    found, wanted = (weights(recipe, tmp_path / name) for name in ("broken", "unbroken"))
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        pytest.param("megatron", "none", marks=pytest.mark.slow),
        pytest.param("megatron", "block", marks=pytest.mark.slow),
        ("fsp", "selective"),
    ],
)
def test_the_plan_s_bytes_are_the_ledger_s(corpus: Path, tmp_path: Path, algorithm: str, mode: str) -> None:
    recipe = recipe_of(corpus, sequence=16, batch_tokens=128)
    machine = cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
    request = resolve_recipe.request(Resolved(recipe))
    for ranks in (2, 4):
        layout = Layouts(algorithm=algorithm, recompute=mode, dp=ranks // 2, tp=2, micro_batch=2)
        predicted = estimate(request, machine, layout).sent_bytes
        plan = plan_of(recipe, ranks, 2, algorithm=algorithm, recompute=mode)
        found = trained(recipe, plan, tmp_path / str(ranks))
        for step in found["bytes"][1:]:  # the first compares what ranks hold
            assert step["activations"] == predicted["activations"]
            assert step["control"] == predicted["control"]
            assert step["gradients"] == pytest.approx(predicted["gradients"], rel=0.01)  # 257 words: 128 and 129
