"""The cost of a pipeline is that of its timetable, and its bytes are those of its action lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.stages.action_list import Kind, Pipeline, in_flight, timetable
from espalier.stages.cost import PipelineLoad, cost, kept
from espalier.stages.schedules import action_lists


@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 4), st.booleans())
def test_idle_time_and_bytes_are_those_of_the_lists(ranks, chunks, times, split) -> None:
    chunks = 1 if split else chunks
    count, schedule = ranks * times, "zero_bubble" if split else "1f1b"
    pipeline = Pipeline(tuple((stage % ranks,) for stage in range(ranks * chunks)), count)
    lists = action_lists([pipeline], schedule)
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
    found = timetable(pipeline, lists, lambda one: seconds.get(one.kind, 0.0) / chunks)
    load = PipelineLoad(ranks, count, chunks, 3.0, 1.0, message_bytes=7, split=split)
    priced = cost(load)
    assert max(one.end for one in found) == pytest.approx(3 * count + priced.seconds["pipeline"])
    sends = [sum(one.kind in (Kind.SEND_F, Kind.SEND_B) for one in actions) for actions in lists.values()]
    assert priced.sent["activations"] == 7 * max(sends)
    if not split:
        assert in_flight(lists[0]) == pytest.approx(float(kept(ranks, chunks)) * chunks)


def test_many_layouts_are_priced_in_one_call() -> None:
    ranks, chunks = np.array([1, 2, 4, 4]), np.array([1, 1, 1, 2])
    found = cost(PipelineLoad(ranks, 8, chunks, np.array([4.0, 2.0, 1.0, 1.0]), message=0.5, message_bytes=10))
    assert found.seconds["pipeline"].tolist() == [0.0, 2.0, 3.0, 1.5]
    assert found.seconds["send"].tolist() == [0.0, 0.5 * 11, 0.5 * 15, 0.5 * 30]
    assert found.sent["activations"].tolist() == [0, 80, 160, 320]
