"""Startup: stages before the first step are shown with their seconds from the command on, where all clocks begin."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs import MACHINE, forked

from espalier.cli import train  # noqa: F401 - loaded once, before programs are forked
from espalier.language import workload_row as _language  # noqa: F401
from espalier.recipe.units import show_seconds
from espalier.track import events, startup
from espalier.track.run_tables import RunTables
from espalier.track.startup import Startup

RECIPE = """
[model]
depth = 1
width = 32
heads = 2
[data]
path = "corpus"
[train]
steps = 3
sequence = 32
batch_tokens = 64
validate_tokens = 64
[plan]
trial = false
cluster = "machine.toml"
pin.ranks = 2
"""


def test_a_stage_is_shown_from_a_fifth_of_a_second_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(startup.time, "time", lambda: now[0])
    clock = Startup(98.0, 98.0)
    for what, seconds in (("before the run", 1.0), ("reading", 4.0), ("planning", 0.1), ("starting", 60.0)):
        now[0] += seconds
        clock.ended(what)
        if clock.stages is None:
            clock.stages = []
    assert clock.stages == [("reading", 4.0, 7.0), ("starting", 60.0, pytest.approx(67.1))]
    assert capsys.readouterr() == ("", "   7.0 s  reading: 4.0 s\n1 min 07 s  starting: 1 min 00 s\n")


def test_the_moment_of_enter_is_when_the_process_began() -> None:
    assert startup.process_began() == pytest.approx(psutil.Process(os.getpid()).create_time(), abs=1.5)
    assert startup.process_began() == pytest.approx(startup.process_began(), abs=0.05)
    assert startup.process_began() < time.time()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that was begun, and then extended."""
    folder = tmp_path_factory.mktemp("startup")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "machine.toml").write_text(MACHINE)
    (folder / "corpus").mkdir()
    for number in range(9):
        (folder / "corpus" / f"{number}.txt").write_text(f"{number} and {number} are {2 * number}\n" * 80)
    return folder


def started(folder: Path, *words: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "SHOWN", 0.0)
        done = forked(folder, "train", "recipe.toml", "--run", "run", *words)
    assert done.returncode == 0, done.stderr
    return done


def test_terminal_log_and_page_have_one_clock(folder: Path) -> None:
    begun = time.time()
    done = started(folder)
    log = list(events.read(folder / "run" / "events.jsonl"))
    (run,), (end,) = ([event for event in log if event["event"] == name] for name in ("run", "end"))
    assert begun <= run["entered"] <= begun + 2
    names, seconds, ends = zip(*run["stages"], strict=True)
    assert (names[0], names[-1]) == ("Loading PyTorch", "Starting the ranks")
    assert {"Reading the corpus", "Planning"} <= set(names)
    assert list(ends) == sorted(ends)
    assert sum(seconds) == pytest.approx(ends[-1]), "nothing lies between stages"
    assert ends[-1] == pytest.approx(run["time"] - run["entered"], abs=0.5)
    lines = [f"{show_seconds(end):>8}  {name}: {show_seconds(took)}" for name, took, end in run["stages"]]
    shown = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    assert [line for line in shown if line in lines] == lines
    assert end["seconds"] == pytest.approx(end["time"] - run["entered"], abs=0.1)
    shown = show_seconds(RunTables.read(folder / "run").seconds())
    page = (folder / "run" / "report.html").read_text()
    assert f"Done in {shown}:" in done.stdout
    assert f"<dt>time</dt><dd>{shown}</dd>" in page
    assert all(f"<td>{name}</td>" in page for name in names)
    (last,) = re.findall(r"finished at step 3 of 3 .* · ([0-9.]+) (m?)s\n", done.stdout)
    assert run["time"] - run["entered"] - 0.1 <= float(last[0]) / (1000 if last[1] else 1) <= end["seconds"] + 0.1


def test_a_run_that_goes_on_counts_both_commands(folder: Path) -> None:
    if not (folder / "run").exists():
        started(folder)
    before = RunTables.read(folder / "run").seconds()
    time.sleep(0.3)
    done = started(folder, "train.steps=5")
    run = RunTables.read(folder / "run")
    (second,) = re.findall(r"Done in ([^:]*):", done.stdout)
    assert show_seconds(run.seconds() - before) == second
    assert run.attempts == 2
    assert run.start["stages"][0][0] == "Loading PyTorch"
