"""Schedules are complete, free of deadlock, in the order of PyTorch's, and keep no more activations than they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mechanisms.pipeline.runs import in_flight
from torch.distributed.pipelining import schedules as theirs

from espalier.mechanisms.pipeline.schedules import SCHEDULES, action_lists, warm_up_for_links
from espalier.parallel.action_list import ActionKind, Pipeline, check, timetable
from espalier.recipe.errors import UserError


def straight(places, chunks, micro_batches):
    return Pipeline(tuple((stage % places,) for stage in range(places * chunks)), micro_batches)


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from(SCHEDULES),
    st.lists(st.integers(0, 3), max_size=6).map(lambda extra: sorted(extra, reverse=True)),
)
def test_every_schedule_is_complete_and_ends(places, chunks, micro_batches, schedule, ahead) -> None:
    pipeline = straight(places, chunks, micro_batches)
    lists = action_lists([pipeline], schedule, ahead)
    check([pipeline], lists)
    for actions in lists.values():
        for stage in range(places * chunks):
            for kind in ActionKind:
                numbers = [one.micro_batch for one in actions if one.stage == stage and one.kind is kind]
                assert numbers == sorted(numbers)  # micro-batches in order, so that gradients add up as on one rank
    useful = [one for one in lists[0] if one.kind is ActionKind.RECV_B]
    for one in useful:  # a receive stands just before its use
        following = lists[0][lists[0].index(one) + 1]
        assert (following.stage, following.micro_batch) == (one.stage, one.micro_batch)


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_and_zero_bubble_keep_as_many_micro_batches_as_stages_follow(places, micro_batches) -> None:
    pipeline = straight(places, 1, micro_batches)
    one, zero = (action_lists([pipeline], schedule) for schedule in ("1f1b", "zero_bubble"))
    for rank in range(places):
        assert in_flight(one[rank]) == min(micro_batches, places - rank)
        assert in_flight(zero[rank]) <= min(micro_batches, places)
    assert in_flight(action_lists([pipeline], "gpipe")[0]) == micro_batches


def order_of(schedule, places, chunks, micro_batches, rank):
    """What PyTorch's class has `rank` compute, without modules and process groups."""
    rounds = max(1, micro_batches // places)
    made = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=places,
        microbatches_per_round=micro_batches // rounds,
        _n_microbatches=micro_batches,
    )
    return [str(one) for one in schedule._calculate_single_rank_operations(made, rank) if one is not None]


def ours(pipeline, schedule, rank):
    return [str(one) for one in action_lists([pipeline], schedule)[rank] if one.computes]


@pytest.mark.parametrize(
    ("places", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 10), (3, 2, 3), (2, 3, 7)]
)
def test_interleaved_orders_are_pytorchs(places, chunks, micro_batches) -> None:
    if micro_batches % max(1, micro_batches // places):
        micro_batches -= micro_batches % places  # PyTorch has no order for it
    pipeline = straight(places, chunks, micro_batches)
    for rank in range(places):
        for name, schedule in (
            ("1f1b", theirs.ScheduleInterleaved1F1B),
            ("zero_bubble", theirs.ScheduleInterleavedZeroBubble),
        ):
            assert ours(pipeline, name, rank) == order_of(schedule, places, chunks, micro_batches, rank)


@pytest.mark.parametrize(("places", "micro_batches"), [(2, 2), (4, 8), (4, 5), (8, 9)])
def test_orders_of_one_stage_a_rank_are_pytorchs(places, micro_batches) -> None:
    pipeline = straight(places, 1, micro_batches)
    for rank in range(places):
        made = SimpleNamespace(_num_stages=places, _n_microbatches=micro_batches)
        if rank < places - 1:  # its list of the last stage begins at micro-batch 1 and ends past the last
            written = theirs.Schedule1F1B._get_pipeline_order(made)[rank]
            assert ours(pipeline, "1f1b", rank) == [str(one) for one in written if one and one.computation_type in "FB"]
        written = theirs.ScheduleGPipe._get_pipeline_order(made)[rank]
        assert ours(pipeline, "gpipe", rank) == [str(one) for one in written if one and one.computation_type in "FB"]
        zero = order_of(theirs.ScheduleInterleavedZeroBubble, places, 1, micro_batches, rank)
        assert ours(pipeline, "zero_bubble", rank) == zero


def seconds_of(pipeline, schedule, forward=1.0, backward=2.0, link=0.0, ahead=()):
    takes = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}
    takes |= {ActionKind.BACKWARD_INPUT: backward / 2, ActionKind.BACKWARD_WEIGHT: backward / 2}
    found = timetable(pipeline, action_lists([pipeline], schedule, ahead), lambda one: takes.get(one.kind, link))
    return max(one.end for one in found)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_the_bubble_is_the_papers(places, times, chunks) -> None:
    count = places * times
    one = seconds_of(straight(places, 1, count), "1f1b")
    assert one == pytest.approx(3 * (count + places - 1))  # PipeDream-Flush, GPipe
    assert seconds_of(straight(places, 1, count), "gpipe") == pytest.approx(one)
    inner = seconds_of(straight(places, chunks, count), "1f1b", 1 / chunks, 2 / chunks)
    assert inner == pytest.approx(3 * count + 3 * (places - 1) / chunks)  # Megatron-LM, section 2.2.2
    zero = seconds_of(straight(places, 1, count), "zero_bubble")
    assert zero <= one
    if places > 1 and times > 1:
        assert zero == pytest.approx(3 * count + places - 1)  # ZB-H1: (places - 1)(forward + inputs - weights)


def test_slow_links_ask_for_more_warm_up_and_are_hidden_by_it() -> None:
    passes, links = [3.0] * 4, [1.5, 0.0, 0.0]
    ahead = warm_up_for_links(passes, links)
    assert ahead == [1, 0, 0, 0]
    assert warm_up_for_links(passes, [0.0] * 3) == [0, 0, 0, 0]
    pipeline = straight(4, 1, 16)
    lists = [action_lists([pipeline], "1f1b", extra) for extra in ((), ahead)]

    def link(one):
        boundary = one.stage if one.kind is ActionKind.SEND_F else one.stage - 1
        return {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}.get(one.kind, links[min(boundary, 2)])

    plain, hidden = (max(one.end for one in timetable(pipeline, found, link)) for found in lists)
    assert hidden < plain
    assert hidden == pytest.approx(3 * 16 + 9 + 3.0)  # once there, once back


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(UserError, match="'dualpipe' is not known"):
        action_lists([straight(2, 1, 2)], "dualpipe")
