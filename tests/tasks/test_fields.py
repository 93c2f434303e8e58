"""A radiance field as the tower of a task: what it is asked, what it costs, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_tasks
import torch

from espalier.module.parts import collated
from espalier.parallel.workload import Shard
from espalier.radiance.rays import Rays
from espalier.radiance.workload import psnr
from espalier.recipe.cost import VALUE_BYTES
from espalier.recipe.errors import UserError
from espalier.tasks import MultitaskModel, answers
from espalier.tasks.sources import SceneRays
from espalier.tasks.workload import MultitaskWorkload
from espalier.train import workload_registry
from espalier.train.workload_row import Sampling


@pytest.fixture(scope="module")
def workload() -> MultitaskWorkload:
    found = workload_registry.open_workload(tiny_tasks.resolved(**tiny_tasks.FIELD))
    assert isinstance(found, MultitaskWorkload)
    return found


def changed(tower: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    made = copy.deepcopy(tiny_tasks.FIELD)
    made["towers"][0] |= tower or {}
    made["tasks"][0] |= task or {}
    return {**made, **others}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (changed({"coarse": 0.25}), "is trained in one stage"),
        (changed({"depth": 3}), "The field 'field' has depth 3"),
        (changed({"resolution": 4}), "The field 'field' has resolution 4"),
        (changed({"takes": ["text"]}), "The tower 'field' is a scene's"),
        (changed(task={"loss": "classes"}), "loss = 'classes' and the tower 'field'"),
        (changed(task={"towers": ["text"]}), "loss = 'colours' and the tower 'text'"),
        (changed(train={"steps": 4, "precision": "bf16"}), "train.precision = 'bf16'"),
        (
            {**changed(), "tasks": [*changed()["tasks"], {**changed()["tasks"][0], "name": "again"}]},
            "share the field 'field'",
        ),
        (
            {**changed(), "towers": [*changed()["towers"][:2], {"name": "text", "width": 8, "takes": ["field"]}]},
            "The tower 'text' takes the field",
        ),
    ],
)
def test_what_is_no_field_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        tiny_tasks.resolved(**changes)
    assert said in str(error.value)
    assert error.value.do


def test_data_that_is_no_scene_is_refused() -> None:
    with pytest.raises(UserError, match="nowhere"):
        workload_registry.open_workload(tiny_tasks.resolved(**changed(task={"data": "nowhere"})))


def test_a_field_is_trained_in_single_precision_by_itself() -> None:
    assert tiny_tasks.resolved(**changed(train={"steps": 4})).recipe.train.precision == "fp32"


def test_a_task_of_rays_has_the_loss_of_a_scene(workload: MultitaskWorkload) -> None:
    """That of DVGO's fine stage: the colours' error, the entropy of what passes, and single samples'."""
    model = workload.build(torch.device("cpu"), torch.float64)
    assert isinstance(model, MultitaskModel)
    tagged = workload.batches(0, Shard(0, 1, 1))[0]
    loss, weight = workload.loss(model, tagged)
    rays, true = tagged.batch["rays"].double(), tagged.batch["colour"].double()
    found = model.get_submodule("towers.field.field")(Rays(*rays.split(3, 1)))
    expected = (found.colours - true).square().mean() * len(true)
    p = found.rest.clamp(1e-6, 1 - 1e-6)
    expected = expected - 0.001 * (p * p.log() + (1 - p) * (1 - p).log()).sum()
    of = torch.repeat_interleave(torch.arange(len(true)), found.offsets.diff())
    expected = expected + 0.01 * (found.weights * (found.points - true[of]).square().sum(1)).sum()
    assert float(weight) == len(true) == 33
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)


def test_the_planner_knows_what_a_field_costs(workload: MultitaskWorkload) -> None:
    """Its operations are those of grids and colours, which kernels of our own do; its seconds are measured."""
    (field,) = [one for one in workload.parts_of(True) if one.node == "field"]
    assert field.operators == 1
    assert field.parameters == 4 * (13 * 8**3 + (12 + 27) * 8 + 8 * 8 + 8 * 3)
    assert field.output == 5 * VALUE_BYTES["fp32"]
    assert set(field.seconds) == {33, 17, 9}
    assert min(field.seconds.values()) > 0
    model = workload.build(torch.device("cpu"), torch.float32)
    rays = workload.batches(0, Shard(0, 1, 1))[0].batch["rays"]
    samples = model.get_submodule("towers.field.field")(Rays(*rays.split(3, 1))).points
    colours = 2 * len(samples) * (12 * 8 + 8 * 8 + 8 * 3 + 12 * 8) / 33  # products, and the features of eight corners
    assert field.flops > 3 * colours


def test_rays_of_a_step_are_those_of_the_views(workload: MultitaskWorkload) -> None:
    """Collated at once or one by one; held-out rays are of other views."""
    assert workload.parts.tasks is not None
    task = workload.parts.tasks["scene"]
    assert isinstance(task.dataset, SceneRays)
    assert isinstance(task.held_out, SceneRays)
    assert not set(task.dataset.views.tolist()) & set(task.held_out.views.tolist())
    together, single = collated(task.dataset, [3, 500, 7]), [task.dataset[index] for index in (3, 500, 7)]
    assert all(torch.equal(together[name], torch.stack([one[name] for one in single])) for name in together)


def test_an_answer_is_a_rendered_view(
    workload: MultitaskWorkload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the error that a validation of its rays finds; a view that is not there is refused, and so is a folder that
    cannot be written."""
    monkeypatch.chdir(tmp_path)
    model = workload.build(torch.device("cpu"), torch.float32)
    tasks = workload.parts.tasks or {}
    found = answers.answer(tasks, workload.batch, model, "scene 1", Sampling(tokens=1))
    assert "scene-1.png" in "".join(found.text)
    (told,) = found.record()["answers"]
    assert (tmp_path / "scene-1.png").read_bytes().startswith(b"\x89PNG")
    held = tasks["scene"].held_out
    assert isinstance(held, SceneRays)
    with torch.no_grad():
        error, rays = model(0, held.view(1))["error"]
    assert told["psnr"] == pytest.approx(psnr(float(error) / float(rays)), rel=1e-5)
    with pytest.raises(UserError, match="no held-out sample '99'"):
        answers.answer(tasks, workload.batch, model, "scene 99", Sampling(tokens=1))
    (tmp_path / "scene-0.png").mkdir()
    with pytest.raises(UserError, match=r"Cannot write scene-0\.png"):
        answers.answer(tasks, workload.batch, model, "scene 0", Sampling(tokens=1))


def test_a_validation_tells_decibels(workload: MultitaskWorkload) -> None:
    model = workload.build(torch.device("cpu"), torch.float32)
    with torch.no_grad():
        figures = {name: a / b for name, (a, b) in workload.evaluate(model, Shard(0, 1, 1)).items()}
    told = workload.summary(figures)
    assert told["scene.psnr"] == pytest.approx(psnr(figures["scene.error"]))
    assert "scene.error" not in told
