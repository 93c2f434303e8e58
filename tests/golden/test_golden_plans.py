"""The planner answers as it did: a change of answers is a commit of its own, which says why each has changed."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import golden_plans
from questions import questions

PARTS = 144
"""Of the questions, by a hash of their names: the normal suite asks the first part."""
SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS)]


def part_of(name: str) -> int:
    """The part that a question belongs to, whatever other questions there are."""
    return zlib.crc32(name.encode()) % PARTS


def test_every_question_has_its_answer() -> None:
    answers = golden_plans.stored()
    assert sorted(questions()) == sorted(answers), golden_plans.AGAIN
    assert not [name for name, answer in answers.items() if "crash" in answer]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [0, *SLOW])
def test_the_planner_answers_as_it_did(part: int) -> None:
    fresh = golden_plans.answers([name for name in questions() if part_of(name) == part])
    changed = golden_plans.first_differences(golden_plans.stored(), fresh)
    assert not changed, "\n".join([f"{len(changed)} of {len(fresh)} answers differ.", golden_plans.AGAIN, *changed])


def test_a_difference_is_named_by_its_path() -> None:
    old = {"code": 0, "out": {"layout": {"dp": 2, "tp": 1}, "why": ["a", "b"]}}
    new = {"code": 0, "out": {"layout": {"dp": 4, "tp": 1}, "why": ["a", "c"]}}
    assert golden_plans.first_differences({"q": old}, {"q": new}) == ["q\n  out.layout.dp: 2 -> 4"]
    assert list(golden_plans.differences(old, new)) == ["out.layout.dp: 2 -> 4", 'out.why[1]: "b" -> "c"']


def test_another_order_of_keys_is_a_difference() -> None:
    old, new = {"code": 0, "out": {"a": 1, "b": 2}}, {"code": 0, "out": {"b": 2, "a": 1}}
    assert golden_plans.first_differences({"q": old}, {"q": new}) == ["q\n  out: keys in another order: a, b -> b, a"]
    assert golden_plans.first_differences({"q": old}, {"q": dict(old)}) == []
