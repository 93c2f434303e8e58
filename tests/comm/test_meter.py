"""What a step's event tells of communication: bytes since the last look, and what the codecs saved, took and lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from espalier.comm import Channel, Traffic, feedback, traffic
from espalier.comm.base import Meter
from espalier.comm.codecs import codec
from many_ranks import ranks


def _read(channel: Channel) -> Any:
    meter, found = Meter(channel), []
    channel.use(Traffic.GRADIENTS, codec("int8"))
    residual = torch.zeros(20_480)
    for _ in range(2):
        x = torch.randn(20_480, generator=torch.Generator().manual_seed(channel.rank()))
        with traffic(Traffic.GRADIENTS), feedback(residual):
            dist.all_reduce(x)
        dist.all_reduce(torch.zeros(10))
        found.append(meter.read())
    return found, meter.read()


def test_it_tells_what_happened_since_the_last_look() -> None:
    for found, nothing in ranks(2, _read):
        for one in found:
            sent = one["bytes"]["gradients"]
            assert one["bytes"]["activations"] == 40
            assert sent + one["saved"]["gradients"] == 20_480 * 4
            assert 3.5 < 20_480 * 4 / sent < 4
            assert one["coding"]["gradients"] > 0
            assert 0.001 < one["lost"]["gradients"] < 0.02
        assert nothing == {"bytes": {}, "saved": {"gradients": 0}, "coding": {"gradients": 0}, "lost": {}}


def test_alone_there_is_nothing_to_tell() -> None:
    assert Meter(None).read() == {"bytes": {}}


@pytest.mark.parametrize("name", ["split"])
def test_a_lossless_codec_loses_nothing(name: str) -> None:
    def read(channel: Channel) -> Any:
        meter = Meter(channel)
        channel.use(Traffic.GRADIENTS, codec(name))
        with traffic(Traffic.GRADIENTS):
            dist.all_reduce(torch.randn(20_480))
        return meter.read()

    for found in ranks(2, read):
        assert found["lost"] == {}
        assert found["saved"]["gradients"] > 0
