"""Ctrl-C at any moment: one line or none, exit code 130, never a traceback; also in the middle of an import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest

RECIPE = """name = "small"
[model]
width = 32
depth = 1
heads = 2
context = 32
[data]
path = "corpus"
[train]
steps = 100000
sequence = 32
batch_tokens = 256
"""
PLANNED = "plan.cluster=machine.toml plan.trial=false"
# What Python does before it reads the first line of ours is not ours: delays, and counts of imports, begin with it.
START = """import os, runpy, sys
own, wanted, imports = os.getpid(), int(sys.argv.pop(1)), None

def hear(event, arguments):
    global imports
    if event == "exec" and arguments[0].co_filename.endswith("espalier/__main__.py"):
        imports = 0
        os.write(1, b".")
    elif event == "import" and imports is not None and os.getpid() == own:
        imports += 1
        if imports == wanted:
            os.kill(own, 2)

sys.addaudithook(hear)
runpy.run_module("espalier", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"hello {number} world\n" * 400)
    return tmp_path


def interrupted(home: Path, verb: str, delay: float, imports: int) -> tuple[int, str]:
    """The exit code, and what stood on standard error, of a verb that gets Ctrl-C at so many imports after its first
    line; 0: after `delay` seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(imports), verb, *([] if verb == "probe" else ["recipe.toml"])],
        cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1) == "."
    if not imports:
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    return process.returncode, errors


def check(home: Path, verb: str, delay: float = 0.0, imports: int = 0) -> None:
    code, errors = interrupted(home, verb, delay, imports)
    assert ("Traceback" in errors, "Exception" in errors) == (False, False), (delay, errors)
    assert errors.count("interrupted") <= 1
    done = verb != "train" and "interrupted" not in errors  # it was over before, or had only to leave
    assert code in ((0, 130) if done else (130,)), (delay, errors)


@pytest.mark.slow
@pytest.mark.parametrize("imports", [1, 1000, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 20, 200))])
def test_ctrl_c_right_after_the_start_is_no_traceback(home: Path, imports: int) -> None:
    check(home, "train", imports=imports)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("verb", ["train", "plan", "probe"])
def test_ctrl_c_at_any_moment_of_the_start_is_no_traceback(home: Path, verb: str, part: int) -> None:
    """Forty moments of eight seconds; every eighth in one case, as all of them wait for minutes."""
    for step in range(part, 40, 8):
        check(home, verb, 0.02 + 0.2 * step)


def test_an_ignored_ctrl_c_stays_ignored(home: Path) -> None:
    """As under `nohup espalier … &` in a script, where the shell ignores it for what it starts behind."""
    code = "import signal, sys; import espalier.__main__; sys.exit(signal.getsignal(2) is not signal.SIG_IGN)"
    done = subprocess.run(["sh", "-c", f"trap '' INT; exec {sys.executable} -c '{code}'"], check=False, timeout=60)
    assert done.returncode == 0


@pytest.mark.slow
def test_a_run_under_an_ignored_ctrl_c_goes_on_and_ends_at_sigterm(home: Path) -> None:
    (home / "machine.toml").write_text(programs.MACHINE)
    with subprocess.Popen(
        ["sh", "-c", f"trap '' INT; exec {sys.executable} -m espalier train recipe.toml {PLANNED}"],
        cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        log = home / "runs" / "small" / "events.jsonl"
        reach(log, 3)
        os.killpg(process.pid, signal.SIGINT)
        reach(log, steps(log) + 10)
        process.terminate()
        _, errors = process.communicate(timeout=90)
    assert process.returncode == 130, errors
    assert "Stopped after step" in errors


def steps(log: Path) -> int:
    return log.read_text().count('"event":"step"') if log.exists() else 0


def reach(log: Path, wanted: int) -> None:
    deadline = time.monotonic() + 90
    while steps(log) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ctrl_c_while_python_ends_does_not_undo_what_was_done(home: Path) -> None:
    """The handlers of Python are gone then, and the exit code is the verb's."""
    code = """import os, sys, espalier.__main__
class Late:
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, 2)
sys.late = Late()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 0
