import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.errors import HostLost
from espalier.train.failure import Failure, RestartBudget, RestartDecision, kind_of


def failure(kind="killed", step=0, what="Rank 1 was killed (SIGKILL)."):
    return Failure(kind, 1, what, step=step)


@pytest.mark.parametrize(("kind", "restarts"), [("user", 0), ("exception", 1), ("killed", 3), ("hang", 3), ("lost", 3)])
def test_one_cause_without_progress_is_answered_so_often(kind, restarts):
    budget = RestartBudget()
    answers = [budget.decide(failure(kind)).restart for _ in range(6)]
    assert answers == [True] * restarts + [False] * (6 - restarts)


def test_progress_gives_everything_back():
    budget = RestartBudget()
    assert all(budget.decide(failure(step=step)).restart for step in range(1, 50))


def test_the_same_cause_on_another_rank_or_step_is_the_same_cause():
    budget = RestartBudget()
    words = [f"Rank {rank} failed: RuntimeError: bad address 0x{rank:x}ff in step {rank}" for rank in range(3)]
    answers = [budget.decide(failure("exception", 5, what)).restart for what in words]
    assert answers == [True, False, False]


def test_causes_are_counted_apart():
    budget = RestartBudget()
    assert [budget.decide(failure("exception", 5, what)).restart for what in "abc"] == [True] * 3


def test_waits_grow_and_begin_anew_with_progress():
    budget = RestartBudget(20)
    waits = [budget.decide(failure()).wait for _ in range(10)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert budget.decide(failure(step=1)).wait == 0


def test_no_restarts_where_none_are_wanted_and_never_of_a_users_mistake():
    assert not RestartBudget(0).decide(failure()).restart
    assert not RestartBudget(10).decide(failure("user")).restart


@given(st.lists(st.tuples(st.sampled_from(["exception", "killed", "hang", "exit"]), st.integers(0, 5)), max_size=60))
def test_whatever_happens_restarts_without_progress_are_bounded(happenings):
    budget, furthest, in_a_row = RestartBudget(), -1, 0
    for kind, step in happenings:
        furthest, in_a_row = (step, 0) if step > furthest else (furthest, in_a_row)
        if not budget.decide(failure(kind, step, what=kind)).restart:
            continue
        in_a_row += 1
        assert in_a_row <= 1 + 3 + 3 + 3


def test_exceptions_are_sorted_by_what_they_tell_of():
    assert kind_of("NameError", 0) == "user"
    assert kind_of("NameError", 7) == "exception"
    assert kind_of("ConnectionResetError", 0) == "lost"
    assert kind_of("RuntimeError", 0) == "exception"


def test_a_decision_says_what_is_done_and_why_nothing_more():
    assert RestartDecision(True, 0.0, "restart 1 of 3").action("start again") == "start again (restart 1 of 3)"
    over = RestartDecision(False, 0.0, "it came back")
    assert over.action("start again") == "stop (it came back)"
    last = over.last(HostLost("Host b was not heard.", why="its link is cut", do="resume"))
    assert (type(last), last.why, last.do) == (HostLost, "its link is cut; it came back", "resume")
