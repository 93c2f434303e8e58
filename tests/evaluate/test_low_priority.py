"""Low priority: what training leaves, in a session of the process's own."""

from __future__ import annotations

import subprocess
import sys

import psutil

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
