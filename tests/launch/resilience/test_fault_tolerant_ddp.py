"""A guarded loop outlives its replicas: no step is lost, and who comes back has what the others have, bit for bit."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from espalier.comm import store_client
from espalier.launch.ranks.store_server import served
from espalier.launch.resilience.fault_tolerant_ddp import GRACE, guard
from espalier.mechanisms.local_rounds.membership import MemberGroup
from espalier.recipe.errors import UserError

FORK = multiprocessing.get_context("fork")
STEPS = 80
MESSAGE = 20.0
"""Seconds in which a message has to come: silence is found to be death long before."""


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def loss_of(model: nn.Module, step: int, member: int) -> torch.Tensor:
    """Of a replica's own batch in a step."""
    draw = torch.Generator().manual_seed(1000 * step + member)
    x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    return (model(x)[:, 0] - x.sum(1)).square().mean()


def hashed(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()


def life(port: int, member: int, count: int, returns: bool, pipe: Any) -> None:
    """Says (step, members, seconds since the last) after each step, and at the end the hash of its parameters."""
    torch.set_num_threads(1)
    store = store_client.connect("127.0.0.1", port, 30.0)
    crew = MemberGroup(store, member, tuple(range(count)), timeout=MESSAGE, grace=GRACE, returns=returns, silence=3.0)
    model, optimizer, schedule = parts(seed=member)
    run = guard(model, optimizer, crew, {"schedule": schedule})
    before = time.perf_counter()
    while run.step < STEPS:
        optimizer.zero_grad()
        loss_of(model, run.step, member).backward()
        time.sleep(0.01)
        optimizer.step()
        schedule.step()
        now = time.perf_counter()
        pipe.send((run.step, run.members.members, now - before))
        before = now
    pipe.send(hashed(model))
    os._exit(0)


class Replica:
    """One process of the crew. Has state: what it said."""

    def __init__(self, port: int, member: int, count: int, returns: bool = False) -> None:
        self.place = (port, member, count)
        self.pipe, writer = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=life, args=(port, member, count, returns, writer), daemon=True)
        self.process.start()
        writer.close()
        self.said: list[Any] = []

    def until(self, step: int) -> None:
        while not (self.said and self.said[-1][0] >= step):
            assert self.pipe.poll(60)
            self.said.append(self.pipe.recv())

    def end(self) -> str:
        while not (self.said and isinstance(self.said[-1], str)):
            assert self.pipe.poll(60)
            self.said.append(self.pipe.recv())
        return str(self.said.pop())

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def replicas(count: int) -> Iterator[list[Replica]]:
    with served() as port:
        found = [Replica(port, member, count) for member in range(count)]
        try:
            yield found
        finally:
            for one in found:
                one.process.kill()
                one.process.join()


def simulated(members: list[tuple[int, ...]]) -> str:
    """Hash of the parameters after steps of these members each, in one process."""
    model, optimizer, schedule = parts(seed=0)
    for step, there in enumerate(members):
        sums = None
        for member in there:
            optimizer.zero_grad()
            loss_of(model, step, member).backward()
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            sums = flat if sums is None else sums + flat
        mean = sums / len(there)
        for p, part in zip(model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = part.view_as(p)
        optimizer.step()
        schedule.step()
    return hashed(model)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_death_loses_no_step_and_the_one_in_its_place_has_all(victim: int) -> None:
    with replicas(3) as crew:
        crew[1].until(10)
        crew[victim].kill()
        crew[1].until(25)
        crew.append(Replica(*crew[victim].place, returns=True))
        ends = [one.end() for one in crew[1:] if one is not crew[victim]]
        said = crew[1].said
        back = crew[-1].said
    assert len(set(ends)) == 1, "all end with the same bits"
    assert [step for step, *_ in said] == list(range(1, STEPS + 1)), "no step is lost or done twice"
    assert ends[0] == simulated([members for _, members, _ in said])
    assert {members for _, members, _ in said} == {(0, 1, 2), tuple(m for m in (0, 1, 2) if m != victim)}
    assert back[0][0] > 20
    assert len(said[-1][1]) == 3
    alone = [step for step, members, _ in said if len(members) == 2]
    pause = said[alone[0] - 1][2]
    assert pause < GRACE + 2.0, f"survivors stood still for {pause:.2f} s"


@pytest.mark.slow
def test_one_that_stands_still_is_given_up() -> None:
    with replicas(3) as crew:
        crew[1].until(5)
        crew[2].kill(signal.SIGSTOP)
        ends = [one.end() for one in crew[:2]]
        assert ends[0] == ends[1]
        assert crew[0].said[-1][1] == (0, 1)
        pause = max(seconds for _, _, seconds in crew[0].said)
        assert pause < MESSAGE, f"survivors stood still for {pause:.2f} s"


def test_alone_it_changes_nothing() -> None:
    model, optimizer, _ = parts(seed=0)
    run = guard(model, optimizer, MemberGroup(HashStore(), 0, (0,)))
    other, own, _ = parts(seed=0)
    for step in range(5):
        for one, how in ((model, optimizer), (other, own)):
            how.zero_grad()
            loss_of(one, step, 0).backward()
            how.step()
    assert (run.step, run.place) == (5, (0, 1))
    assert hashed(model) == hashed(other)
    run.close()
    optimizer.step()
    assert run.step == 5


def test_the_example_of_the_page_runs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "faults.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "guard(" in one)
    names: dict[str, Any] = {}
    exec(compile(block.replace("29778", "0"), "faults.md", "exec"), names)  # any free port
    assert names["run"].step == 20


def test_parameters_of_several_kinds_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(UserError, match="parameters of one kind"):
        guard(model, torch.optim.SGD(model.parameters(), lr=1.0), MemberGroup(HashStore(), 0, (0,)))
