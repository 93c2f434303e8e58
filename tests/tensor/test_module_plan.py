"""Anybody's module that carries a tensor-parallel plan trains on ranks that share its matrices as it does on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import config, trainer, worker
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.config import defaults
from espalier.launch import agent
from espalier.launch import base as launch
from espalier.module import open_module
from espalier.plan import base as plans
from espalier.rank_setup import RankSetup

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

        with worker.joined(place, 30.0) as channel:
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


def test_curve_validation_and_weights_are_those_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where dropout is: ranks that share matrices draw alike."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "tagger.py").write_text(THEIRS)
    train = config.Train(steps=4, batch_tokens=8, precision="fp64", clip=0.3, optimizer=config.Adamw())
    recipe = defaults.resolve(config.Recipe(model=config.Module(build="tagger:build"), train=train))[0]
    one = plans.Plan(ranks=(plans.Rank(share=(0, 8)),), micro_batch=4, precision="fp64")
    stage = plans.Stage(ranks=(0, 1), layers=(0, 1), tensor=2)
    cut = plans.Plan(
        ranks=(plans.Rank(share=(0, 8)),) * 2, stages=(stage,), micro_batch=4, precision="fp64", algorithm="megatron"
    )
    ((curve, held, _),), state = trained(recipe, one, tmp_path)
    results, found = trained(recipe, cut, tmp_path)
    assert [shape for _, _, shape in results] == [(10, 12), (11, 12)]
    for own, own_held, _ in results:
        assert [value for pair in own for value in pair] == pytest.approx([v for pair in curve for v in pair], rel=1e-9)
        assert own_held == pytest.approx(held, rel=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)
