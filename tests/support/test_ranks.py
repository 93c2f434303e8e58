from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from espalier.comm import Channel
from many_ranks import ranks, same


def _who(channel: Channel) -> tuple[int, int, int]:
    return channel.rank(), dist.get_rank(), dist.get_world_size()


def test_each_thread_is_a_rank_of_its_own() -> None:
    assert ranks(3, _who) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert not dist.is_initialized()


def test_many_ranks_start_in_a_moment() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        ranks(4, _who)
        return time.perf_counter() - began

    assert any(seconds() < 0.5 for _ in range(6))  # 20 ms on an idle machine


def _raises(channel: Channel) -> None:
    if channel.rank() == 2:
        raise ValueError("rank two's own")
    dist.barrier()


def test_the_cause_is_raised_not_what_followed_from_it() -> None:
    with pytest.raises(ValueError, match="rank two's own"):
        ranks(3, _raises)
    assert ranks(2, _who) == [(0, 0, 2), (1, 1, 2)]


def test_a_rank_that_does_not_end_is_named() -> None:
    free = threading.Event()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        ranks(2, lambda channel: free.wait(5) if channel.rank() else None, timeout=0.3)
    free.set()


def _tensor_parallel(channel: Channel) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).double()
    for parameter in net.parameters():  # threads share the seed
        nn.init.constant_(parameter, 0.5)
    mesh = init_device_mesh("cpu", (2,))
    net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    out: torch.Tensor = net(torch.arange(8.0, dtype=torch.float64).view(2, 4))
    out.sum().backward()
    return out.detach()


def test_dtensor_works_on_threads() -> None:
    for out in ranks(2, _tensor_parallel):
        same(out, torch.tensor([[14.5] * 4, [46.5] * 4], dtype=torch.float64))


def _ring(channel: Channel) -> float:
    n, rank = channel.size(), channel.rank()
    value = torch.empty(1)
    # receives first on every rank: only works if receiving does not block before it is waited for
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, value, (rank - 1) % n),
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % n),
        ]
    )
    for work in works:
        work.wait()
    return value.item()


def test_messages_cross() -> None:
    assert ranks(3, _ring) == [2.0, 0.0, 1.0]
