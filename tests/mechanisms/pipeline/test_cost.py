"""The cost of a pipeline is that of its timetable, and its bytes are those of its action lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mechanisms.pipeline.runs import in_flight

from espalier.mechanisms.pipeline.schedules import action_lists, warm_up_for_links
from espalier.parallel.action_list import Action, ActionKind, ActionLists, Pipeline, timetable
from espalier.plan.axes.pipeline import PipelineLoad, cost, most_in_flight


@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 4), st.booleans())
def test_idle_time_and_bytes_are_those_of_the_lists(ranks, chunks, times, split) -> None:
    chunks = 1 if split else chunks
    count, schedule = ranks * times, "zero_bubble" if split else "1f1b"
    pipeline = Pipeline(tuple((stage % ranks,) for stage in range(ranks * chunks)), count)
    lists = action_lists([pipeline], schedule)
    seconds = {
        ActionKind.FORWARD: 1.0,
        ActionKind.BACKWARD: 2.0,
        ActionKind.BACKWARD_INPUT: 1.0,
        ActionKind.BACKWARD_WEIGHT: 1.0,
    }
    found = timetable(pipeline, lists, lambda one: seconds.get(one.kind, 0.0) / chunks)
    load = PipelineLoad(ranks, count, chunks, 3.0, 1.0, message_bytes=7, split=split)
    priced = cost(load)
    assert max(one.end for one in found) == pytest.approx(3 * count + priced.seconds["pipeline"])
    sends = [sum(one.kind in (ActionKind.SEND_F, ActionKind.SEND_B) for one in actions) for actions in lists.values()]
    assert priced.sent["activations"] == 7 * max(sends)
    if not split:
        assert in_flight(lists[0]) == pytest.approx(float(most_in_flight(ranks, chunks)) * chunks)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("message", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_more_warm_up_hides_all_hand_overs_but_those_of_filling_and_draining(ranks, count, message, split) -> None:
    pipeline = Pipeline(tuple((stage,) for stage in range(ranks)), count)
    more = warm_up_for_links([3.0] * ranks, [message] * (ranks - 1))
    lists = action_lists([pipeline], "zero_bubble" if split else "1f1b", more)
    seconds = {
        ActionKind.FORWARD: 1.0,
        ActionKind.BACKWARD: 2.0,
        ActionKind.BACKWARD_INPUT: 1.0,
        ActionKind.BACKWARD_WEIGHT: 1.0,
    }
    seconds |= {ActionKind.SEND_F: message, ActionKind.SEND_B: message}
    taken = max(one.end for one in timetable(pipeline, lists, lambda one: seconds.get(one.kind, 0.0)))
    ahead, plain = (
        sum(cost(PipelineLoad(ranks, count, 1, 3.0, 1.0, message, split=split, ahead=ahead)).seconds.values())
        for ahead in (True, False)
    )
    assert taken == pytest.approx(3 * count + ahead, rel=0.1)
    assert ahead < plain


def test_many_layouts_are_priced_in_one_call() -> None:
    ranks, chunks = np.array([1, 2, 4, 4]), np.array([1, 1, 1, 2])
    found = cost(PipelineLoad(ranks, 8, chunks, np.array([4.0, 2.0, 1.0, 1.0]), message=0.5, message_bytes=10))
    assert found.seconds["pipeline"].tolist() == [0.0, 2.0, 3.0, 1.5]
    assert found.seconds["send"].tolist() == [0.0, 0.5 * 11, 0.5 * 15, 0.5 * 30]
    assert found.sent["activations"].tolist() == [0, 80, 160, 320]


def on_shared_cores(lists: ActionLists, cores: float, passes: dict[ActionKind, float]) -> float:
    """Seconds until all passes are done, where ranks that have work to do share `cores` equally, and one has one at
    most. Messages take no time."""
    waiting = {rank: [one for one in actions if one.computes] for rank, actions in lists.items()}
    done: set[tuple[int, ActionKind, int]] = set()
    last = max(one.stage for actions in waiting.values() for one in actions)
    left: dict[int, float] = {}
    now = 0.0

    def ready(one: Action) -> bool:
        if one.kind is ActionKind.FORWARD:
            return not one.stage or (one.stage - 1, ActionKind.FORWARD, one.micro_batch) in done
        return one.stage == last or (one.stage + 1, ActionKind.BACKWARD, one.micro_batch) in done

    while any(waiting.values()):
        for rank, actions in waiting.items():
            if actions and rank not in left and ready(actions[0]):
                left[rank] = passes[actions[0].kind]
        speed = min(1.0, cores / len(left))
        taken = min(left.values()) / speed
        now += taken
        for rank in list(left):
            left[rank] -= taken * speed
            if left[rank] < 1e-9:
                del left[rank]
                one = waiting[rank].pop(0)
                done.add((one.stage, one.kind, one.micro_batch))
    return now


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (8, 2)])
def test_ranks_that_share_cores_have_those_of_ranks_that_wait(ranks: int, cores: int) -> None:
    count = 4 * ranks
    lists = action_lists([Pipeline(tuple((stage,) for stage in range(ranks)), count)])
    share = min(1.0, cores / ranks)
    found = on_shared_cores(lists, cores, {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0})
    priced = cost(PipelineLoad(ranks, count, 1, 3.0 / share, share=share, together=ranks))
    assert 3.0 / share * count + priced.seconds["pipeline"] == pytest.approx(found, rel=0.12)
