import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from espalier.launch.ranks import agent
from espalier.recipe.errors import Interrupted, PeerLost, RunFailed, UserError
from espalier.train import rank_spec as base


def places(count, tmp_path):
    return [base.RankSpec(rank=i, world=count, local_rank=i, log=tmp_path / f"rank-{i}.log") for i in range(count)]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_in_rank_order(tmp_path):
    assert agent.run(lambda place: (place.rank, "x" * 300_000), places(3, tmp_path)) == [
        (rank, "x" * 300_000) for rank in range(3)
    ]


def test_ranks_meet_at_the_store(tmp_path):
    def task(place):
        store = base.store(place, 10.0)
        store.set(f"hello{place.rank}", str(place.rank))
        found = sorted(store.get(f"hello{rank}").decode() for rank in range(place.world))
        store.set(f"bye{place.rank}", "")
        if place.rank == 0:  # the store lives as long as the first rank
            store.wait([f"bye{rank}" for rank in range(place.world)])
        return found

    assert agent.run(task, places(3, tmp_path)) == [["0", "1", "2"]] * 3


def test_a_killed_rank_ends_the_run_at_once_and_is_named(tmp_path):
    def task(place):
        (tmp_path / f"pid{place.rank}").write_text(str(os.getpid()))
        if place.rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    begun = time.monotonic()
    with pytest.raises(RunFailed, match=r"Rank 1 was killed \(SIGKILL\)"):
        agent.run(task, places(3, tmp_path))
    assert time.monotonic() - begun < 50, "the others would take 60"
    assert not any(alive(int((tmp_path / f"pid{rank}").read_text())) for rank in range(3))


@pytest.mark.slow
def test_a_ranks_own_error_is_shown_before_a_lost_peer(tmp_path):
    def task(place):
        if place.rank == 0:
            raise PeerLost("rank 0 waits for rank 1")
        time.sleep(0.3)
        raise UserError("the real cause")

    with pytest.raises(UserError, match="the real cause"):
        agent.run(task, places(2, tmp_path))


def test_an_exception_names_rank_type_place_and_log(tmp_path):
    def task(place):
        raise ValueError("no such thing")

    with pytest.raises(RunFailed, match="Rank 0 failed: ValueError: no such thing") as caught:
        agent.run(task, places(1, tmp_path))
    assert "test_agent.py" in caught.value.why
    assert "Traceback" in (tmp_path / "rank-0.log").read_text()


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from espalier.recipe.errors import Interrupted, EspalierError
from espalier.launch.ranks import agent
from espalier.train import rank_spec as base
folder = Path(sys.argv[1])
def task(place):
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append(1))
    (folder / f"pid{place.rank}").write_text(str(os.getpid()))
    while not stop:
        time.sleep(0.01)
    if sys.argv[2] == "obeys":
        raise Interrupted("saved")
    time.sleep(60)
try:
    agent.run(task, [base.RankSpec(rank=i, world=2) for i in range(2)])
except EspalierError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def started(tmp_path, kind):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen([sys.executable, program, tmp_path, kind], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        if all(file.exists() and file.read_text() for file in files):
            return process, [int(file.read_text()) for file in files]
        time.sleep(0.02)
    raise AssertionError("the program did not start")


def test_the_first_interrupt_lets_the_ranks_save(tmp_path):
    process, pids = started(tmp_path, "obeys")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == Interrupted.exit_code == 130
    assert b"saved" in out
    assert not any(alive(pid) for pid in pids)


def test_the_second_interrupt_ends_ranks_that_do_not_obey(tmp_path):
    process, pids = started(tmp_path, "stays")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not any(alive(pid) for pid in pids)


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    process, pids = started(tmp_path, "stays")
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)
