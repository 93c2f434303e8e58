"""Through host memory: the same results as without, whatever the operation. (The host plays the GPU here.)"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc
from torch import nn

from espalier import comm
from espalier.comm import backends
from espalier.comm.backends import INNER, HostStaged
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.plan.base import Plan, Rank
from many_ranks import forks, same


def _both(channel: comm.Channel) -> Any:
    """Every operation a sharded step uses, on two groups: plain, and with all tensors staged."""
    plain = channel._inner["cpu"]
    results = []
    for inner in (plain, HostStaged(plain)):
        channel._inner = {"cpu": inner, "cuda": inner}
        channel._alone = inner
        rank, n = channel.rank(), channel.size()
        found = [torch.arange(8.0) + rank, torch.zeros(2), torch.zeros(8), torch.zeros(8)]
        torch.distributed.all_reduce(found[0], group=channel)
        torch.distributed.reduce_scatter_single(found[1], torch.arange(2.0 * n) * (rank + 1), group=channel)
        torch.distributed.all_gather_single(found[2], torch.full((8 // n,), float(rank)), group=channel)
        torch.distributed.all_to_all_single(found[3], torch.arange(8.0) + 10 * rank, group=channel)
        torch.distributed.broadcast(found[0][:4], 1, group=channel)
        results.append([one.clone() for one in found])
    return results


def test_staged_operations_give_what_plain_ones_give() -> None:
    for plain, staged in forks(4, _both):
        same(staged, plain, bitwise=True)


def _trained(channel: comm.Channel, staged: bool, factors: ShardFactors) -> Any:
    if staged:
        plain = INNER["gloo"]
        INNER["gloo"] = lambda asked: {kind: HostStaged(one) for kind, one in plain(asked).items()}
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
    sharding = Amsp(model, channel, Spread(factors=[("*", factors)]))
    optimizer = torch.optim.SGD([one.tensor for one in sharding.owned], lr=0.1)
    for step in range(3):
        sharding.clear()
        with sharding.accumulate(last=True):
            model(torch.full((2, 7), step + channel.rank() + 1.0)).square().mean().backward()
        sharding.wait()
        optimizer.step()
        sharding.refresh()
    sharding.detach()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(1, 2, 4), ShardFactors(4, 4, 4)])
def test_a_sharded_model_trains_the_same_through_host_memory(factors: ShardFactors) -> None:
    for plain, staged in zip(forks(4, _trained, False, factors), forks(4, _trained, True, factors), strict=True):
        same(staged, plain, bitwise=True)


def test_ranks_of_both_kinds_or_of_one_gpu_go_through_host_memory() -> None:
    assert Plan(ranks=(Rank(device="cpu"), Rank(device="cuda:0"))).staged
    assert Plan(ranks=(Rank(device="cuda:0"), Rank(device="cuda:0"))).staged
    assert not Plan(ranks=(Rank(device="cuda:1"), Rank(device="cuda:0"))).staged
    assert not Plan(ranks=(Rank(device="cuda:0"), Rank(device="cuda:0", node=1))).staged
    assert not Plan(ranks=(Rank(device="cuda:0"), Rank(role="optimizer"))).staged
    assert not Plan(ranks=(Rank(), Rank())).staged


def _threads(channel: comm.Channel) -> Any:
    """What serves connections, once many groups have exchanged something; and what they got."""
    groups = [torch.distributed.new_group(list(range(channel.size()))) for _ in range(6)]
    found = torch.ones(1) * (channel.rank() + 1)
    for group in groups:
        torch.distributed.all_reduce(found, group=group)
    names = [Path(f"/proc/self/task/{one}/comm").read_text().strip() for one in os.listdir("/proc/self/task")]
    return names.count("gloo_tcp_loop"), found


def test_one_thread_serves_the_connections_of_all_groups_of_a_rank() -> None:
    for loops, found in forks(2, _threads):
        assert loops == 1
        assert float(found) == 3.0 * 2**5


@cfunc("voidptr(voidptr)", cache=False)
def _computing(told: Any) -> Any:
    """About half a second, then says so."""
    cells, value = carray(told, 2, np.int64), 1
    for _ in range(60_000_000):
        value = (value * 6364136223846793005 + 1442695040888963407) % 9007199254740881
    cells[0] = value
    cells[1] = 1
    return told


def devices(count: int) -> SimpleNamespace:
    """In place of `backends._devices`, of a process that has opened so many."""
    return SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=count))


def test_the_interpreter_does_not_end_before_threads_of_gloo_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread, late, lets go of a tensor: in the end of the interpreter that aborted one of three ranks now and
    then, and in 2 of 9 runs where threads of Gloo had the lowest priority beside a busy program."""
    told, thread = np.zeros(2, np.int64), ctypes.c_ulong()
    monkeypatch.setattr(backends, "_PATIENCE", 60.0)
    monkeypatch.setattr(backends, "_devices", devices(0))  # whatever tests before this one have left
    start = ctypes.CDLL(None).pthread_create
    assert (
        start(ctypes.byref(thread), None, ctypes.c_void_p(_computing.address), ctypes.c_void_p(told.ctypes.data)) == 0
    )
    backends.rest()
    assert not told[1], "of a process without such a group nothing is waited for"
    monkeypatch.setattr(backends, "_devices", devices(1))
    backends.rest()
    assert told[1]
