from __future__ import annotations

import time

import torch
import torch.distributed as dist

from espalier.comm import Channel, Traffic, traffic
from espalier.testing import ranks, slow


def _seconds(channel: Channel, latency: float, bandwidth: float) -> tuple[float, float]:
    slow(channel, latency=latency, bandwidth=bandwidth)
    value = torch.ones(25_000)  # 100 kB; two ranks send all of it in an all-reduce
    began = time.perf_counter()
    works = []
    with traffic(Traffic.GRADIENTS):
        for _ in range(2):
            works.append(dist.all_reduce(value, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    return time.perf_counter() - began, value[0].item()


def test_bandwidth_queues_and_latency_adds() -> None:
    """2 · 100 kB at 1 MB/s, then 50 ms; tried again where this machine was busy."""
    found = []
    for _ in range(5):
        found += ranks(2, _seconds, 0.05, 1e6)
        if min(seconds for seconds, _ in found) < 0.3:
            break
    assert 0.25 <= min(seconds for seconds, _ in found) < 0.3
    assert {value for _, value in found} == {4.0}


def test_without_limits_nothing_is_slower() -> None:
    assert any(seconds < 0.2 for _ in range(5) for seconds, _ in ranks(2, _seconds, 0.0, float("inf")))
