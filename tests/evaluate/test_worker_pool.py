"""Workers that die, stop, raise or dawdle: each record counts once, and the figures are the same to the last bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from made_tasks import CPU, Made, always, die, evaluated, fail, once, shared, slow, stop, workers

from espalier.evaluate.worker_pool import Result, Workers, evaluate
from espalier.recipe.errors import RunFailed


def made(folder: Path, **acts) -> list[Made]:
    seen = folder / "seen"
    return [Made("big", 40, seen, **acts), Made("small", 3, seen), Made("other", 2, seen)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return figures(evaluated(folder, made(folder), count=1))


def figures(results):
    return {name: result.figures for name, result in results.items()}


def test_figures_do_not_depend_on_how_many_workers_there_are(tmp_path: Path, plain) -> None:
    tasks = made(tmp_path, act=slow(0.01))
    found = evaluated(tmp_path, tasks, count=3)
    assert figures(found) == plain
    assert {name: result.records for name, result in found.items()} == {"big": 40, "small": 3, "other": 2}
    assert len({pid for _, pid in tasks[0].lines()}) > 1
    assert plain["big"]["odd"] == 0.5


@pytest.mark.parametrize("act", [die, stop])
def test_a_worker_that_dies_or_stops_is_replaced_and_its_part_done_again(tmp_path: Path, plain, act) -> None:
    tasks = made(tmp_path, act=once(tmp_path / "done", 17, act))
    assert figures(evaluated(tmp_path, tasks, silent=1.0)) == plain
    begun = [pid for record, pid in tasks[0].lines() if record == 17]
    assert len(begun) == len(set(begun)) == 2


def test_a_task_that_raises_or_kills_is_given_up_and_the_others_are_done(tmp_path: Path, plain) -> None:
    seen = tmp_path / "seen"
    tasks = [*made(tmp_path), Made("broken", 9, seen, always(2, fail)), Made("deadly", 4, seen, always(1, die))]
    found = evaluated(tmp_path, tasks)
    assert found["broken"].why == "Own: no such prompt"
    assert "ended 3 workers" in found["deadly"].why
    assert {name: found[name].figures for name in plain} == plain


def test_a_worker_that_dies_while_idle_is_replaced(tmp_path: Path, plain) -> None:
    tasks = made(tmp_path)
    with shared(tmp_path) as source, workers(tasks) as pool:
        for _ in range(2):
            found = {one.task: one.figures for one in evaluate(pool, source, tasks, {}) if isinstance(one, Result)}
            assert found == plain
            for pid in {pid for task in tasks for _, pid in task.lines() if psutil.pid_exists(pid)}:
                os.kill(pid, signal.SIGKILL)


def test_ctrl_c_is_not_for_the_workers(tmp_path: Path, plain) -> None:
    tasks = made(tmp_path, act=once(tmp_path / "interrupted", 5, interrupt))
    assert figures(evaluated(tmp_path, tasks)) == plain
    assert len([record for record, _ in tasks[0].lines() if record == 5]) == 1


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_worker_that_cannot_open_its_data_is_an_error() -> None:
    with pytest.raises(RunFailed, match="while it opened its data"):
        Workers(die, 2, CPU)  # type: ignore[arg-type]


PARENT = """
import sys, time
from made_tasks import Made, opened, workers
from pathlib import Path
if __name__ == "__main__":
    with workers([Made("task", 1)], count=2) as pool:
        print(*(worker._process.pid for worker in pool._workers), flush=True)
        time.sleep(600)
"""


@pytest.mark.slow
def test_no_worker_outlives_a_killed_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(lives(pid) for pid in pids)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SCRIPT = """
from made_tasks import Made, workers
with workers([Made("task", 1)], count=2) as pool:
    print(len(pool), flush=True)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_starts_its_workers_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
