"""The bench of LuWu in its smallest form: forms of stages do the same, the node is fed, and rows are of what ran."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def luwu(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    import luwu

    return luwu


def test_all_forms_of_stages_move_a_state_to_the_same_bits(luwu, tmp_path):
    from luwu_stages import Stages

    found = []
    for number in range(3):
        made = Stages(tmp_path / f"{number}", 5, 1000)
        made.limit = 4e6 * number
        for _ in range(2):
            made.take((made.step_centric, made.teams_of_one, made.one_team)[number])
        room = made.rooms[0]
        made.read(4, room)
        found.append(room.clone())
        made.state.close()
    assert found[0].any()
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


@pytest.mark.slow
def test_rows_of_the_stages_say_what_was_limited(luwu, tmp_path):
    rows = luwu.stages(1024, 1, tmp_path)
    assert [row.peer for row in rows] == 2 * ["layer-centric, teams of one", "layer-centric, one team"]
    assert sum("at most" in row.case for row in rows) == 2


def test_a_node_is_fed_over_loopback(luwu, tmp_path):
    job = luwu.job_of(3, 4096)
    assert all(rate > 0 for rate in luwu.loopback_rate(job, tmp_path, 1))
    assert set(luwu.parts(job, tmp_path)) == {"disk", "adam", "link"}


def test_a_step_is_predicted_from_the_links_where_nothing_else_takes_time(luwu):
    turn = luwu.Turn(expected_sent=4e6, numel=(500_000, 500_000), uses=((0,), (1,)))
    computing, seconds = luwu.predicted(turn, 0.0, 8e6 / luwu.SHARE, {"disk": 1e12, "adam": 1e12})
    assert computing == 0.0
    assert seconds == pytest.approx(4.0 + 4.0, rel=1e-3)  # all numbers down at 1 MB/s, and then up


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the link lab needs root")
def test_two_runs_of_one_seed_leave_the_same_bits(luwu, tmp_path):
    torch.set_num_threads(1)
    rows = luwu.tiny(luwu.Task("", 1, 32, 16, str(tmp_path), 4), 200e6, 1)
    assert rows[0].ratio == 1.0
    assert {row.peer for row in rows[1:]} == {luwu.NAMES["fsdp2 direct"], luwu.NAMES["zero1"]}
