"""A model that is not what it was when it was wrapped, and steps that are not whole."""

from __future__ import annotations

import pytest
import torch
from nets import every
from torch import nn

from espalier.comm import Channel
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.plan.axes.placement import ShardFactors
from espalier.recipe.errors import UserError
from many_ranks import ranks


def _changed(channel: Channel, change: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sharding = Amsp(model, channel)
    if change == "replaced":
        model[1].weight = nn.Parameter(torch.ones(3, 3))
    elif change == "frozen":
        model[1].bias.requires_grad_(False)
    else:
        model.append(nn.Linear(3, 3))
    with sharding.accumulate(last=True):
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(("change", "where"), [("replaced", "1.weight"), ("frozen", "1.bias"), ("grown", "Sequential")])
def test_a_model_changed_after_wrapping_is_refused(change: str, where: str) -> None:
    with pytest.raises(UserError, match=f"changed at '{where}' after it was sharded"):
        ranks(2, _changed, change)


def _no_last(channel: Channel) -> None:
    model = nn.Linear(3, 3)
    sharding = Amsp(model, channel)
    with sharding.accumulate(last=False):
        model(torch.ones(1, 3)).sum().backward()
    sharding.wait()


def test_waiting_without_a_last_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match="last=True"):
        ranks(2, _no_last)


def _two_backwards(channel: Channel, factors: ShardFactors) -> None:
    model = nn.Linear(3, 3)
    with Amsp(model, channel, every(factors)).accumulate(last=True):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("factors", [ShardFactors(), ShardFactors(1, 2, 2)])
def test_two_backwards_in_one_micro_batch_are_refused(factors: ShardFactors) -> None:
    with pytest.raises(UserError, match="twice in one backward"):
        ranks(2, _two_backwards, factors)
