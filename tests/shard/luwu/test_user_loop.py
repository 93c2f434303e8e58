"""Loops of people whose parameters are on an optimizer node train to the bits that they train to without."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from espalier.errors import UserError
from espalier.shard import luwu
from espalier.shard.luwu.node import OptimizerNode

EXAMPLE = Path(__file__).parents[3] / "examples" / "optimizer_node.py"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.outer(torch.relu(self.inner(self.norm(x))))
        return out


class Net(nn.Module):
    """A table and a head outside of four blocks, one of which may be computed again in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.table, self.again = nn.Embedding(50, 24), again
        self.blocks = nn.ModuleList(Block(24) for _ in range(4))
        self.head = nn.Linear(24, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        out: torch.Tensor = self.head(x)
        return out


def made(again: bool = False) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Net(again)
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step + numbers.start))
    losses = []
    for step in numbers:
        tokens = torch.randint(0, 50, (6, 11), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    started: list[OptimizerNode] = []

    def start(job: Any, model: nn.Module) -> luwu.Client:  # type: ignore[name-defined]
        started.append(luwu.start_node(tmp_path / "state", job, model, "token", ("127.0.0.1", 0)))
        return luwu.Client([[started[-1].reduction.door.getsockname()]], 0, job, "token")

    yield start
    for node in started:
        node.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_loop_on_a_node_is_the_plain_loop_to_the_last_bit(nodes: Any, again: bool) -> None:
    plain, optimizer = made(again)
    expected = steps(plain, optimizer, range(12))
    model, other = made(again)
    loop = luwu.attach(model, other, nodes(luwu.job_of(model, other), model))
    assert loop.window.held == 0
    assert steps(model, other, range(12)) == expected
    assert loop.window.peak < sum(4 * one.numel() for one in plain.parameters())
    loop.detach()
    for name, value in model.named_parameters():
        assert torch.equal(value, plain.get_parameter(name)), name
    loop.close()


def test_clipping_by_the_global_norm_is_torchs(nodes: Any) -> None:
    plain, optimizer = made()
    model, other = made()
    loop = luwu.attach(model, other, nodes(luwu.job_of(model, other), model), clip=0.1)
    tokens = torch.arange(40).view(4, 10)
    for one, moves in ((plain, optimizer), (model, other)):
        one(tokens).square().mean().backward()
        if one is plain:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        moves.step()
    loop.detach()
    for name, value in model.named_parameters():
        assert torch.allclose(value, plain.get_parameter(name), atol=1e-6), name
    loop.close()


def test_a_second_backward_pass_before_a_step_is_refused(nodes: Any) -> None:
    model, optimizer = made()
    loop = luwu.attach(model, optimizer, nodes(luwu.job_of(model, optimizer), model))
    tokens = torch.arange(40).view(4, 10)
    model(tokens).sum().backward()
    with pytest.raises(UserError, match=r"A second backward pass came before optimizer\.step"):
        model(tokens).sum().backward()
    loop.close()


def test_optimizers_that_a_node_does_not_run_are_refused_by_name() -> None:
    model, _ = made()
    with pytest.raises(UserError, match="runs AdamW, not SGD"):
        luwu.job_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="decays matrices and not vectors"):
        luwu.job_of(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def test_the_example_runs_and_goes_on_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["optimizer_node.py", str(tmp_path / "state")])
    for first in (1, 21):
        runpy.run_path(str(EXAMPLE))
        told = re.findall(r"step (\d+): loss", capsys.readouterr().out)
        assert [int(one) for one in told] == list(range(first, first + 20))
