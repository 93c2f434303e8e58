"""The trace holds the steps that were asked for, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from espalier.recipe.errors import UserError
from espalier.track.trace import StepProfiler


def names(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if "step " in event.get("name", "")}


@pytest.mark.parametrize(
    ("first", "last", "wanted"),
    [(0, 4, {"step 3", "step 4"}), (0, 99, {"step 3", "step 4", "step 5"}), (3, 4, {"step 4"}), (4, 4, set())],
)
def test_the_steps_asked_for_are_traced(tmp_path: Path, first: int, last: int, wanted: set[str]) -> None:
    path = tmp_path / "trace.json"
    with StepProfiler(3, last, path, first_step=first) as profile:
        for _ in range(first, 5):
            assert path.exists() == (profile.done >= last > first)
            torch.ones(4, 4) @ torch.ones(4, 4)
            profile.step()
    assert (wanted <= names(path) <= {*wanted, "step 6"}) if wanted else not path.exists()


def test_an_empty_range_and_an_unwritable_place_are_the_users_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"track\.profile"):
        StepProfiler(4, 3, tmp_path)
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="Cannot write"),
        StepProfiler(1, 1, tmp_path / "file" / "trace.json") as profile,
    ):
        profile.step()
