"""A model that changes its shape halfway: a phase takes over what it can, and any interruption changes nothing."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import forked, launched

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli import main as cli
from espalier.cli.open_run import load_trained
from espalier.launch.ranks import agent
from espalier.plan import base as plans
from espalier.recipe import recipe_file
from espalier.recipe.errors import UserError
from espalier.track.run_tables import RunTables
from espalier.train import phases, worker, workload_registry
from espalier.train import rank_spec as launch
from espalier.train.rank_setup import RankSetup

THEIRS = """
import os, signal, time, torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from espalier.store.artifacts import Image
from espalier.module import Later, Parts

class Field(nn.Module):
    def __init__(self, resolution):
        super().__init__()
        self.grid = nn.Parameter(0.1 * torch.randn(1, 2, resolution, resolution))
        self.head = nn.Linear(2, 1)
    def forward(self, at):
        drawn = F.grid_sample(self.grid, at[None, :, None], align_corners=True)
        return self.head(drawn[0, :, :, 0].T)

def strike(model, where, how):
    # Once, at a number of steps of one phase: ends a rank ("kill"), or asks the run to stop ("stop").
    if os.getpid() == BEGAN or not model.training:
        return
    model.steps = getattr(model, "steps", 0) + 1
    if f"{model.grid.shape[-1]}@{model.steps}" != where:
        return
    try:
        Path(__file__).with_name("struck").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(*(BEGAN, signal.SIGINT) if how == "stop" else (os.getpid(), signal.SIGKILL))
    time.sleep(0.3)  # until the word has come back

BEGAN = os.getpid()  # ranks are forked from here

def build(where="", how="", odd=False):
    torch.manual_seed(0)
    at = 2 * torch.rand(64, 2) - 1
    data = TensorDataset(at, at.prod(1, keepdim=True))
    def loss(model, batch):
        strike(model, where, how)
        return (model(batch[0]) - batch[1]).square().sum(), torch.tensor(len(batch[0]))
    def finer(state):
        return {**state, "grid": F.interpolate(state["grid"], size=(8, 8), mode="bilinear", align_corners=True)}
    def shown(model):
        return [Image((model.grid[0, 0].sigmoid() * 255).to(torch.uint8), "the field")]
    fine = Parts(Field(8), data, loss, data, shown)
    return Parts(Field(4), data, loss, data, shown, phases=[Later(0 if odd else 6, fine, finer, "fine")])
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sys.modules.pop("fields", None)
    (tmp_path / "fields.py").write_text(THEIRS)
    (tmp_path / "recipe.toml").write_text(
        '[model]\nkind = "module"\nbuild = "fields:build"\n'
        '[train]\nsteps = 12\nbatch_tokens = 8\noptimizer = "adamw"\nvalidate_every = 6\n'
        '[plan]\ntrial = false\ncluster = "machine.toml"\n[checkpoint]\nevery = 2\n'
    )
    (tmp_path / "machine.toml").write_text('[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n')
    return tmp_path


def train(home: Path, *overrides: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    sys.modules.pop("fields", None)  # each program imports it for itself
    done = forked(home, "train", "recipe.toml", *overrides)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """Model and optimizer after the last step."""
    found = load_trained(str(run))
    assert found.step == 12
    assert found.model.grid.shape[-1] == 8  # type: ignore[union-attr, index]
    optimizer = phases._made(found.recipe, found.workload)[1]
    phases.checkpoints(found.recipe, found.folder).load({"optimizer": optimizer})
    return {**found.model.state_dict(), **optimizer.state_dict()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


STRUCK = {1: [("4@6", "stop"), ("8@4", "kill")], 2: [("4@3", "stop"), ("4@5", "kill"), ("8@3", "stop")]}
"""(resolution @ step of the phase, what happens there) by ranks; the first phase has 6 steps."""
IN_ROUNDS = [("4@1", "stop"), ("4@5", "kill"), ("8@5", "kill")]
"""Replicas know at the end of a round who wants to stop, and do at the end of the next: here the phase's."""
SLOW = pytest.mark.slow
ROUNDS = ("co2", "diloco", "streaming_diloco", "local_sgd")


def rounds(kind: str) -> list[str]:
    """Replicas that agree every fourth step, so that a phase ends within a round."""
    cut = ["sync.fragments=3"] if kind == "streaming_diloco" else []
    return [f"sync.kind={kind}", "sync.steps=4", "sync.adapt=false", *cut]


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen programs
@pytest.mark.parametrize(
    ("ranks", "kind", "struck"),
    [
        pytest.param(2, "", STRUCK[2][1:], id="2-"),
        *(
            pytest.param(ranks, kind, IN_ROUNDS if kind else STRUCK[ranks], id=f"{ranks}-{kind}-all", marks=SLOW)
            for ranks, kind in ((1, ""), (2, ""), (2, "eager"), *((2, kind) for kind in ROUNDS))
        ),
    ],
)
def test_an_interrupted_run_ends_as_the_undisturbed_one(
    home: Path, ranks: int, kind: str, struck: list[tuple[str, str]]
) -> None:
    pin = [f"plan.pin.ranks={ranks}", *(rounds(kind) if kind else [])]
    train(home, *pin, "name=undisturbed")
    expected = state_of(home / "runs" / "undisturbed")
    for where, how in struck:
        (home / "struck").unlink(missing_ok=True)
        name = f"{how}{where.replace('@', '-')}"
        changed = (*pin, f"name={name}", f"model.arguments.where={where}", f"model.arguments.how={how}")
        if how == "stop":
            train(home, *changed, code=130)
        train(home, *changed)
        assert (home / "struck").exists()
        assert same(state_of(home / "runs" / name), expected), name


def test_the_run_log_says_when_a_phase_begins_and_each_has_its_plan(home: Path) -> None:
    train(home, "plan.pin.ranks=2")
    events = [e for e in open_run_events(home / "runs" / "recipe") if e["event"] in ("phase", "plan", "run")]
    assert [e["event"] for e in events] == ["phase", "run", "plan", "phase", "run", "plan"]
    first, second = (e for e in events if e["event"] == "phase")
    assert (first["name"], first["step"], first["steps"]) == ("phase 1", 0, 6)
    assert (second["name"], second["step"], second["steps"]) == ("fine", 6, 12)
    assert second["parameters"] - first["parameters"] == 2 * (64 - 16)
    run = RunTables.read(home / "runs" / "recipe")
    assert run.steps["step"].tolist() == list(range(1, 13))
    assert [float(run.validations["step"][0]), float(run.validations["step"][-1])] == [6, 12]
    assert "data:image/png" in run.samples["image"][-1]


def open_run_events(run: Path) -> list[dict[str, Any]]:
    from espalier.track import events

    return list(events.read(run / "events.jsonl"))


def test_what_kept_its_shape_keeps_its_value_and_its_optimizer_state(home: Path) -> None:
    resolved = workload_registry.settle(recipe_file.load(home / "recipe.toml"), home)
    whole = workload_registry.open_workload(resolved)
    first, second = whole.phases()
    plan = plans.Plan(ranks=(plans.Rank(share=(0, 8)),), micro_batch=8)
    setting = lambda place: RankSetup(resolved.recipe, plan, whole.at(first), place, home)  # noqa: E731
    agent.run(lambda place: worker.train(setting(place), {})["step"], launch.places(plan))
    saved = Checkpoints(home / "checkpoints")
    old, optimizer = phases._made(resolved.recipe, whole.at(first))
    assert saved.load({"model": old, "optimizer": optimizer}) is not None
    entered = phases.enter(resolved.recipe, whole, saved)
    assert entered.phases() == [second]
    new, following = phases._made(resolved.recipe, entered)
    saved.load({"model": new, "optimizer": following})
    for name, value in old.state_dict().items():
        if name.startswith("head"):
            assert torch.equal(new.state_dict()[name], value)
    finer = torch.nn.functional.interpolate(old.state_dict()["grid"], size=(8, 8), mode="bilinear", align_corners=True)
    assert torch.equal(new.state_dict()["grid"], finer)
    before, after = optimizer.state_dict(), following.state_dict()
    assert before["head.weight/exp_avg"].any()
    for key in before:
        assert torch.equal(after[key], before[key]) == (not key.startswith("grid"))
    assert not after["grid/exp_avg"].any()
    assert phases.enter(resolved.recipe, whole, saved).phases() == [second]


def test_phases_out_of_order_are_refused(home: Path) -> None:
    resolved = workload_registry.settle(recipe_file.load(home / "recipe.toml", ["model.arguments.odd=true"]), home)
    with pytest.raises(UserError, match="its phases begin at steps"):
        workload_registry.open_workload(resolved).phases()


def test_phases_need_ranks_that_are_not_there_yet(home: Path) -> None:
    (done,) = launched(home, partial(cli.main, ["train", "recipe.toml"]), ranks=1)
    assert done.returncode != 0
    assert "2 phases, and its ranks were started already" in done.stderr
