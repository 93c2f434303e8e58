"""Processes of the lowest priority, that end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from espalier.resilience.acme import background
from espalier.resilience.acme.background import Process


def about(pipe: Connection) -> None:
    me = psutil.Process()
    pipe.send((me.nice(), int(me.ionice().ioclass), os.getsid(0) == os.getpid()))
    pipe.recv()


def test_a_worker_takes_what_others_leave_in_a_session_of_its_own(priority, monkeypatch) -> None:
    monkeypatch.setattr(background, "step_back", priority[0])
    monkeypatch.setattr(background, "_lower_session", priority[1])
    process = Process(about)
    assert process.pipe.recv() == (19, int(psutil.IOPRIO_CLASS_IDLE), True)
    assert process.end() == -signal.SIGKILL
    assert process.end() == 0  # once more changes nothing


def test_a_stopped_worker_is_seen_and_can_still_be_ended() -> None:
    process = Process(about)
    process.pipe.recv()
    assert not process.stopped()
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not process.stopped() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.stopped()
    assert process.end() == -signal.SIGKILL


def test_no_worker_outlives_its_evaluator() -> None:
    code = """
import time
from espalier.resilience.acme.background import Process
process = Process(lambda pipe: time.sleep(600))
print(process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert psutil.pid_exists(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    if psutil.pid_exists(worker):  # nobody has taken its exit status yet
        assert psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def test_what_a_worker_raises_ends_it_and_closes_its_pipe(capfd) -> None:
    def broken(pipe: Connection) -> None:
        raise ValueError("of no use")

    process = Process(broken)
    with pytest.raises(EOFError):
        process.pipe.recv()
    assert process.end() == 1
    assert "of no use" in capfd.readouterr().err
