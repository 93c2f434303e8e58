"""Low priority: what training leaves, in a session of the process's own."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import psutil

from espalier.evaluate.low_priority import is_beside_training

CODE = """
import os, psutil
from espalier.evaluate import low_priority
low_priority.step_back(low_priority.STARTING)
print(psutil.Process().nice(), end=" ")
low_priority.step_back()
low_priority.step_back(low_priority.STARTING)
print(psutil.Process().nice(), int(psutil.Process().ionice().ioclass), open("/proc/self/autogroup").read().split()[-1])
"""


def test_a_process_that_stepped_back_takes_what_others_leave() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, start_new_session=True
    )
    first, second, disk, session = run.stdout.split()
    assert (first, second, int(disk)) == ("10", "19", int(psutil.IOPRIO_CLASS_IDLE))
    assert session == "19"


def test_an_evaluation_is_alone_unless_the_run_is_locked_or_may_go_on(tmp_path: Path) -> None:
    assert not is_beside_training(tmp_path / "none")
    assert is_beside_training(tmp_path / "none", waits=True)
    with (tmp_path / ".lock").open("w") as lock:
        assert not is_beside_training(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_beside_training(tmp_path)
    assert not is_beside_training(tmp_path)
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "end", "reason": "finished", "time": 0}) + "\n")
    assert not is_beside_training(tmp_path, waits=True)
