"""Loops of people whose parameters are on an optimizer node train to the bits that they train to without."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import FAST, again, free_port
from torch import nn

from espalier.comm.base import Traffic
from espalier.mechanisms import optimizer_node as luwu
from espalier.mechanisms.optimizer_node import user_loop
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.recipe.errors import UserError

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
        return luwu.Client([[started[-1].door.getsockname()]], 0, job, "token")

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


@pytest.mark.parametrize("frozen", [(), ("table",), ("table", "blocks.1", "blocks.2.inner")])
def test_frozen_parameters_stay_as_they_are_and_send_no_byte(nodes: Any, frozen: tuple[str, ...]) -> None:
    def part() -> tuple[Net, torch.optim.AdamW]:
        model, optimizer = made()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        return model, optimizer

    model, optimizer = part()
    plain, trained = steps(model, optimizer, range(5)), sum(p.numel() for p in model.parameters() if p.requires_grad)
    other, its = part()
    job = luwu.job_of(other, its)
    assert sum(layer.numel for layer in job.layers) == trained
    client = nodes(job, other)
    loop = luwu.attach(other, its, client)
    assert steps(other, its, range(5)) == plain
    assert client.ledger.bytes[Traffic.GRADIENTS, "send"] == 5 * 4 * trained
    loop.detach()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
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


@pytest.mark.parametrize(
    "where",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("forward", "before the step")),
        "backward",
        "after the step",
    ],
)
def test_a_loop_whose_node_starts_again_goes_on_to_the_last_bit(tmp_path: Path, where: str) -> None:
    plain, other = made()
    expected = [one_step(plain, other, step) for step in range(10)]
    model, optimizer = made()
    job, address, times = luwu.job_of(model, optimizer), ("127.0.0.1", free_port()), []

    def start() -> OptimizerNode:
        return luwu.start_node(tmp_path, job, model, "token", address)

    node = [start()]
    client = luwu.Client([[address]], 0, job, "token", FAST)
    loop = luwu.attach(model, optimizer, client)

    def strike(at: str) -> None:
        if at == where and client.step in (3, 4, 7) and times.count(client.step) == 0:
            times.append(client.step)
            node[0].close()
            node[0] = again(start)

    model.blocks[2].register_forward_hook(lambda *_: strike("forward"))
    model.blocks[2].register_full_backward_hook(lambda *_: strike("backward"))
    losses, step = {}, 0
    while step < 10:
        try:
            losses[step] = one_step(model, optimizer, step, strike)
            step += 1
        except luwu.StepLost:
            step = loop.recover()
    assert times
    assert [losses[step] for step in range(10)] == expected
    loop.detach()
    for name, value in model.named_parameters():
        assert torch.equal(value, plain.get_parameter(name)), name
    loop.close()
    node[0].close()


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, strike: Callable[[str], None] = lambda _: None
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)
    tokens = torch.randint(0, 50, (6, 11), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    strike("before the step")
    optimizer.step()
    strike("after the step")
    return loss.item()


def test_the_example_runs_and_goes_on_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["optimizer_node.py", str(tmp_path / "state")])
    for first in (1, 21):
        runpy.run_path(str(EXAMPLE))
        told = re.findall(r"step (\d+): loss", capsys.readouterr().out)
        assert [int(one) for one in told] == list(range(first, first + 20))


@pytest.mark.slow
def test_the_example_goes_on_where_its_node_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[OptimizerNode] = []
    calls: list[tuple[Any, ...]] = []
    plain_start, plain_step = luwu.start_node, user_loop.AttachedLoop._step

    def start(*arguments: Any) -> OptimizerNode:
        started.append(plain_start(*arguments))
        calls.append(arguments)
        return started[-1]

    def step(loop: user_loop.AttachedLoop) -> None:
        plain_step(loop)
        if loop.client.step == 8 and len(started) == 1:
            address = started[0].door.getsockname()
            started[0].close()
            again(lambda: start(*calls[0][:-1], address))

    told = []
    for name, struck in (("plain", False), ("struck", True)):
        monkeypatch.setattr(sys, "argv", ["optimizer_node.py", str(tmp_path / name)])
        if struck:
            monkeypatch.setattr(user_loop, "start_node", start)
            monkeypatch.setattr(user_loop.AttachedLoop, "_step", step)
        runpy.run_path(str(EXAMPLE))
        told.append(dict(re.findall(r"step (\d+): loss ([\d.]+)", capsys.readouterr().out)))
    assert len(started) == 2
    assert told[0] == told[1]
    started[1].close()
