"""A run whose ranks share matrices has the curve and the weights of one rank, and resumes under any other cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import trainer, worker
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.config import Recipe, defaults, recipe_file
from espalier.errors import Interrupted
from espalier.language.workload import open_language
from espalier.launch import agent
from espalier.launch import base as launch
from espalier.plan import base as plans
from espalier.rank_setup import RankSetup

STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(60))
        (folder / f"{number}.py").write_text(text)
    return folder


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


def plan_of(
    recipe: Recipe, ranks: int, tensor: int, shard: tuple[int, int, int] = (1, 1, 1), **more: Any
) -> plans.Plan:
    samples, groups = recipe.train.batch_tokens // recipe.train.sequence, ranks // tensor
    share = [(samples * group // groups, samples * (group + 1) // groups) for group in range(groups)]
    held = {
        name: tuple(range(0, ranks, tensor))[:size] if size > 1 else ()
        for name, size in zip(("params", "grads", "optimizer"), shard, strict=True)
    }
    stages = (plans.Stage(ranks=tuple(range(ranks)), layers=(0, 2), tensor=tensor),) if tensor > 1 else ()
    given: dict[str, Any] = {"micro_batch": 2, "algorithm": "megatron" if tensor > 1 else "data", **more}
    return plans.Plan(
        ranks=tuple(plans.Rank(share=share[rank // tensor]) for rank in range(ranks)),
        units=(plans.Unit(**held),),
        stages=stages,
        precision=recipe.train.precision,
        **given,
    )


def trained(recipe: Recipe, plan: plans.Plan, folder: Path, stop_after: int | None = None) -> dict[str, Any]:
    """Curve, norms, validation and sample of rank 0; its checkpoints are in `folder`."""
    workload = open_language(recipe)

    def life(place: Any) -> Any:
        found: dict[str, Any] = {"loss": [], "gradient_norm": [], "validation": [], "bytes": []}

        def emit(event: str, **fields: Any) -> None:
            for name in ("loss", "gradient_norm", "bytes") if event == "step" else ():
                found[name].append(fields[name])
            if event == "validation":
                found["validation"].append(fields["loss"])

        setting = RankSetup(recipe, plan, workload, place, folder, emit, stop_after=stop_after)
        with worker.joined(place, 30.0) as channel:
            one = trainer.Trainer(setting, channel)
            saved = Checkpoints(folder / "checkpoints", keep=2, group=worker.saving_group(channel))
            one.restore(saved)
            try:
                one.run(saved)
            except Interrupted:
                assert stop_after is not None
            found["sample"] = [artifact.fields for artifact in one.sample()] if stop_after is None else []
            saved.wait()
            found["matrices"] = {n: tuple(p.shape) for n, p in one.built.model.named_parameters()}
        return found

    results = agent.run(life, launch.places(plan))
    assert all(one["loss"] == results[0]["loss"] for one in results)
    found: dict[str, Any] = results[0]
    return found


def weights(recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint holds, read by one rank."""
    model = open_language(recipe).build(torch.device("cpu"), torch.float64)
    Checkpoints(folder / "checkpoints").load({"model": model})
    return model.state_dict()


def same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    for name in ("loss", "gradient_norm", "validation"):
        assert ours[name] == pytest.approx(theirs[name], rel=tolerance), name


CASES = {
    "tensor of 2": (2, 2, (1, 1, 1), {}, {}),
    "tensor of 4, more ranks than key-value heads, tied": (4, 4, (1, 1, 1), {}, {"tied": True}),
    "2 replicas of 2, optimizer states sharded": (4, 2, (1, 1, 2), {}, {}),
    "2 replicas of 2, all states sharded, FSP": (4, 2, (2, 2, 2), {"algorithm": "fsp"}, {"tied": True}),
    "2 replicas of 2, gradients sharded, blocks recomputed": (4, 2, (1, 2, 2), {"recompute": "block"}, {}),
    "FSP, selective recomputation": (2, 2, (1, 1, 1), {"algorithm": "fsp", "recompute": "selective"}, {}),
    "experts": (2, 2, (1, 1, 1), {}, {"kind": "moe", "experts": 3, "active": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_curve_weights_validation_and_sample_are_those_of_one_rank(corpus: Path, tmp_path: Path, case: str) -> None:
    ranks, tensor, shard, more, model = CASES[case]
    recipe = recipe_of(corpus, model)
    one = trained(recipe, plan_of(recipe, 1, 1), tmp_path / "one")
    cut = trained(recipe, plan_of(recipe, ranks, tensor, shard, **more), tmp_path / "cut")
    same(cut, one, 1e-9)
    assert cut["sample"] == one["sample"]
    wanted, found = weights(recipe, tmp_path / "one"), weights(recipe, tmp_path / "cut")
    assert wanted.keys() == found.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-10)
    assert cut["matrices"]["blocks.0.attention.out.weight"] == (32, 32 // tensor)
