"""The stock composition that cut models are timed beside trains the same decoder."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch


def test_the_stock_decoder_has_our_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    from cuts_rank import Cut, RandomTokens, Task
    from peers.stock import Decoder

    task = Task(Cut(), batch=3, sequence=32, depth=2, width=64, heads=4, kv_heads=2, vocabulary=256)
    workload = RandomTokens(task.recipe())
    ours = workload.build(torch.device("cpu"), torch.float32)
    for one in ours.parameters():
        torch.nn.init.normal_(one, 0.0, 0.3)
    theirs = Decoder(msgspec.structs.asdict(workload.options) | {"sequence": 32})
    theirs.load_state_dict(ours.state_dict())
    tokens = workload.rows(0)[:, :-1]
    torch.testing.assert_close(theirs(tokens), ours(tokens), rtol=1e-4, atol=1e-5)


def test_a_cut_gives_each_rank_its_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    from cuts import TASKS
    from espalier.parallel.mesh import of_plan
    from espalier.plan.base import check

    for name, task in TASKS.items():
        plan = check(task.cut.plan(task.depth, task.batch, task.micro_batches, [0] * task.cut.world), task.batch)
        assert len(plan.ranks) == task.cut.world == len(of_plan(plan).trainers), name
        layout = plan.layout
        assert (layout.pp, layout.dp, layout.sp, layout.tp) == (task.cut.pp, task.cut.dp, task.cut.cp, task.cut.tp)
