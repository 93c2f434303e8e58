"""The check of action lists: it accepts what runs, and names the rank and action of what cannot."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.mechanisms.pipeline.schedules import SCHEDULES, action_lists
from espalier.parallel.action_list import (
    Action,
    ActionKind,
    Pipeline,
    check,
    dumps,
    loads,
    timetable,
    with_transfers,
)
from espalier.recipe.errors import UserError

FOUR = Pipeline(((0,), (1,), (2,), (3,)), 5)


@st.composite
def pipelines(draw):
    places, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    widths = [draw(st.sampled_from([1, 2, 3])) for _ in range(places)]
    cells = [tuple(range(sum(widths[:place]), sum(widths[: place + 1]))) for place in range(places)]
    return Pipeline(tuple(cells[stage % places] for stage in range(places * chunks)), draw(st.integers(1, 9)))


def test_text_comes_back() -> None:
    lists = action_lists([FOUR], "zero_bubble")
    assert loads(dumps(lists)) == lists
    assert dumps(lists).startswith("0: 0F0,0SEND_F0@1,0F1,")


@pytest.mark.parametrize(
    "text", ["0F0", "x: 0F0", "0: F0", "0: 0X0", "0: 0F", "0: 0SEND_F0", "0: 0F0@1", "0: 0RECV_F@1"]
)
def test_what_is_no_action_is_refused(text) -> None:
    with pytest.raises(UserError, match=r"lists\.txt"):
        loads(text, "lists.txt")


@given(pipelines(), st.sampled_from(SCHEDULES), st.data())
@settings(max_examples=80)
def test_a_dropped_action_is_found(pipeline, schedule, data) -> None:
    lists = {rank: list(actions) for rank, actions in action_lists([pipeline], schedule).items()}
    rank = data.draw(st.sampled_from(sorted(lists)))
    dropped = lists[rank].pop(data.draw(st.integers(0, len(lists[rank]) - 1)))
    with pytest.raises(UserError) as refused:
        check([pipeline], lists, "plan.json")
    assert refused.value.what == "plan.json cannot be run."
    if dropped.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
        assert f"rank {dropped.peer} cannot do its action" in refused.value.why
        assert f"rank {rank} never sends that" in refused.value.why or f"rank {rank} sends" in refused.value.why


@given(pipelines(), st.sampled_from(SCHEDULES), st.data())
@settings(max_examples=80)
def test_an_action_done_twice_is_found(pipeline, schedule, data) -> None:
    lists = {rank: list(actions) for rank, actions in action_lists([pipeline], schedule).items()}
    rank = data.draw(st.sampled_from(sorted(lists)))
    at = data.draw(st.integers(0, len(lists[rank]) - 1))
    lists[rank].insert(at, lists[rank][at])
    with pytest.raises(UserError):
        check([pipeline], lists)


@given(st.integers(2, 5), st.integers(2, 8), st.sampled_from(SCHEDULES), st.data())
@settings(max_examples=60)
def test_two_swapped_receives_are_found(stages, micro_batches, schedule, data) -> None:
    pipeline = Pipeline(tuple((rank,) for rank in range(stages)), micro_batches)
    lists = {rank: list(actions) for rank, actions in action_lists([pipeline], schedule).items()}
    rank = data.draw(st.integers(0, stages - 1))
    kind = data.draw(st.sampled_from([ActionKind.RECV_F, ActionKind.RECV_B]))
    places = [at for at, one in enumerate(lists[rank]) if one.kind is kind]
    if len(places) < 2:
        return
    one, other = places[0], places[data.draw(st.integers(1, len(places) - 1))]
    lists[rank][one], lists[rank][other] = lists[rank][other], lists[rank][one]
    with pytest.raises(UserError, match="cannot be run"):
        check([pipeline], lists)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    pipeline = Pipeline(((0,), (1,)), 2)
    lists = loads(
        "0: 0F0,0SEND_F0@1,0RECV_B0@1,0B0,0F1,0SEND_F1@1,0RECV_B1@1,0B1\n"
        "1: 1RECV_F0@0,1F0,1RECV_F1@0,1F1,1B0,1SEND_B0@0,1B1,1SEND_B1@0\n"
    )
    with pytest.raises(UserError) as refused:
        check([pipeline], lists)
    why = "rank 0 cannot do its action 3, 0RECV_B0@1: it waits without end: rank 1 is to send that after 1RECV_F1@0"
    assert refused.value.why.startswith(why)


def test_a_message_that_nobody_receives_is_named() -> None:
    pipeline = Pipeline(((0,), (1,)), 1)
    lists = loads("0: 0F0,0SEND_F0@1,0SEND_F0@1,0RECV_B0@1,0B0\n1: 1RECV_F0@0,1F0,1B0,1SEND_B0@0\n")
    with pytest.raises(UserError) as refused:
        check([pipeline], lists)
    assert refused.value.why == "rank 1 never receives what rank 0 sends (1RECV_F0@0)"


def test_a_message_is_on_its_way_while_its_sender_goes_on() -> None:
    pipeline = Pipeline(((0,), (1,)), 1)
    lists = action_lists([pipeline])
    found = timetable(pipeline, lists, lambda one: 1.0 if one.computes else 0.25)
    ends = {str(one.action): (one.start, one.end) for one in found}
    assert ends["0F0"] == (0, 1)
    assert ends["0SEND_F0@1"] == (1, 1)
    assert ends["1RECV_F0@0"] == (0, 1.25)
    assert ends["1B0"] == (2.25, 3.25)
    assert ends["0B0"] == (3.5, 4.5)


def test_a_rank_that_holds_neighbouring_stages_hands_over_to_itself() -> None:
    pipeline = Pipeline(((0,), (1,), (1,), (0,)), 1)
    orders = {
        rank: [Action(stage, ActionKind.FORWARD, 0) for stage in stages]
        + [Action(stage, ActionKind.BACKWARD, 0) for stage in reversed(stages)]
        for rank, stages in {0: (0, 3), 1: (1, 2)}.items()
    }
    lists = with_transfers(pipeline, orders)
    check([pipeline], lists)
    assert ",".join(map(str, lists[1])) == "1RECV_F0@0,1F0,2F0,2SEND_F0@0,2RECV_B0@0,2B0,1B0,1SEND_B0@0"


def test_unequal_numbers_of_ranks_share_what_a_boundary_carries() -> None:
    pipeline = Pipeline(((0,), (1, 2), (3,)), 1)
    lists = action_lists([pipeline])
    check([pipeline], lists)
    sent = {
        rank: [str(one) for one in actions if one.kind in (ActionKind.SEND_F, ActionKind.SEND_B)]
        for rank, actions in lists.items()
    }
    assert sent == {
        0: ["0SEND_F0@1", "0SEND_F0@2"],
        1: ["1SEND_F0@3", "1SEND_B0@0"],
        2: [],
        3: ["2SEND_B0@1", "2SEND_B0@2"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(16, 64), pytest.param((1024, 1), marks=pytest.mark.slow)])
def test_a_thousand_ranks_are_built_and_checked_in_five_seconds(shape) -> None:
    depth, width = shape
    chosen = [Pipeline(tuple((stage * width + one,) for stage in range(depth)), 64) for one in range(width)]

    def seconds() -> float:
        begun = time.process_time()
        check(chosen, action_lists(chosen, "1f1b"))
        return time.process_time() - begun

    assert min(seconds() for _ in range(2)) < 5
