"""Collectives of plain values. torch's own pickle what they carry, and unpickling runs the sender's code; these carry
`serialization`'s closed set of types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.recipe import serialization

RankGroup = dist.ProcessGroup | None
"""The ranks that something is exchanged among; None where there is one, or where torch's default group is meant."""


def all_gather(value: Any, group: RankGroup) -> list[Any]:
    """Every rank's value, in rank order. All ranks of `group` call it."""
    body = _body(value, group)
    sizes = _sizes(body, group)
    parts = [body.new_empty(max(sizes)) for _ in sizes]
    dist.all_gather(parts, _padded(body, max(sizes)), group=group)
    return [_value(part, size, rank) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]


def gather(value: Any, group: RankGroup) -> list[Any] | None:
    """Every rank's value on rank 0 of `group`, None elsewhere. All its ranks call it."""
    body = _body(value, group)
    sizes = _sizes(body, group)
    lead = dist.get_rank(group) == 0
    parts = [body.new_empty(max(sizes)) for _ in sizes] if lead else None
    dist.gather(_padded(body, max(sizes)), parts, group=group, group_dst=0)
    if parts is None:
        return None
    return [_value(part, size, rank) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]


def scatter(values: Sequence[Any] | None, group: RankGroup) -> Any:
    """This rank's one of the `values` of rank 0 of `group`. All its ranks call it; `values` of others are not used."""
    lead = dist.get_rank(group) == 0
    bodies = [_body(value, group) for value in values or ()] if lead else []
    device = _device(group)
    sizes = torch.tensor([len(body) for body in bodies] or [0] * dist.get_world_size(group), device=device)
    dist.broadcast(sizes, group=group, group_src=0)
    longest = int(sizes.max())
    received = torch.empty(longest, dtype=torch.uint8, device=device)
    dist.scatter(received, [_padded(body, longest) for body in bodies] if lead else None, group=group, group_src=0)
    return _value(received, int(sizes[dist.get_rank(group)]), 0)


def broadcast(value: Any, group: RankGroup) -> Any:
    """The value of rank 0 of `group`. All its ranks call it."""
    lead = dist.get_rank(group) == 0
    body = _body(value if lead else None, group)
    size = torch.tensor([len(body)], device=body.device)
    dist.broadcast(size, group=group, group_src=0)
    body = body if lead else body.new_empty(int(size))
    dist.broadcast(body, group=group, group_src=0)
    return _value(body, int(size), 0)


def _body(value: Any, group: RankGroup) -> Tensor:
    data = bytearray(serialization.dumps(value, "a value for other ranks"))
    return torch.frombuffer(data, dtype=torch.uint8).to(_device(group))


def _device(group: RankGroup) -> torch.device:
    """The CPU where the group's backend takes its tensors, else the backend's own device."""
    group = group or dist.group.WORLD
    assert group is not None, "no process group is initialised"
    kinds = group._device_types
    if not kinds or torch.device("cpu") in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0].type, torch.accelerator.current_device_index())


def _sizes(body: Tensor, group: RankGroup) -> list[int]:
    own_size = torch.tensor([len(body)], device=body.device)
    sizes = [torch.zeros_like(own_size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own_size, group=group)
    return [int(size) for size in sizes]


def _padded(body: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(body, (0, size - len(body)))


def _value(body: Tensor, size: int, rank: int) -> Any:
    return serialization.loads(body[:size].cpu().numpy().data, f"what rank {rank} sent")
