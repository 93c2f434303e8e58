"""One small sum a step carries totals, flags and a norm, exactly."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.mechanisms.sharding.amsp import ControlMessage
from espalier.plan.axes.placement_plan import control_values, flags_per_value
from many_ranks import ranks


@settings(max_examples=15)
@given(st.integers(2, 5), st.integers(1, 120), st.randoms(use_true_random=False))
def test_flags_totals_and_squares_are_summed_exactly(world: int, tensors: int, draw) -> None:
    used = [[draw.random() < 0.3 for _ in range(tensors)] for _ in range(world)]
    numbers = [draw.randrange(2**40) for _ in range(world)]

    def sums(channel):
        rank = channel.rank()
        totals = torch.tensor([float(numbers[rank]), 1.0], dtype=torch.float64)
        control = ControlMessage(channel, totals, used[rank], torch.device("cpu"))
        control.launch(square=float(rank))
        return control.wait(), totals.tolist()

    for (flags, square), totals in ranks(world, sums):
        assert flags == [any(one[index] for one in used) for index in range(tensors)]
        assert square == sum(range(world))
        assert totals == [float(sum(numbers)), float(world)]


@given(st.integers(1, 2000))
def test_digits_of_one_value_are_exact(world: int) -> None:
    per = int(flags_per_value(world))
    assert (world + 1) ** per <= 2**53 < (world + 1) ** (per + 1)


def test_the_length_is_the_vectors() -> None:
    assert int(control_values(45, 4, 7)) == 7 + 1 + 3
