"""Nested shards: who holds which span, and which axes a mesh has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nets import triples

from espalier.plan.axes.placement import STATES, ShardFactors, level, per_node, place
from espalier.recipe.errors import UserError


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), st.integers(1, 4), st.data())
def test_shards_of_a_state_cover_a_unit_once_and_nest(ranks: int, machines: int, data: st.DataObject) -> None:
    nodes = [rank * machines // ranks for rank in range(ranks)]
    factors = data.draw(st.sampled_from(triples(ranks)))
    placement = place(factors, nodes)
    length = placement.multiple * data.draw(st.integers(1, 5))
    for state, parts in zip(STATES, factors, strict=False):
        held = [placement.held(rank, length, state) for rank in range(ranks)]
        assert all(span.length == length // parts for span in held)
        assert sorted({span.start for span in held}) == [index * length // parts for index in range(parts)]
        assert all([span.start for span in held].count(start) == ranks // parts for start in {s.start for s in held})
    for rank in range(ranks):
        outer = placement.held(rank, length, "params")
        for state in ("grads", "optimizer"):
            inner = placement.held(rank, length, state)  # type: ignore[arg-type]
            assert outer.start <= inner.start
            assert inner.stop <= outer.stop
            outer = inner


@given(st.sampled_from([(8, 2), (8, 4), (16, 4)]), st.data())
def test_no_axis_leaves_a_machine_and_stays_in_it_at_once(sizes: tuple[int, int], data: st.DataObject) -> None:
    ranks, machines = sizes
    nodes = [rank * machines // ranks for rank in range(ranks)]
    for axis in place(data.draw(st.sampled_from(triples(ranks))), nodes).axes:
        for rank in range(ranks):
            places = [nodes[member] for member in axis.members(rank)]
            assert len(set(places)) in (1, len(places)), "all on one machine, or each on its own"


def test_the_papers_placement() -> None:
    """AMSP's index of a shard, for two nodes of four ranks: parameters by pairs, gradients by nodes, states by all."""
    placement = place(ShardFactors(2, 4, 8), [0] * 4 + [1] * 4)
    starts = [[placement.held(rank, 8, state).start for rank in range(8)] for state in STATES[:3]]
    assert starts == [[0, 4] * 4, [0, 4, 2, 6] * 2, [0, 4, 2, 6, 1, 5, 3, 7]]


def test_machines_of_different_size_are_not_divided_at() -> None:
    assert per_node([0, 0, 1]) == 1
    assert per_node([0, 0, 1, 1]) == 2
    assert per_node([0, 1, 0, 1]) == 1
    assert [axis.size for axis in place(ShardFactors(1, 1, 6), [0, 0, 0, 0, 1, 1]).axes] == [6]


@pytest.mark.parametrize(
    ("factors", "said", "nearest"),
    [
        (ShardFactors(2, 3, 6), "params = 2 does not divide grads = 3", "params = 1"),
        (ShardFactors(1, 1, 3), "optimizer = 3 does not divide the number of ranks = 4", "optimizer = 2"),
        (ShardFactors(0, 1, 4), "params = 0 does not divide", "params = 1"),
    ],
)
def test_factors_that_do_not_nest_or_divide_are_named_with_the_nearest(
    factors: ShardFactors, said: str, nearest: str
) -> None:
    with pytest.raises(UserError) as error:
        factors.check(4 if factors.optimizer != 6 else 6)
    assert said in str(error.value)
    assert error.value.do == nearest


def test_a_level_is_between_as_soon_as_two_machines_take_part() -> None:
    assert level("aab", (0, 1)) == level("aab", ()) == "inside"
    assert level("aab", (1, 2)) == "between"
