import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.optim.schedules import factor
from espalier.recipe import Constant, Cosine, Stable

shares = st.floats(0.0, 0.5)
schedules = st.one_of(
    st.builds(Stable, warmup=shares, decay=shares, floor=shares),
    st.builds(Cosine, warmup=shares, floor=shares),
    st.just(Constant()),
)


@given(schedule=schedules, steps=st.integers(1, 500))
def test_every_factor_lies_in_zero_to_one_and_none_is_zero_before_the_end(schedule, steps):
    values = [factor(schedule, step, steps) for step in range(steps)]
    assert all(0.0 < value <= 1.0 for value in values)


@given(schedule=schedules, steps=st.integers(2, 500))
def test_rate_rises_during_warmup_and_never_rises_after_it(schedule, steps):
    values = [factor(schedule, step, steps) for step in range(steps)]
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)


def test_stable_schedule_is_flat_between_warmup_and_decay():
    schedule = Stable(warmup=0.1, decay=0.2, floor=0.0)
    assert {factor(schedule, step, 100) for step in range(10, 80)} == {1.0}
    assert factor(schedule, 99, 100) == pytest.approx(1 / 20)


def test_cosine_is_halfway_down_in_the_middle():
    assert factor(Cosine(warmup=0.0, floor=0.0), 50, 100) == pytest.approx(0.5)
