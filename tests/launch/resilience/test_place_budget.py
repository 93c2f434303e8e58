import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.resilience.place_budget import LEAST, Blame, bound
from espalier.train.failure import Failure


def blamed(*failures):
    blame = Blame()
    for failure in failures:
        blame.take(failure)
    return blame.place()


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["killed", "exit", "hang", "lost"])), max_size=6))
def test_a_place_is_to_blame_when_it_alone_failed_without_progress(told):
    failures = [Failure(kind, rank, "", step=5) for rank, kind in told]
    ranks = {rank for rank, _ in told}
    expected = next(iter(ranks)) if len(ranks) == 1 and len(told) >= LEAST else None
    assert blamed(*failures) == expected


def test_progress_forgives():
    assert blamed(Failure("killed", 1, "", step=5), Failure("killed", 1, "", step=6)) is None


@pytest.mark.parametrize(
    ("failure", "place"),
    [
        (Failure("exception", 1, "RuntimeError: odd shape", raised="RuntimeError"), False),
        (Failure("exception", 1, "RuntimeError: CUDA error: invalid device ordinal", raised="RuntimeError"), True),
        (Failure("exception", 1, "unspecified launch failure", raised="AcceleratorError"), True),
        (Failure("user", 1, "no such file"), False),
        (Failure("anomaly", 1, "The loss rose"), False),
        (Failure("killed", -1, "somebody"), False),
        (Failure("killed", 1, "Rank 1 was killed (SIGKILL)."), True),
    ],
)
def test_what_code_and_input_do_is_no_places_fault(failure, place):
    assert bound(failure) is place
    assert (blamed(failure, failure) == 1) is place


def test_the_same_crash_on_another_rank_afterwards_is_not_a_places_fault_again():
    blame = Blame()
    for _ in range(2):
        blame.take(Failure("killed", 1, "", step=5))
    blame.given_up()
    for _ in range(3):
        blame.take(Failure("killed", 0, "", step=5))
    assert blame.place() is None
    for _ in range(2):
        blame.take(Failure("killed", 0, "", step=9))
    assert blame.place() == 0, "once the run has got further it may"
