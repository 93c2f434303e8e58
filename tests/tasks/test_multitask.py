"""Several tasks on several towers: what is trained is their weighted sum, and what cannot be is refused in words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tasks
import torch

from espalier.launch.ranks import agent
from espalier.module.parts import length
from espalier.parallel.workload import Shard
from espalier.plan import base as plans
from espalier.recipe import recipe_file
from espalier.recipe.errors import Interrupted, UserError
from espalier.tasks import MultitaskModel, answers, sources
from espalier.tasks.workload import MultitaskWorkload
from espalier.train import rank_spec as launch
from espalier.train import run_folder as runs
from espalier.train import worker, workload_registry
from espalier.train.rank_setup import RankSetup
from espalier.train.workload_row import Sampling


@pytest.fixture(scope="module")
def workload() -> MultitaskWorkload:
    found = workload_registry.open_workload(tiny_tasks.resolved())
    assert isinstance(found, MultitaskWorkload)
    return found


ALONE = plans.Plan(ranks=(plans.Rank(share=(0, 1)),), precision="fp64")


def trained(
    folder: Path | None, stop_after: int | None = None, plan: plans.Plan = ALONE, **changes: Any
) -> list[dict[str, Any]]:
    """The events of a run."""
    found = tiny_tasks.resolved(**changes)

    def life(place: launch.RankSpec) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []

        def emit(event: str, **fields: Any) -> None:
            told.append({"event": event, **fields})

        opened = workload_registry.open_workload(found)
        setting = RankSetup(found.recipe, plan, opened, place, folder, emit=emit, stop_after=stop_after)
        with pytest.raises(Interrupted) if stop_after else contextlib.nullcontext():
            worker.train(setting, {})
        return told

    result: list[dict[str, Any]] = agent.run(life, launch.places(plan))[0]
    return result


def of(told: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [one for one in told if one["event"] == event]


def test_the_loss_of_a_step_is_the_weighted_sum_over_all_samples(workload: MultitaskWorkload) -> None:
    batches = workload.batches(0, Shard(0, 1, 1))
    assert [len(next(iter(one.batch.values()))) for one in batches] == [7, 5, 3]
    model = workload.build(torch.device("cpu"), torch.float64)
    with torch.no_grad():
        sums = [workload.loss(model, one) for one in batches]
    assert [float(weight) for _, weight in sums] == [7, 5, 3]
    (step, *_) = of(trained(None), "step")
    shares = workload.tasks().values()
    expected = sum(share * float(loss) for share, (loss, _) in zip(shares, sums, strict=True)) / 15
    assert step["loss"] == pytest.approx(expected, rel=1e-12)
    assert step["tasks"] == pytest.approx({n: float(a / b) for n, (a, b) in zip(workload.tasks(), sums, strict=True)})


def test_a_validation_says_how_each_task_does() -> None:
    told = trained(None)
    losses = [one["loss"] for one in of(told, "step")]
    assert losses[-1] < losses[0]
    (held,) = of(told, "validation")
    names = {"loss", "tasks.match", "tasks.write", "tasks.sort", "match.accuracy", "sort.accuracy"}
    assert names <= set(held)


def test_a_run_taken_up_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = of(trained(None), "step")
    first = of(trained(tmp_path, stop_after=2), "step")
    rest = of(trained(tmp_path), "step")
    assert [one["step"] for one in (*first, *rest)] == [1, 2, 3, 4]
    assert [one["loss"] for one in (*first, *rest)] == [one["loss"] for one in whole]
    assert rest[-1]["gradient_norm"] == whole[-1]["gradient_norm"]


def test_samples_of_a_step_are_a_pure_function_of_it(workload: MultitaskWorkload) -> None:
    again = workload_registry.open_workload(tiny_tasks.resolved())
    for step in (0, 3, 50):
        assert workload.documents(step, Shard(0, 1, 1)) == again.documents(step, Shard(0, 1, 1))
    epoch = [one for step in range(8) for one in workload.documents(step, Shard(0, 1, 1)) if one.endswith("write")]
    assert len(set(epoch[:38])) == 38


def test_every_parameter_belongs_to_one_part_that_ranks_can_run_alone(workload: MultitaskWorkload) -> None:
    """Blocks run one by one, with parts between them, give what the model gives."""
    model = workload.build(torch.device("cpu"), torch.float64)
    assert isinstance(model, MultitaskModel)
    assert set(model.owners()) == {name for name, _ in model.named_parameters()}
    for tagged in workload.batches(0, Shard(0, 1, 1)):
        fields = {n: v.double() if v.is_floating_point() else v for n, v in tagged.batch.items()}
        made: dict[str, Any] = {}
        for node in model.nodes(tagged.task):
            inputs = [made[need] for need in node.needs]
            for operator in range(node.operators):
                found = model.compute(tagged.task, node.name, (operator, operator + 1), inputs, fields)
                inputs = [found]  # type: ignore[list-item]
            made[node.name] = inputs[0]
        assert torch.equal(made["head"]["loss"][0], model(tagged.task, fields)["loss"][0])


def test_a_tower_may_take_another_ones_outputs() -> None:
    """A text tower behind an image tower: its losses depend on the picture."""
    changes = {"text_takes": ["image"], "write_data": "tiny_tasks:pictures"}
    workload = workload_registry.open_workload(tiny_tasks.resolved(**changes))
    model = workload.build(torch.device("cpu"), torch.float64)
    assert isinstance(model, MultitaskModel)
    assert [node.name for node in model.nodes(1)] == ["image", "text", "head"]
    tagged = workload.batches(0, Shard(0, 1, 1))[1]
    fields = {**tagged.batch, "image": tagged.batch["image"].double().requires_grad_()}
    (gradient,) = torch.autograd.grad(model(1, fields)["loss"][0], fields["image"])
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"write_data": ""}, "The task 'write' has no data"),
        ({"write_weight": 0.0}, "The task 'write' has weight 0"),
        ({"write_weight": -1.0}, "The task 'write' has weight -1"),
        ({"match_batch": 1}, "The task 'match' has a batch of 1"),
        ({"image_takes": ["text"], "text_takes": ["image"]}, "Towers form a cycle: image takes text takes image"),
        ({"image_takes": ["image"]}, "Towers form a cycle: image takes image"),
        ({"write_towers": ["txt"]}, "did you mean 'text'?"),
        ({"image_takes": ["nobody"]}, "The tower 'image' takes 'nobody'"),
        ({"match_towers": ["image"]}, "The task 'match' names 1 towers"),
        ({"write_towers": ["image"]}, "predicts text from the tower 'image'"),
        ({"sort_towers": ["text"], "sort_data": "tiny_tasks:pictures"}, "No task uses the tower 'package'"),
        ({"text_name": "image"}, "Two towers are called 'image'"),
        ({"sort_name": "write"}, "Two tasks are called 'write'"),
        ({"write_name": "a.b"}, "tasks.name = 'a.b' is not possible"),
        ({"image_width": 12}, "The tower 'image' has width 12"),
        ({"package_takes": ["text"]}, "The tower 'package' is a graph's"),
        ({"tasks": []}, "has no [[tasks]]"),
        ({"towers": []}, "has no [[towers]]"),
        ({"model": {"kind": "gpt"}}, "belongs to several tasks"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        tiny_tasks.resolved(**changes)
    assert said in f"{error.value} {error.value.do}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"write_data": "tiny_tasks:few"}, "The task 'write' has 3 samples"),
        ({"write_data": "tiny_tasks:nothing"}, "it returns no dataset"),
        ({"write_data": "tiny_tasks:modules"}, "have nodes, label, and no 'text'"),
        ({"sort_data": "tiny_tasks:pictures"}, "have image, text, and no 'nodes'"),
        ({"write_data": "no/such/file"}, "no/such/file"),
    ],
)
def test_data_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        workload_registry.open_workload(tiny_tasks.resolved(**changes))
    assert said in str(error.value)


def test_the_recipe_of_a_run_resolves_to_itself() -> None:
    recipe = tiny_tasks.resolved().recipe
    assert recipe_file.from_table(recipe_file.to_table(recipe)) == recipe
    assert runs.located(recipe).tasks == recipe.tasks


def test_glyphs_are_pictures_of_characters_that_have_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cut: Callable[[int], None]
) -> None:
    pytest.importorskip("PIL")
    if not sources.fonts():
        pytest.skip("no DejaVu fonts")
    cut(0x60)
    monkeypatch.setattr(sources, "cache_folder", lambda: tmp_path)
    drawn, again = sources.glyphs(40, faces=1), sources.glyphs(40, faces=1)
    assert len(drawn) == len(again) > 50
    sample = drawn[list(map(bytes, drawn.fields["text"])).index(b"LATIN CAPITAL LETTER A".ljust(40, b"\0"))]
    assert sample["image"].shape == (1, 28, 28)
    assert 0.02 < float(sample["image"].mean()) < 0.5
    assert sample["text"].dtype == torch.int64


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda last: monkeypatch.setattr(sources, "LAST", last)


def test_windows_of_text_and_neighbours_of_nodes_are_samples(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 10)
    rows = sources.windows(str(tmp_path / "text.txt"), 8)
    assert len(rows) == 10
    assert bytes(rows[3]["text"].tolist()) == b"abcdefgh"


def test_answers_are_those_that_a_validation_counts(workload: MultitaskWorkload) -> None:
    """Of every held-out sample; a text goes on with the byte that the head scores highest; what is no task is told."""
    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, MultitaskModel)
    assert workload.parts.tasks is not None
    counts = {name: length(task.held_out) for name, task in workload.parts.tasks.items()}
    rows = [answered(workload, model, f"sort {number}")["answers"][0] for number in range(counts["sort"])]
    with torch.no_grad():
        figures = workload.evaluate(model, Shard(0, 1, 1))
    right, weight = figures["sort.accuracy"]
    assert sum(one["class"] == one["label"] for one in rows) / len(rows) == pytest.approx(float(right / weight))
    (pick,) = answered(workload, model, "match 1")["answers"]
    assert pick["among"] == min(counts["match"], workload.batch[0])
    text = bytes(workload.parts.tasks["write"].held_out[0]["text"].tolist())
    fields = {"text": torch.tensor([list(text)])}
    hidden = model.compute(1, "text", (0, model.nodes(1)[0].operators), [], fields)
    scores = model.heads["write"].out[0](hidden)[0]
    begun = text[: len(text) // 2]
    (found,) = answers._written(model, 1, begun, {}, Sampling(tokens=1))
    assert found == bytes([int(scores[len(begun) - 1].argmax())]).decode("utf-8", "replace")
    assert [one["task"] for one in answered(workload, model, None)["answers"]] == ["match", "write", "sort"]
    for asked, said in (("sort 99", "no held-out sample"), ("", "is no task of this run")):
        with pytest.raises(UserError, match=said):
            answered(workload, model, asked)


def answered(workload: MultitaskWorkload, model: Any, asked: str | None) -> Any:
    found = answers.answer(workload.parts.tasks or {}, workload.batch, model, asked, Sampling(tokens=3))
    record = found.record()
    assert "".join(found.text)
    return record


def test_what_a_task_does_not_use_of_its_data_is_named(tmp_path) -> None:
    rows = [{"text": f"row {number} " * 20, "url": "x"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sources.notes(sources.windows(str(tmp_path / "rows.jsonl"), 8)) == ("not used: column 'url' (8 rows)",)
