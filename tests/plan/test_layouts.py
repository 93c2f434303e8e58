"""Nested shards: all of them, nothing else, and a refusal that names what would be possible."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from asked import decoder
from hypothesis import given
from hypothesis import strategies as st

from espalier.plan.base import Layout
from espalier.plan.layouts import ALGORITHMS, Layouts, Limits, chains, divisors, grid, of_view, view
from espalier.recipe import Pin, ShardPin
from espalier.recipe.errors import UserError

SHARDS = st.sampled_from([(8, 8), (16, 8), (64, 8), (12, 4), (24, 8), (7, 8), (1, 8), (96, 6)])


def test_a_thousand_ranks_in_powers_of_two_have_286_chains() -> None:
    """AMSP (arXiv 2311.00257): 11 powers of two, chosen three times with repetition: 13 over 3."""
    assert len(chains(1024, 8)) == 286


@given(SHARDS)
def test_chains_are_all_nested_triples_of_the_candidates(sizes: tuple[int, int]) -> None:
    ranks, per_node = sizes
    found = [tuple(map(int, row)) for row in chains(ranks, per_node)]
    assert len(found) == len(set(found))
    candidates = {factor for row in found for factor in row}
    wanted = {
        (params, grads, optimizer)
        for params in candidates
        for grads in candidates
        for optimizer in candidates
        if optimizer % grads == 0 and grads % params == 0
    }
    assert set(found) == wanted
    assert {1, ranks} <= candidates
    assert all(ranks % factor == 0 for factor in candidates)
    for factor in candidates - {ranks}:
        assert per_node % factor == 0 or factor % max(d for d in divisors(ranks) if per_node % d == 0) == 0


@given(st.integers(1, 5000))
def test_divisors_divide(number: int) -> None:
    assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]


def seen(**more: Any) -> Layout:
    names = ("params", "grads", "optimizer")
    shard = {name: more.pop(name, 1) for name in names}
    return Layout(**{"dp": 16, **more}, shard=shard)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ({"params": 2, "grads": 4, "optimizer": 6}, "grads = 3"),
        ({"params": 3, "grads": 4, "optimizer": 8}, "params = 2"),
        ({"grads": 4, "optimizer": 4, "dp": 18}, "optimizer = 3"),
        ({"optimizer": 32}, "optimizer = 16"),
        ({"grads": 2}, "grads = 1"),
        ({"dp": 0}, "dp = 1"),
        ({"micro_batch": -1}, "micro_batch = 1"),
        ({"params": 0}, "params = 1"),
        ({"algorithm": "megatorn"}, "megatron"),
    ],
)
def test_what_does_not_nest_is_refused_with_the_nearest_that_does(wrong: dict[str, Any], near: str) -> None:
    with pytest.raises(UserError, match=re.escape(near)):
        of_view(seen(**wrong))


@given(SHARDS, st.sampled_from(ALGORITHMS), st.data())
def test_a_view_says_all_of_a_layout(sizes: tuple[int, int], algorithm: str, data: st.DataObject) -> None:
    ranks, per_node = sizes
    rows = chains(ranks, per_node)
    params, grads, optimizer = map(int, rows[data.draw(st.integers(0, len(rows) - 1))])
    made = Layouts(algorithm, "block", ranks, 2, 1, 1, 1, 3, params, grads, optimizer, 5, 2)
    assert of_view(view(made, 4, "bf16")) == made


@given(
    st.sampled_from(ALGORITHMS), st.sampled_from([1, 2, 6, 8, 16, 24]), st.sampled_from([1, 3, 8, 16]),
    st.sampled_from([6, 8]), st.sampled_from([1, 4, 32]),
)  # fmt: skip
def test_a_grid_holds_only_what_divides(algorithm: str, world: int, layers: int, heads: int, batch: int) -> None:
    limits = Limits(decoder(heads * 8, layers, 96, batch, heads=heads, kv_heads=heads).profile)
    for found in grid(algorithm, world, 8, limits):
        assert np.all(found.world == world)
        assert np.all(found.shards % found.optimizer == 0)
        assert np.all((found.optimizer % found.grads == 0) & (found.grads % found.params == 0))
        assert np.all(heads % (found.tp * found.sp) == 0)
        assert np.all(96 % found.sp == 0)
        assert np.all((found.pp <= layers) & (found.dp <= batch))
        assert np.all((found.micro_batch >= 1) & (found.micro_batch <= -(-batch // found.dp)))
        assert np.all((found.tp > 1) == (algorithm in ("megatron", "fsp")))
        assert np.all((found.sp > 1) == (algorithm == "isp"))
        parts = (found.tp, found.sp, found.pp, found.params, found.grads, found.optimizer, found.micro_batch)
        rows = np.stack([*parts, found.chunks, found.schedule == "zero_bubble"])
        assert len(np.unique(rows, axis=1).T) == len(found)


def test_pins_and_redundancy_leave_what_was_asked_for() -> None:
    limits = Limits(decoder(64, 4, 64, 64).profile, Pin(shard=ShardPin(grads=4)), redundancy=2)
    found = [one for algorithm in ALGORITHMS for one in grid(algorithm, 32, 8, limits)]
    assert found
    for one in found:
        assert np.all(one.grads == 4)
        assert np.all(one.shards // one.optimizer >= 2)
