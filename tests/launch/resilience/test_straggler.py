import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.resilience.straggler import FACTOR, LIGHTEST, LOOKS, Stragglers, leveled, scores


@given(st.integers(2, 64), st.data())
def test_the_slow_one_is_named_once_and_nobody_else(world, data):
    slow = data.draw(st.integers(0, world - 1))
    usual = data.draw(st.lists(st.floats(0.1, 0.1 * FACTOR * 0.95), min_size=world, max_size=world))
    own = [0.5 if rank == slow else value for rank, value in enumerate(usual)]
    watch = Stragglers()
    named = [rank for _ in range(10) for rank, _ in watch.look(own)]
    assert named == [slow]


def test_a_moment_is_not_enough():
    watch = Stragglers()
    for _ in range(20):
        for _ in range(LOOKS - 1):
            assert watch.look([1.0, 3.0, 1.0]) == []
        assert watch.look([1.0, 1.0, 1.0]) == []


def test_milliseconds_are_nobodys_wait():
    watch = Stragglers()
    assert not any(watch.look([0.001, 0.004]) for _ in range(10))


def test_scores_are_multiples_of_the_lower_median():
    assert scores([1.0, 2.0]) == [1.0, 2.0]
    assert scores([2.0, 1.0, 1.0, 4.0]) == pytest.approx([2.0, 1.0, 1.0, 4.0])
    assert scores([0.0, 0.0]) == [1.0, 1.0]


@given(st.integers(2, 16), st.data())
def test_ranks_with_unlike_work_are_compared_by_what_the_plan_gives_each(world, data):
    work = data.draw(st.lists(st.floats(LIGHTEST, 1.0), min_size=world, max_size=world))
    slow = data.draw(st.integers(0, world - 1))
    as_planned, watch = Stragglers(work), Stragglers(work)
    assert not any(as_planned.look([0.4 * one for one in work]) for _ in range(10)), "nobody is slow"
    own = [(1.2 if rank == slow else 0.4) * one for rank, one in enumerate(work)]
    assert [rank for _ in range(10) for rank, _ in watch.look(own)] == [slow]


def test_hardly_any_work_is_no_reason_to_be_named():
    """What a step takes besides, of a rank with a hundredth of the work, is many times its planned seconds."""
    assert not any(Stragglers([1.0, 1.0, 0.01]).look([1.0, 1.0, 0.2]) for _ in range(10))
    assert leveled([1.0, 2.0], []) == [1.0, 2.0]
    assert leveled([1.0, 2.0], [0.0, 0.0]) == [1.0, 2.0]
