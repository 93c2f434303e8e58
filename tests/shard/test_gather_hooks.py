"""Parameters are here when they are used, and not longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import ROWS, Odd, every, loss, one_step, plain, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from espalier.comm import Channel
from espalier.config import Adamw
from espalier.errors import UserError
from espalier.optim import adamw
from espalier.shard.amsp import Amsp
from espalier.shard.placement import ShardFactors
from espalier.testing import ranks, same

STEPS = 5


def _bypassed(channel: Channel) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    sharding = Amsp(model, channel, every(ShardFactors(2, 2, 2)))
    with sharding.accumulate(last=True):
        nn.functional.linear(torch.ones(1, 3), model[1].weight, model[1].bias).sum().backward()


def test_a_sharded_block_that_is_not_called_is_named() -> None:
    with pytest.raises(
        UserError, match=r"'1.(weight|bias)' got a gradient, but the module that holds it was never called"
    ):
        ranks(2, _bypassed)


def _checkpointed(channel: Channel, factors: ShardFactors) -> dict[str, Tensor]:
    model = Odd()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    sharding = Amsp(model, channel, every(factors))
    optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)
    for step in range(STEPS):
        one_step(sharding, optimizer, step, 2, (channel.rank(), channel.size()))
    return whole(sharding)


@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(2, 2, 2), ShardFactors(1, 2, 2)])
def test_activation_checkpointing_changes_nothing(factors: ShardFactors) -> None:
    expected = plain(torch.float64, STEPS)["parameters"]
    for parameters in ranks(2, _checkpointed, factors):
        same(parameters, expected, relative=1e-12)


def _memory(channel: Channel) -> Any:
    sharding = Amsp(Odd(layers=6), channel, every(ShardFactors(2, 2, 2)))
    most, inner = [0], sharding._windows._enter

    def counted(window: Any) -> None:
        inner(window)
        here = [flat for flat in sharding.flats if flat.here or flat.gathering is not None]
        most[0] = max(most[0], sum(flat not in sharding._windows._root.flats for flat in here))

    sharding._windows._enter = counted  # type: ignore[method-assign]
    with sharding.accumulate(last=True):
        loss(sharding.model, range(ROWS)).backward()
    sharding.wait()
    stored = sum(flat.full.untyped_storage().nbytes() for flat in sharding.flats)
    return most[0], stored, all(bool(torch.isnan(p).all()) for p in sharding.model.blocks.parameters())


def test_of_sharded_parameters_two_blocks_are_here_at_a_time_and_none_afterwards() -> None:
    for most, stored, gone in ranks(2, _memory):
        assert most == 2
        assert stored == 0
        assert gone, "a parameter that is not here reads as not a number"
