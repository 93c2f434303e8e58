"""Ordinary loops in all their forms: accumulation, skipped steps, errors, averages, looks in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from foreign import STEPS, adamw, plan_of, resnet
from torch import Tensor

import espalier
from espalier.comm import Channel
from espalier.plan.base import Plan
from many_ranks import forks, same

# --- accumulation, in every way people write it ---


def _accumulating(channel: Channel, plan: Plan, way: str) -> Any:
    model, loss = resnet()
    model, optimizer = espalier.apply(plan, model, adamw(model))
    start, stop = plan.ranks[channel.rank()].share
    half = (start + stop) // 2
    for step in range(STEPS):
        if way == "no_sync":
            with model.no_sync():
                (loss(model, range(start, half), step) / 2).backward()
        elif way == "all in no_sync":
            with model.no_sync():
                (loss(model, range(start, half), step) / 2).backward()
                (loss(model, range(half, stop), step) / 2).backward()
        else:
            (loss(model, range(start, half), step) / 2).backward()
        if way != "all in no_sync":
            (loss(model, range(half, stop), step) / 2).backward()
        optimizer.step()
        model.zero_grad() if step % 2 else optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


@pytest.mark.extremes
@pytest.mark.parametrize("way", ["no_sync", "all in no_sync", "every backward exchanges"])
@pytest.mark.parametrize(
    "shard",
    [(1, 1, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 1, 2), (1, 2, 2))), (2, 2, 2)],
)
def test_accumulation_adds_up_however_it_is_written(shard: tuple[int, int, int], way: str) -> None:
    state = _skipping(None, plan_of(1), ())
    for found in forks(2, _accumulating, plan_of(2, shard), way):
        same(found, state, relative=1e-12)


def _skipping(channel: Channel | None, plan: Plan, odd: tuple[int, ...] = (2, 3)) -> Any:
    """One step is thrown away after its backward, and of another the gradients are kept into the next."""
    model, loss = resnet()
    model, optimizer = espalier.apply(plan, model, adamw(model))
    rows = range(*plan.ranks[channel.rank() if channel else 0].share)
    for step in range(STEPS):
        loss(model, rows, step).backward()
        if step == 2 and odd:
            optimizer.zero_grad()
            continue
        optimizer.step()
        if step != 3 or not odd:
            optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


@pytest.mark.extremes
@pytest.mark.parametrize("shard", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_gradients_stay_until_they_are_cleared(shard: tuple[int, int, int]) -> None:
    expected = _skipping(None, plan_of(1))
    for found in forks(2, _skipping, plan_of(2, shard)):
        same(found, expected, relative=1e-12)


# --- what loops do beside training ---


class Failing(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ZeroDivisionError


ODD = ("fails", "looks", "skips", "averages", "halves")


def _odd_loop(channel: Channel | None, plan: Plan, way: str) -> Any:
    """A loop that does something besides: fails in a backward, averages, reads or clears parameters."""
    model, loss = resnet()
    model, optimizer = espalier.apply(plan, model, adamw(model))
    rows = range(*plan.ranks[channel.rank() if channel else 0].share)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(STEPS):
        if way == "fails" and step == 2:
            handle = model[0][1].register_forward_hook(lambda module, given, out: Failing.apply(out))
            failing = loss(model, rows, step)
            with pytest.raises(ZeroDivisionError):
                failing.backward()
            handle.remove()
            optimizer.zero_grad()
        found = loss(model, rows, step)
        if way == "looks":
            with torch.no_grad():
                loss(model, rows, step + 1)
        found.backward()
        if way == "skips" and step == 3:
            model.zero_grad()
        if way == "clamps":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        if way.startswith("norm "):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float(way.removeprefix("norm ")))
        optimizer.step()
        optimizer.zero_grad(set_to_none=way != "zeros")
        if way == "averages":
            torch._foreach_lerp_(average, [parameter.detach() for parameter in model.parameters()], 0.5)
        if way == "halves" and step == 1:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.5)
    return average if way == "averages" else list(copy.deepcopy(model.state_dict()).values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", [*ODD, "clamps", "zeros", "norm 0", "norm 1", "norm inf", "norm -inf"])
@pytest.mark.parametrize(
    "shard", [*(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 1, 1), (1, 1, 2), (1, 2, 2))), (2, 2, 2)]
)
def test_what_loops_do_beside_training_works_too(shard: tuple[int, int, int], way: str) -> None:
    if shard[0] > 1 and way in ("averages", "halves"):
        return  # parameters that are not here cannot be read or written: mechanisms/sharding/README.md
    expected = _odd_loop(None, plan_of(1), way)
    for found in forks(2, _odd_loop, plan_of(2, shard), way):
        same(found, expected, relative=1e-12)
