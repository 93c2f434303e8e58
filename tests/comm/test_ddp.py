"""A codec in DistributedDataParallel and FSDP2: a lossless one changes nothing, a lossy one trains, all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from espalier.comm import Channel, codecs, ddp_hook
from espalier.comm.ddp import pays
from espalier.comm.fsdp import compress
from espalier.recipe.errors import UserError
from many_ranks import forks, same

STEPS = 8


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def train(model: nn.Module, optimizer: Any, rank: int, world: int, steps: int = STEPS) -> float:
    value = 0.0
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = (model(x) - x.flip(1)).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
    return value


def _ddp(channel: Channel, name: str | None, feedback: bool = True) -> Any:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.1)
    hook = None
    if name is not None:
        hook = ddp_hook(name, feedback=feedback)
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train(model, optimizer, channel.rank(), channel.size())
    dist.barrier()
    values = {key: value.clone() for key, value in model.module.state_dict().items()}
    return values, hook.sent if hook else 0, hook.state_dict(model.module) if hook else {}


def loss(values: Any) -> float:
    model = net()
    model.load_state_dict(values)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float((model(x) - x.flip(1)).square().sum(1).mean())


@pytest.fixture(scope="module")
def plain() -> Any:
    return forks(2, _ddp, None)[0][0]


@pytest.mark.parametrize("name", ["exact", "split"])
def test_a_lossless_hook_changes_nothing(name: str, plain: Any) -> None:
    for values, _, kept in forks(2, _ddp, name):
        same(values, plain, relative=1e-5)
        assert not kept


@pytest.mark.parametrize("name", ["int8", "topk:0.1"])
def test_a_lossy_hook_trains_alike_on_all_ranks(name: str, plain: Any) -> None:
    first, *others = forks(2, _ddp, name)
    for other in others:
        same(other[0], first[0], bitwise=True)
    gained = loss(net().state_dict()) - loss(plain)
    assert loss(first[0]) < loss(plain) + (0.5 if name == "topk:0.1" else 0.02) * gained
    raw = STEPS * sum(value.nbytes for value in plain.values())
    assert first[1] < raw * {"int8": 0.28, "topk:0.1": 0.2}[name]
    assert set(first[2]) == set(plain)


def _kept(channel: Channel) -> None:
    model = net()
    hook, other = ddp_hook("int4"), ddp_hook("int4")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)
    wrapped.register_comm_hook(None, hook)
    train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), channel.rank(), channel.size(), 3)
    dist.barrier()
    kept = hook.state_dict(model)
    assert all(part.abs().max() > 0 for part in kept.values())
    other.load_state_dict(model, kept)
    same(other.state_dict(model), kept, bitwise=True)


def test_residuals_go_with_their_parameters() -> None:
    forks(2, _kept)


def _wrong(channel: Channel) -> None:
    with pytest.raises(UserError, match="No codec is called 'int7'"):
        ddp_hook("int7")
    with pytest.raises(UserError, match="disagree about the codec"):
        ddp_hook("int8" if channel.rank() else "int4")
    with pytest.raises(UserError, match="disagree about the codec of gradients: rank 0 has 'auto'"):
        ddp_hook("int8" if channel.rank() else "auto")
    with pytest.raises(UserError, match="no FSDP2 unit"):
        compress(net())


def test_what_cannot_be_is_said_at_once() -> None:
    forks(2, _wrong)


def _auto(channel: Channel, margin: float) -> Any:
    codecs.MARGIN = margin
    hook = ddp_hook("auto", timeout=10)
    model = DistributedDataParallel(net(), bucket_cap_mb=0.1)
    model.register_comm_hook(None, hook)
    train(model, torch.optim.Adam(model.parameters(), lr=3e-3), channel.rank(), channel.size())
    dist.barrier()
    return hook.codec, hook.sent, dict(model.module.state_dict())


@pytest.mark.parametrize(("margin", "taken"), [(0.0, "int8"), (1e9, "exact")])
def test_auto_takes_the_same_on_all_ranks_and_trains(margin: float, taken: str, plain: Any) -> None:
    first, *others = forks(3, _auto, margin)
    raw = STEPS * sum(value.nbytes for value in plain.values()) * 4 / 3
    assert first[0] == taken
    assert first[1] == pytest.approx(raw * (0.25 if taken == "int8" else 1), rel=0.1)
    assert all(other[0] == taken for other in others)
    for other in others:
        same(other[2], first[2], bitwise=True)
    assert loss(first[2]) < loss(plain) + 0.02 * (loss(net().state_dict()) - loss(plain))


@given(st.floats(1e-5, 1e3), st.floats(1e-5, 1e3))
def test_auto_encodes_only_what_was_faster_encoded(plain: float, encoded: float) -> None:
    assert not pays(plain, encoded) or encoded < plain
    assert pays(1.0, 0.5)
    assert not pays(1.0, 0.9)


def _some(channel: Channel, backend: str, cut: list[list[int]]) -> Any:
    """A subgroup of ranks that have made different numbers of groups: two hooks of one, and a unit of FSDP2."""
    mine = next(ranks for ranks in cut if channel.rank() in ranks)
    group = [dist.new_group(ranks, backend=backend) for ranks in cut][cut.index(mine)]
    for _ in range(channel.rank()):
        dist.new_group([channel.rank()], backend="gloo", use_local_synchronization=True)
    place = (mine.index(channel.rank()), len(mine))
    model = DistributedDataParallel(net(), process_group=group)
    ddp_hook("exact", group=group, timeout=10)
    model.register_comm_hook(None, ddp_hook("int8", group=group, timeout=10))
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), *place, 3)
    sharded = net()
    fully_shard(sharded, mesh=DeviceMesh.from_group(group, "cpu"))
    compress(sharded)
    train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.01), *place, 3)
    whole = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    return dict(model.module.state_dict()), whole


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["gloo", "espalier"])
def test_ranks_of_a_group_may_have_made_other_groups_before(backend: str) -> None:
    cut = [[0, 2], [1, 3, 4]]
    found = forks(5, _some, backend, cut)
    for ranks in cut:
        for rank in ranks[1:]:
            same(found[rank], found[ranks[0]], bitwise=True)
    start = loss(net().state_dict())
    assert all(loss(values) < start for both in found for values in both)


def _fsdp(channel: Channel, gradients: str, parameters: str) -> Any:
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    compress(model, gradients=gradients, parameters=parameters)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train(model, optimizer, channel.rank(), channel.size())
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("gradients", "parameters", "share"), [("split", "mpc", 1e-4), ("int8", "bf16", 0.03)])
def test_fsdp2_trains_through_codecs(gradients: str, parameters: str, share: float, plain: Any) -> None:
    first, *others = forks(2, _fsdp, gradients, parameters)
    for other in others:
        same(other, first, bitwise=True)
    gained = loss(net().state_dict()) - loss(plain)
    assert abs(loss(first) - loss(plain)) < share * gained
