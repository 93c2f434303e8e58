import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.resilience.slowdown import LINK, STAYS, Slowness


def looks(watch, usual, waited, count):
    return [watch.take(usual, waited) for _ in range(count)]


@given(st.integers(2, 16), st.data())
def test_what_stays_is_found_after_the_stated_comparisons_and_again_after_as_many(world, data):
    slow = data.draw(st.integers(0, world - 1))
    own = [0.3 if rank == slow else 0.1 for rank in range(world)]
    found = looks(Slowness(), [0.3] * world, [0.3 - one for one in own], 2 * STAYS)
    assert [index for index, one in enumerate(found, 1) if one is not None] == [STAYS, 2 * STAYS]
    assert found[-1].slow == (slow,)
    assert found[-1].busy == pytest.approx(own)
    assert not found[-1].link


def test_what_a_plan_gives_unlike_work_is_not_slow_but_what_is_slower_than_that_is():
    work = [1.0, 0.4, 0.5]
    assert not any(looks(Slowness(work=work), [0.3] * 3, [0.3 - 0.2 * one for one in work], 2 * STAYS))
    found = looks(Slowness(work=work), [0.3] * 3, [0.1, 0.3 - 0.2 * 0.8, 0.2], STAYS)[-1]
    assert found is not None
    assert found.slow == (1,)
    assert found.busy == pytest.approx((0.2, 0.16, 0.1)), "as measured"


def test_what_does_not_stay_is_not_found():
    watch = Slowness()
    for _ in range(5):
        assert not any(looks(watch, [0.3, 0.3], [0.2, 0.0], STAYS - 1))
        assert looks(watch, [0.1, 0.1], [0.0, 0.0], 1) == [None]
    assert not any(watch.take([0.3, 0.3], wait) for wait in [[0.2, 0.0], [0.0, 0.2]] * STAYS)


@given(st.floats(0.02, 0.2))
def test_a_link_is_slow_when_even_the_one_that_waits_least_waits_long(planned):
    wait = 1.1 * LINK * planned
    usual = [2 * wait, 2 * wait]
    found = looks(Slowness(planned), usual, [wait, 1.2 * wait], STAYS)[-1]
    assert found is not None
    assert (found.link, found.slow, found.wait) == (True, (), pytest.approx(wait))
    assert not any(looks(Slowness(wait), usual, [wait, wait], STAYS)), "as planned"
    assert not any(looks(Slowness(None), usual, [wait, wait], STAYS)), "nothing is planned"
    assert not any(looks(Slowness(planned), [10 * wait] * 2, [wait] * 2, STAYS)), "a small part of the step"
