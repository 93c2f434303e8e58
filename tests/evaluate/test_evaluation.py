"""Splitting: every record in one part, none too long, the longest first; what is measured decides."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tasks import Made

from espalier.evaluate.tasks import means
from espalier.evaluate.worker_pool import PARTS, split

TASKS = st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 2.0)), min_size=1, max_size=12)


@given(TASKS, st.integers(1, 8))
def test_parts_hold_every_record_once_and_come_longest_first(sizes, workers: int) -> None:
    tasks = [Made(str(at), records) for at, (records, _) in enumerate(sizes)]
    seconds = {str(at): each for at, (_, each) in enumerate(sizes)}
    parts = split(tasks, seconds, workers)
    held = sorted((part.task, record) for part in parts for record in range(part.start, part.stop))
    assert held == sorted((task.name, record) for task in tasks for record in range(task.records))
    lengths = [(part.stop - part.start) * seconds[part.task] for part in parts]
    assert all(before >= after for before, after in pairwise(lengths))
    longest = sum(records * each for records, each in sizes) / (PARTS * workers)
    assert all(
        length <= (longest + seconds[part.task]) * (1 + 1e-9) for part, length in zip(parts, lengths, strict=True)
    )


def test_a_task_nobody_has_measured_is_taken_to_be_like_the_others() -> None:
    tasks = [Made("slow", 8), Made("new", 16)]
    assert split(tasks, {"slow": 3.0}, 1) == split(tasks, {"slow": 3.0, "new": 3.0}, 1)
    assert split(tasks, {}, 1) == split(tasks, {"slow": 0.1, "new": 0.1}, 1)


def test_sums_are_joined_exactly_and_what_has_no_weight_is_left_out() -> None:
    sums = [{"a": (1e16, 1.0)}, {"a": (1.0, 1.0), "b": (0.0, 0.0)}, {"a": (-1e16, 1.0)}]
    assert means(sums) == {"a": 1 / 3}


def test_the_longest_by_what_was_measured_goes_first() -> None:
    tasks = [Made("many", 100), Made("few", 4)]
    assert split(tasks, {"many": 0.01, "few": 5.0}, 1)[0].task == "few"
    assert split(tasks, {"many": 1.0, "few": 1.0}, 1)[0].task == "many"
    assert pytest.approx(4) == len([part for part in split(tasks, {"many": 0.01, "few": 5.0}, 2) if part.task == "few"])
