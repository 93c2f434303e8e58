"""What a started process does first: it goes to its folder, or says that there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from espalier.cli import host_worker
from espalier.recipe.errors import Interrupted, UserError
from espalier.train.rank_spec import RankSpec


def test_a_host_that_lacks_the_launchers_folder_says_so(tmp_path) -> None:
    asked = {"folder": str(tmp_path / "none")}
    with pytest.raises(UserError, match="corpus") as caught, host_worker._naming_the_folder(asked):
        raise UserError("There is nothing at corpus.", why="it is not there")
    assert f"no folder {tmp_path}/none" in caught.value.why
    with pytest.raises(UserError) as caught, host_worker._naming_the_folder({"folder": str(tmp_path)}):
        raise UserError("There is nothing at corpus.", why="it is not there")
    assert caught.value.why == "it is not there"


def test_the_first_host_needs_the_folder_unless_the_run_has_a_place_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    away = {"folder": str(tmp_path / "none"), "absolute": False}
    with pytest.raises(UserError, match="no folder"):
        host_worker._enter(RankSpec(), away)
    host_worker._enter(RankSpec(), {**away, "absolute": True})
    host_worker._enter(RankSpec(rank=1), away)


IGNORING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "espalier.cli.host_worker"])
"""


def test_a_worker_that_was_started_with_ctrl_c_ignored_stops_when_it_is_asked_to() -> None:
    """As under `nohup espalier train … --hosts … &` in a script."""
    with subprocess.Popen(
        [sys.executable, "-c", IGNORING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.readline()  # its hello
        worker.stdin.write('{"is": "stop"}\n')
        worker.stdin.flush()
        try:
            assert worker.wait(60) == Interrupted.exit_code
        finally:
            worker.kill()
