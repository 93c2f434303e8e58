"""Codecs that stop at NaN: rank, class, collective and how many values are named; without the mark they go on."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from espalier.comm import Channel, Traffic, traffic
from espalier.comm.codecs import codec
from espalier.plan.axes import placement_plan
from espalier.recipe.errors import EspalierError, RunFailed
from many_ranks import ranks


def _summed(channel: Channel, name: str, bad: float) -> str:
    """What rank 1, whose third sum is not finite, is told."""
    channel.use(Traffic.GRADIENTS, codec(name))
    channel.set_timeout(timedelta(seconds=2))
    told = "nothing"
    for number in range(3):
        x = torch.ones(9000)
        if number == 2 and channel.rank() == 1:
            x[5], x[77] = bad, bad
        try:
            with traffic(Traffic.GRADIENTS):
                dist.all_reduce(x)
        except RunFailed as error:
            told = str(error)
        except (EspalierError, RuntimeError):
            assert number == 2, "a peer that stopped is noticed by its silence"
    return told


@pytest.mark.extremes
@pytest.mark.parametrize("name", ["int8!", "zfp:8!", "split!"])
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_the_rank_the_class_and_the_collective_are_named(name: str, bad: float) -> None:
    told = ranks(2, _summed, name, bad)[1]
    assert "Rank 1 was to send NaN or infinity in class 'gradients' (collective 3 of its group)" in told
    assert "2 of" in told
    assert f"codec {name.removesuffix('!')!r}, which lets them through" in told


def test_without_the_mark_they_arrive() -> None:
    assert ranks(2, _summed, "int8", float("nan")) == ["nothing", "nothing"]


def test_a_recipe_asks_for_it_of_all_that_is_encoded() -> None:
    from espalier.plan.base import Exchange

    exchanges = (Exchange(traffic="gradients", codec="int8"), Exchange(traffic="parameters", codec="exact"))
    assert set(placement_plan.codecs(exchanges, strict=True).values()) == {"int8!"}
    assert set(placement_plan.codecs(exchanges).values()) == {"int8"}
