"""The trace holds the steps that were asked for, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from espalier.errors import UserError
from espalier.track.trace import Profile


def names(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if "step " in event.get("name", "")}


@pytest.mark.parametrize(("last", "wanted"), [(4, {"step 3", "step 4"}), (99, {"step 3", "step 4", "step 5"})])
def test_the_steps_asked_for_are_traced(tmp_path: Path, last: int, wanted: set[str]) -> None:
    profile = Profile(3, last, tmp_path / "trace.json")
    for step in range(1, 6):
        with profile.step(step):
            torch.ones(4, 4) @ torch.ones(4, 4)
    profile.close()
    assert names(tmp_path / "trace.json") == wanted


def test_nothing_is_written_when_no_step_was_reached(tmp_path: Path) -> None:
    profile = Profile(3, 4, tmp_path / "trace.json")
    with profile.step(1):
        pass
    profile.close()
    assert not list(tmp_path.iterdir())


def test_an_empty_range_and_an_unwritable_place_are_the_users_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"track\.profile"):
        Profile(4, 3, tmp_path)
    (tmp_path / "file").write_text("")
    profile = Profile(1, 1, tmp_path / "file" / "trace.json")
    with pytest.raises(UserError, match="Cannot write"), profile.step(1):
        pass
