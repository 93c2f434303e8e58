"""Anybody's module that carries a tensor-parallel plan trains on ranks that share its matrices as it does on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import recipe as config
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.launch.ranks import agent
from espalier.machine import cluster
from espalier.module import open_module
from espalier.plan import base as plans
from espalier.plan.decide import decide
from espalier.recipe import defaults
from espalier.recipe.errors import UserError
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup
from espalier.train.request_from_recipe import of_recipe

THEIRS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

class Tagger(nn.Module):
    _tp_plan = {
        "table": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.beside": "colwise",
        "layers.*.down": "rowwise", "words": "colwise_gather_output",
    }

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(14, 12)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "norm": nn.LayerNorm(12), "up": nn.Linear(12, 21), "beside": nn.Linear(12, 21, bias=False),
            "drop": nn.Dropout(0.2), "down": nn.Linear(21, 12),
        }) for _ in range(2))
        self.words = nn.Linear(12, 10)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            inner = layer["norm"](x)
            x = x + layer["drop"](layer["down"](torch.tanh(layer["up"](inner)) * layer["beside"](inner)))
        return self.words(x)

def summed(model, batch):
    tokens, tags = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten(), reduction="sum"), torch.tensor(tags.numel())

def build():
    torch.manual_seed(0)
    tokens = torch.randint(0, 14, (24, 5))
    data = TensorDataset(tokens, (tokens * 7) % 10)
    return Tagger(), data, summed, data
"""


def trained(recipe: Any, plan: plans.Plan, folder: Path) -> Any:
    workload = open_module(recipe, folder)

    def life(place: Any) -> Any:
        found: list[tuple[float, float]] = []
        held: list[float] = []

        def emit(event: str, **fields: Any) -> None:
            if event == "step":
                found.append((fields["loss"], fields["gradient_norm"]))
            if event == "validation":
                held.append(fields["loss"])

        with worker.joined(place, 90.0) as channel:
            one = trainer.Trainer(RankSetup(recipe, plan, workload, place, folder, emit), channel)
            saved = Checkpoints(folder / f"{len(plan.ranks)}", group=worker.saving_group(channel))
            one.run(saved)
            saved.wait()
            shape = tuple(one.built.model.get_parameter("layers.0.up.weight").shape)
        return found, held, shape

    results = agent.run(life, launch.places(plan))
    model = workload.build(torch.device("cpu"), torch.float64)
    Checkpoints(folder / f"{len(plan.ranks)}").load({"model": model})
    return results, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def tagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "tagger.py").write_text(THEIRS)
    return tmp_path


def planned(folder: Path, **pins: int) -> tuple[Any, plans.Plan]:
    """A recipe with these pins, and its plan on four cores."""
    train = config.Train(steps=4, batch_tokens=8, precision="fp64", clip=0.3, optimizer=config.Adamw())
    planning = config.Planning(pin=config.Pin(micro_batch=4, threads=1, **pins))
    asked = config.Recipe(model=config.Module(build="tagger:build"), train=train, plan=planning)
    recipe = defaults.resolve(asked)[0]
    machine = cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
    return recipe, decide(of_recipe(recipe, lambda: open_module(recipe, folder)), machine).taken


def test_a_pin_that_the_module_s_plan_does_not_allow_names_the_nearest(tagger: Path) -> None:
    with pytest.raises(UserError, match="tp = 11 ranks cannot share words") as refused:
        planned(tagger, tp=11)
    assert refused.value.do == "tp = 10"


def test_curve_validation_and_weights_are_those_of_one_rank(tagger: Path) -> None:
    """Also where dropout is: ranks that share matrices draw alike. `plan.pin.tp` is all that is asked."""
    recipe, one = planned(tagger, ranks=1)
    _, cut = planned(tagger, tp=2, ranks=2)
    assert [stage.tensor for stage in cut.stages] == [2]
    assert [rank.share for rank in cut.ranks] == [(0, 8), (0, 8)]
    assert any("module's own plan" in line for line in cut.why)
    ((curve, held, _),), state = trained(recipe, one, tagger)
    results, found = trained(recipe, cut, tagger)
    assert [shape for _, _, shape in results] == [(10, 12), (11, 12)]
    for own, own_held, _ in results:
        assert [value for pair in own for value in pair] == pytest.approx([v for pair in curve for v in pair], rel=1e-9)
        assert own_held == pytest.approx(held, rel=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)
