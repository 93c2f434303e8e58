"""CO2 around anybody's model and optimizer, in their own loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import many_ranks
from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds import CO2
from espalier.mechanisms.local_rounds.co2 import chosen_of
from espalier.mechanisms.local_rounds.membership import MemberReport, OuterSum
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.recipe.errors import UserError


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> float:
    x, y = batch(rank, number)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in net.parameters()])


@pytest.mark.parametrize(
    "settings", [{}, {"codec": "int4"}, {"method": "diloco", "momentum": 0.5}, {"method": "local_sgd"}]
)
def test_all_ranks_learn_one_model(settings: dict[str, Any]) -> None:
    def life(channel: Any) -> tuple[list[float], torch.Tensor, float]:
        net = model()
        if channel.rank():
            for parameter in net.parameters():
                nn.init.zeros_(parameter)  # rank 0's go to all
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        outer = CO2(net, optimizer, steps=4, group=channel, **settings)
        losses = [step(net, optimizer, channel.rank(), number) for number in range(60)]
        with outer.shown():
            shown = flat(net)
        outer.finish()
        outer.detach()
        return losses, flat(net), float(shown.norm())

    found = many_ranks.ranks(2, life)
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    for losses, _, _ in found:
        assert sum(losses[-8:]) < 0.5 * sum(losses[:8])


REPLICAS, STEPS = 4, 160


class InTurn:
    """A member of one process whose replicas take turns: what departs is used a round later, when all have sent."""

    members = tuple(range(REPLICAS))
    codec = codec("exact")

    def __init__(self, flights: dict[int, list[tuple[torch.Tensor, MemberReport]]]) -> None:
        self.flights = flights
        self.number = 0

    def launch(self, values: torch.Tensor, residual: None, note: MemberReport) -> int:
        self.number += 1
        self.flights.setdefault(self.number, []).append((values, note))
        return self.number

    def arrive(self, number: int) -> OuterSum:
        sent = self.flights[number]
        total = torch.stack([values for values, _ in sent]).sum(0)
        return OuterSum(total, {member: note for member, (_, note) in enumerate(sent)}, 0.0)


def learnt(settings: dict[str, Any] | None) -> float:
    """Held-out loss of the common model after 20 rounds of 8 steps; None: of data parallel training."""
    nets = [model() for _ in range(REPLICAS)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=3e-2, fused=True) for net in nets]
    engines, flights = [], {}
    for net in nets if settings is not None else []:
        members: Any = InTurn(flights)
        engines.append(OuterSync(list(net.parameters()), chosen_of("co2", settings), members, Rounds(8)))
    for number in range(STEPS):
        rate = 3e-2 * min(1.0, 2 * (1 - number / STEPS))
        for replica, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            x, y = batch(replica, number)
            nn.functional.mse_loss(net(x), y).backward()
            if engines:
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
                engines[replica].after_step(rate)
        if not engines:
            for tensors in zip(*(net.parameters() for net in nets), strict=True):
                tensors[0].grad = torch.stack([tensor.grad for tensor in tensors]).mean(0)
            optimizers[0].param_groups[0]["lr"] = rate
            optimizers[0].step()
            for net in nets[1:]:
                net.load_state_dict(nets[0].state_dict())
            for net in nets:
                net.zero_grad()
    for engine in engines:
        engine.finish(rate)
    x, y = batch(99, 0)
    return float(nn.functional.mse_loss(nets[0](x), y).detach())


def test_it_learns_nearly_as_data_parallel_training_does() -> None:
    exact, ours, former = (learnt(settings) for settings in (None, {}, {"penalty": "none"}))
    assert ours == learnt({})
    assert ours < exact + 0.06, "a model that has learnt nothing has a loss of about 3.5"
    assert ours < 0.2 * former


def test_it_resumes_in_flight() -> None:
    def life(channel: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rank, found = channel.rank(), []
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        outer = CO2(net, optimizer, steps=4, group=channel)
        for number in range(10):
            step(net, optimizer, rank, number)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), outer.state_dict()))
        for turn in range(2):
            if turn:
                for part, state in zip((net, optimizer, outer), saved, strict=True):
                    part.load_state_dict(state)
            for number in range(10, 31):
                step(net, optimizer, rank, number)
            outer.finish()
            found.append(flat(net))
        outer.detach()
        return found[0], found[1]

    for unbroken, resumed in many_ranks.ranks(2, life):
        assert torch.equal(unbroken, resumed)


def test_alone_it_is_its_own_mean() -> None:
    net, plain = model(), model()
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (net, plain))
    outer = CO2(net, optimizer, steps=3, method="local_sgd")
    for number in range(9):
        step(net, optimizer, 0, number)
        step(plain, other, 0, number)
    outer.finish()
    torch.testing.assert_close(flat(net), flat(plain))


def test_another_penalty_brings_the_authors_momentum() -> None:
    assert chosen_of("co2", {}).momentum == 0.8
    assert chosen_of("co2", {"penalty": "norm"}).momentum == 0.2
    assert chosen_of("co2", {"penalty": "none", "momentum": 0.8}).momentum == 0.8


def test_what_it_cannot_average_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UserError, match="running statistics"):
        CO2(net, optimizer, steps=2)
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(UserError, match="unknown"):
        CO2(plain, optimizer, steps=2, method="slow")
    with pytest.raises(UserError, match="not an option of sync"):
        CO2(plain, optimizer, steps=2, tau=3)
    with pytest.raises(UserError, match=r"sync\.steps"):
        CO2(plain, optimizer, steps=-1)
