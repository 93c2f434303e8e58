"""Waves beside what other workloads are made of: nodes of a graph, views of a scene and its field, taken up again."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from espalier.launch.ranks import agent
from espalier.mechanisms.task_waves.state import TaskWavesState, WaveSlice
from espalier.parallel.workload import HEAD
from espalier.plan import base as plans
from espalier.radiance import scenes
from espalier.recipe import recipe_file
from espalier.recipe.errors import Interrupted
from espalier.train import rank_spec as launch
from espalier.train import worker, workload_registry
from espalier.train.rank_setup import RankSetup


class SceneViews(Dataset[dict[str, torch.Tensor]]):
    """Rendered views of the radiance workload; the class is the quarter of the circle in which the camera stands."""

    def __init__(self) -> None:
        scene = scenes.load("spheres:views=24,size=12", None, lambda *_: None)
        self.images = scene.images.permute(0, 3, 1, 2).float() / 255
        poses = torch.as_tensor(scene.poses)
        self.labels = (torch.atan2(poses[:, 1, 3], poses[:, 0, 3]) / torch.pi * 2 + 2).long().clamp(0, 3)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


def views() -> SceneViews:
    return SceneViews()


def resolved() -> workload_registry.Resolved:
    graph, scene = "planted:nodes=300,degree=6,features=8,classes=3", "test_spindle:views"
    tasks = [
        {"name": "nodes", "data": graph, "towers": ["package"], "loss": "classes", "batch": 6},
        {"name": "views", "data": scene, "towers": ["image"], "loss": "classes", "batch": 5, "weight": 2.0},
        {"name": "rays", "data": "spheres:views=24,size=12", "towers": ["field"], "loss": "colours", "batch": 40},
    ]
    towers = [
        {"name": "package", "kind": "graph", "width": 8, "depth": 2},
        {"name": "image", "kind": "image", "width": 8, "depth": 3},
        {"name": "field", "kind": "voxels", "width": 8, "resolution": 12},
    ]
    table = {
        "model": {"kind": "multitask"},
        "towers": towers,
        "tasks": tasks,
        "train": {"steps": 4, "validate_every": 4, "precision": "fp64"},
        "plan": {"trial": False, "pin": {"threads": 1}},
    }
    return workload_registry.settle(recipe_file.from_table(table, "recipe"), Path(__file__).parent)


def slices(*rows: tuple[str, str, int, int, tuple[int, ...]]) -> tuple[tuple[WaveSlice, ...], ...]:
    return tuple((WaveSlice(task=a, node=b, first=c, last=d, ranks=e),) for a, b, c, d, e in rows)


RANKS = (plans.Rank(share=(0, 1)),) * 2
WAVES = {
    "apart": slices(
        ("views", "image", 0, 2, (1, 0)),
        ("nodes", "package", 0, 2, (0,)),
        ("views", "image", 2, 3, (1,)),
        ("rays", "field", 0, 1, (0, 1)),
        ("views", HEAD, 0, 1, (1,)),
        ("rays", HEAD, 0, 1, (1,)),
        ("nodes", HEAD, 0, 1, (0, 1)),
    ),
    "the other way round": slices(
        ("nodes", "package", 0, 1, (1,)),
        ("rays", "field", 0, 1, (1,)),
        ("rays", HEAD, 0, 1, (1, 0)),
        ("views", "image", 0, 3, (0,)),
        ("nodes", "package", 1, 2, (0, 1)),
        ("nodes", HEAD, 0, 1, (1,)),
        ("views", HEAD, 0, 1, (1, 0)),
    ),
}


@pytest.fixture(scope="module")
def found() -> workload_registry.Resolved:
    return resolved()


def losses(found: workload_registry.Resolved, plan: plans.Plan, folder: Path | None, until: int | None) -> list[float]:
    """Of the steps of a run, and what it validates at its end."""

    def life(place: launch.RankSpec) -> list[float]:
        told: list[float] = []

        def emit(event: str, **fields: Any) -> None:
            if event in ("step", "validation"):
                told.append(fields["loss"])

        opened = workload_registry.open_workload(found)
        setting = RankSetup(found.recipe, plan, opened, place, folder, emit=emit, stop_after=until)
        with pytest.raises(Interrupted) if until else contextlib.nullcontext():
            worker.train(setting, {})
        return told

    result: list[float] = agent.run(life, launch.places(plan))[0]
    return result


@pytest.mark.slow
def test_nodes_of_a_graph_and_a_scene_with_its_field_are_taken_up_in_waves(
    found: workload_registry.Resolved, tmp_path: Path
) -> None:
    """All tasks train as on one rank, whatever the waves; taken up by the same waves, with the same bits; by others,
    by nested micro-batches and by one rank, to rounding."""
    plain = plans.Plan(ranks=RANKS, precision="fp64")
    apart, other = (
        plain.with_state(TaskWavesState(waves=WAVES[name], nested=nested))
        for name, nested in (("apart", 1), ("the other way round", 3))
    )
    one = plans.Plan(ranks=RANKS[:1], precision="fp64")
    whole = losses(found, one, None, None)
    assert whole[3] < whole[0]
    unbroken = losses(found, apart, None, None)
    assert unbroken == pytest.approx(whole, rel=1e-9)
    first = losses(found, apart, tmp_path / "run", 2)
    for name, plan in (
        ("same", apart),
        ("other", other),
        ("one", one),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        rest = losses(found, plan, tmp_path / name, None)
        assert [*first, *rest] == (unbroken if plan is apart else pytest.approx(whole, rel=1e-9))
