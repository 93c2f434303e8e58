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
    for seconds, value in ranks(2, _seconds, 0.05, 1e6):
        assert 0.25 <= seconds < 0.6  # 2 · 100 kB at 1 MB/s, then 50 ms
        assert value == 4.0


def test_without_limits_nothing_is_slower() -> None:
    for seconds, _ in ranks(2, _seconds, 0.0, float("inf")):
        assert seconds < 0.2
