"""A replica that was lost comes back at the end of a round, with the others' outer state, and all end as one."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from processes import crew
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from espalier.mechanisms.local_rounds import CO2, rejoin
from espalier.mechanisms.local_rounds.membership import MemberGroup
from espalier.recipe.errors import PeerLost


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("co2", "diloco", "streaming_diloco"))],
)
def test_killed_come_back_and_at_the_end_all_are_one(method: str) -> None:
    with crew(3, method, 60, pause=0.02) as members:
        members[1].reach("round 4")
        for lost in (0, 2):
            members[lost].send(signal.SIGKILL)
            members[1].reach("round")
        members += [members[lost].again() for lost in (0, 2)]
        for back in members[3:]:
            back.reach("back in round")
        said = [one.last() for one in (members[1], *members[3:])]
    assert len({line.split()[0] for line in said}) == 1, "all parameters are the same bits"
    assert "lost (0" in said[0]
    assert said[0].endswith("left (0, 1, 2)")


@pytest.mark.slow
def test_killed_while_it_comes_back_and_the_others_go_on() -> None:
    with crew(3, "co2", 40, pause=0.02) as members:
        members[0].reach("round 3")
        members[2].send(signal.SIGKILL)
        back = members[2].again()
        members.append(back)
        back.reach("back in round")
        back.send(signal.SIGKILL)
        said = [members[index].last() for index in (0, 1)]
    assert said[0].split()[0] == said[1].split()[0]
    assert said[0].count("lost (2,)") == 2


@pytest.mark.slow
def test_in_ones_own_loop() -> None:
    """Two ranks that met in a store of their own; the second leaves and one in its place comes back."""
    store, found = HashStore(), {}

    def train(returns: bool, member: int, rounds: int) -> tuple[torch.Tensor, list[int]]:
        torch.manual_seed(member + 10 * returns)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        model.register_buffer("scale", torch.rand(1))
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        place = MemberGroup(store, member, (0, 1), timeout=3.0, grace=0.5, returns=returns)
        outer = CO2(model, optimizer, steps=2, method="eager", group=place)
        seen = [outer.engine.rounds]
        while outer.engine.rounds < rounds:
            optimizer.zero_grad()
            (model(torch.rand(8, 3)) * model.scale).square().mean().backward()
            optimizer.step()
            seen.append(len(outer.engine.members.members))
            if seen[-1] == 1:
                time.sleep(0.05)  # rounds that somebody can still come back to
        if rounds == 3:
            outer.detach()
        else:
            outer.finish()
        return torch.cat([p.detach().flatten() for p in (*model.parameters(), *model.buffers())]), seen

    def stays() -> None:
        found["first"] = train(False, 0, 60)

    def leaves() -> None:
        train(False, 1, 3)
        found["back"] = train(True, 1, 60)

    threads = [threading.Thread(target=one) for one in (stays, leaves)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (first, seen), (back, since) = found["first"], found["back"]
    assert torch.equal(first, back), "parameters, frozen ones and buffers"
    assert (1 in seen, seen[-1]) == (True, 2)
    assert 3 < since[0] < 60


def test_nobody_lets_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match="was not admitted within"):
        rejoin.ask(HashStore(), 1, wait=0.1)


def test_a_damaged_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store, limit = HashStore(), timedelta(seconds=10)
    found: list[Any] = [None, None]
    real = rejoin._hash
    monkeypatch.setattr(rejoin, "_hash", lambda body: real(body) + threading.current_thread().daemon)

    def one(rank: int) -> None:
        group = ProcessGroupGloo(store, rank, 2, limit)
        try:
            if rank == 0:
                rejoin.send(group, 1, {"x": torch.arange(5.0)}, limit)
            else:
                rejoin.received(group, 0, limit)
        except PeerLost as error:
            found[rank] = error.what

    threads = [threading.Thread(target=one, args=(rank,), daemon=bool(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [None, "The outer state arrived damaged."]
