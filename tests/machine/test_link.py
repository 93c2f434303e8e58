"""The measured matrix is one and the same on every rank, and says when a link has two speeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.machine import link
from many_ranks import forks

SIZE = 2**18


def test_every_pair_of_ranks_is_measured_and_all_ranks_agree() -> None:
    found = forks(3, lambda channel: link.measure(channel, large=SIZE, repeats=5))
    for matrix in found:
        assert np.array_equal(matrix.latency, found[0].latency)
        assert np.array_equal(matrix.bandwidth, found[0].bandwidth)
        assert matrix.launch == found[0].launch >= 0
    first = found[0]
    assert np.array_equal(first.latency, first.latency.T)
    off = ~np.eye(3, dtype=bool)
    assert (first.latency[off] > 0).all()
    assert (first.bandwidth[off] > 1e6).all()
    assert [(pair.a, pair.b) for pair in first.pairs()] == [(0, 1), (0, 2), (1, 2)]
    assert [(pair.a, pair.b) for pair in first.pairs([0, 8, 16])] == [(0, 8), (0, 16), (8, 16)]
    assert first.link(2, 1).bandwidth == first.bandwidth[1, 2]
    assert first.link(2, 1).measured
    assert all(0 < matrix.share == first.share <= 1 for matrix in found)
    assert {pair.share for pair in first.pairs()} == {first.link(2, 1).share} == {first.share}


def test_round_trips_give_latency_and_bandwidth() -> None:
    """10 µs one way, 1 ms one way for a megabyte: 990 µs of it are transfer."""
    latency, bandwidth, two = link._fit([2e-5, 3e-5, 4e-5], [2e-3] * 6, 10**6)
    assert latency == pytest.approx(1e-5)
    assert bandwidth == pytest.approx(1e6 / 0.99e-3)
    assert two == 0.0


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 20), st.integers(4, 20), st.floats(2, 20), st.integers(0, 2**32 - 1))
def test_two_groups_of_times_are_seen_and_one_is_not(fast: int, slow: int, factor: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    one = draw.uniform(1.0, 1.1, fast + slow)
    assert not link.bimodal(one)
    if min(fast, slow) * 5 >= fast + slow:
        assert link.bimodal(draw.permutation(np.concatenate([one[:fast], factor * one[fast:]])))


def test_a_single_late_transfer_is_no_second_speed() -> None:
    assert not link.bimodal([1.0] * 11 + [9.0])
    assert not link.bimodal([1.0, 9.0])


def test_a_link_of_two_speeds_is_told() -> None:
    two = np.zeros((2, 2), dtype=bool)
    two[0, 1] = two[1, 0] = True
    matrix = link.Matrix(np.ones((2, 2)), np.ones((2, 2)), 0.0, two)
    assert matrix.notes() == ("link 0-1: repeated transfers fall into two groups of different speed",)


@pytest.mark.parametrize(
    ("rate", "size", "repeats"),
    [(1e9, 4 * 2**20, 12), (50e6 / 8, 1_562_500, 6), (1e6 / 8, 2**18, 3)],
)
def test_a_slow_link_is_measured_with_fewer_bytes_in_bounded_time(rate: float, size: int, repeats: int) -> None:
    """At 50 Mbit/s a transfer of a quarter of a second, eight there and back within four seconds with the warm-up."""
    assert link.affordable(2 * link.TRIED / rate, link.TRIED, link.LARGE, 12) == (size, repeats)
