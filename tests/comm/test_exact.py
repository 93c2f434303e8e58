from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroupGloo

from espalier.comm import EXACT, Channel, Traffic, traffic
from many_ranks import forks, ranks, same


def _raw_group(channel: Channel) -> ProcessGroupGloo:
    store = dist.PrefixStore("raw", channel.get_group_store())
    return ProcessGroupGloo(store, channel.rank(), channel.size(), timedelta(seconds=20))


def _exact_and_raw(channel: Channel) -> bool:
    raw = _raw_group(channel)
    channel.use(Traffic.GRADIENTS, EXACT)
    torch.manual_seed(channel.rank())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for elements in (1, 7, 1009):
            mine = torch.randn(elements).to(dtype)
            left, right = mine.clone(), mine.clone()
            with traffic(Traffic.GRADIENTS):
                dist.all_reduce(left)
            raw.allreduce([right], dist.AllreduceOptions()).wait()
            same(left, right, bitwise=True)
            gathered = mine.new_empty(2 * elements), mine.new_empty(2 * elements)
            with traffic(Traffic.GRADIENTS):
                dist.all_gather_single(gathered[0], mine)
            raw._allgather_base(gathered[1], mine, AllgatherOptions()).wait()
            same(gathered[0], gathered[1], bitwise=True)
    return True


def test_exact_codec_changes_no_bit() -> None:
    assert all(forks(2, _exact_and_raw))


def test_exact_codec_copies_nothing() -> None:
    value = torch.randn(5, 3)
    assert EXACT.encode(value) is value
    assert EXACT.decode(value, value).data_ptr() == value.data_ptr()
    inner = object()
    assert EXACT.carrier(inner) is inner


class _Halved:
    """A codec that pretends every value costs one byte, to see that the channel asks it."""

    name = "halved"
    used: list[str]

    def __init__(self) -> None:
        self.used = []

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        return wire

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        return elements

    def carrier(self, inner: Any) -> Any:
        codec = self

        class Carrier:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                codec.used.append(name)
                return getattr(inner, name)

        return Carrier()


def _one_class_coded(channel: Channel) -> Any:
    codec = _Halved()
    channel.use(Traffic.OUTER_STEP, codec)
    value = torch.ones(10)
    with traffic(Traffic.OUTER_STEP):
        dist.all_reduce(value)
    dist.all_reduce(value)
    return codec.used, channel.ledger.bytes, value[0].item()


def test_a_codec_carries_its_own_class_only() -> None:
    for used, sent, value in ranks(2, _one_class_coded):
        assert used == ["allreduce"]
        assert sent == {("outer_step", "all_reduce"): 10, ("activations", "all_reduce"): 40}
        assert value == 4
