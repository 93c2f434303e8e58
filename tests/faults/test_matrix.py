"""The fault matrix: whatever strikes a run, its weights and figures are those of the undisturbed run, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import MOMENTS, ROWS, SIGNALS, SUBJECTS, UNEQUAL, Row
from runner import Ended, check, leaving_nothing, ran

from espalier.plan import base as plans

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Ended, int]]:
    """Of a subject: what its run ends with, and its ranks."""
    known: dict[str, tuple[Ended, int]] = {}

    def run(subject: str) -> tuple[Ended, int]:
        if subject not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[subject] = ran(SUBJECTS[subject], folder), len(plans.read(folder / "run" / "plan.json").trainer_ranks)
        return known[subject]

    return run


def case(row: Row) -> Any:
    return pytest.param(row, marks=[] if row.chosen else [pytest.mark.slow], id=row.name)


@pytest.mark.timeout(900)  # several commands, one after the other
@pytest.mark.parametrize("row", [case(row) for row in ROWS])
def test_a_struck_run_ends_as_the_undisturbed_one(
    tmp_path: Path, undisturbed: Callable[[str], tuple[Ended, int]], row: Row
) -> None:
    whole, ranks = undisturbed(row.subject)
    with leaving_nothing(tmp_path):
        ended = ran(SUBJECTS[row.subject], tmp_path, row.strikes(ranks))
    check(row, ended, whole)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_rows_hold_every_subject_moment_and_signal(ranks: int) -> None:
    """Those of one shift every pair of them; a stop for ever of the command, which nobody sees, is a pause."""
    struck = {
        (row.subject, strike.moment, strike.signal.name, row.shift) for row in ROWS for strike in row.strikes(ranks)
    }
    names = {signal.name for signal in SIGNALS}
    for subject, what in SUBJECTS.items():
        moments = [moment for moment in MOMENTS if moment not in what.without]
        triples = {(*pair, name) for pair, name in itertools.product(((subject, each) for each in moments), names)}
        triples.discard((subject, "exporting", "stop"))
        assert {found[:3] for found in struck if found[0] == subject} == triples
        assert {found[2] for found in struck if found[0] == subject and found[3] == 0} == names


def test_a_twentieth_of_a_covering_array_is_in_the_normal_suite() -> None:
    """About a twentieth of the rows of shift 0."""
    chosen = [row for row in ROWS if row.chosen]
    assert len(SUBJECTS) / 40 < len(chosen) < len(SUBJECTS) / 12


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_cannot_be_equal_is_said_in_the_same_words_on_every_page(name: str) -> None:
    for page in ("docs/faults.md", *UNEQUAL[name].pages):
        assert UNEQUAL[name].reason in " ".join((ROOT / page).read_text().split()), page
