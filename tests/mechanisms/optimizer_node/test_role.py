"""What a worker is told of the nodes, and what it keeps where its memory allows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.mechanisms.optimizer_node import role
from espalier.plan import base as plans
from espalier.plan.axes.node_layout import FlatLayer
from espalier.recipe import Adamw, Gpt, Planning, Recipe, Train
from espalier.recipe.errors import UserError
from espalier.store.state_folder import locked

LAYERS = [FlatLayer("block", (("weight", (256, 1024)),)), FlatLayer("head", (("head", (64, 1024)),))]
NUMEL = 320 * 1024


@pytest.mark.parametrize(("spare", "kept"), [(4 * NUMEL, True), (4 * NUMEL - 1, False)])
def test_what_rounding_leaves_is_kept_where_the_plan_leaves_four_bytes_a_parameter(
    monkeypatch: pytest.MonkeyPatch, spare: int, kept: bool
) -> None:
    planned = {"window": 3_000_000.0, "runtime": 250_000_000.0, "peak": 253_000_000.0}
    asked = Recipe(model=Gpt(), train=Train(optimizer=Adamw()), plan=Planning(memory=f"{253_000_000 + spare}B"))
    predicted = plans.Predicted(1.0, 1.0, 1.0, 0.1, {}, planned, 1e9, {})
    how = plans.Plan(ranks=(plans.Rank(share=(0, 4)), plans.Rank(role="optimizer")), micro_batch=4, predicted=predicted)
    post = role.NodePost(1, (("127.0.0.1", 1),), "token")
    monkeypatch.setattr(role, "_gather", lambda own, channel: {1: post})
    made: Any = lambda *given: SimpleNamespace(ledger=None, rank=given[1], job=given[2])  # noqa: E731
    monkeypatch.setattr(role, "Client", made)
    here = {"mesh": SimpleNamespace(rank=0, channel=None), "device": torch.device("cpu")}
    context: Any = SimpleNamespace(recipe=asked, plan=how, damaged={}, folder=None, reconnects=float, **here)
    assert role.connect(context, LAYERS).feedback is kept


def test_two_runs_do_not_serve_from_one_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(UserError, match=r"(?s)Another process serves from .*try: name another folder in store.path"),
        locked(tmp_path, wait=0.0),
    ):
        pass
    with locked(tmp_path, wait=0.0):
        pass
