"""A run folder as tables."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.track.events import NAME
from espalier.track.run_tables import RunTables


def opened(*rows: dict[str, Any]) -> RunTables:
    """A run with these events, as it is read; its tables are read again when they are asked for."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / NAME).write_text("".join(json.dumps({"time": 1.0, **row}) + "\n" for row in rows))
        run = RunTables.read(folder)
        for table in ("steps", "validations"):
            run.table(table)
    return run


def test_columns_hold_what_the_steps_said(tmp_path: Path) -> None:
    run = RunTables.read(made.make(tmp_path, 40))
    assert run.steps["step"].tolist() == list(range(1, 41))
    assert run.steps["step"].dtype == np.int64
    assert run.steps["bytes.gradients"].tolist() == [7_649_280.0] * 40
    assert run.latest["step"] == 40
    assert run.recipe["train"]["steps"] == 2000
    assert run.plan["planner"] == "uniform"
    assert run.state == "finished"


@given(
    attempts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5),
    said=st.booleans(),
)
def test_each_step_counts_once_with_the_last_attempts_value(attempts: list[tuple[int, int]], said: bool) -> None:
    log: list[dict[str, Any]] = []
    truth: dict[int, int] = {}
    for number, (start, count) in enumerate(attempts):
        first = min(start, max(truth, default=0))
        log.append({"event": "run", **({"step": first} if said else {})})
        if said or count:
            truth = {step: value for step, value in truth.items() if step <= first}
        for step in range(first + 1, first + 1 + count):
            log.append({"event": "step", "step": step, "loss": float(number)})
            log.append({"event": "validation", "step": step, "loss": float(number)})
            truth[step] = number
    run = opened(*log)
    steps = run.steps
    assert (
        dict(zip(steps.get("step", np.empty(0)).tolist(), steps.get("loss", np.empty(0)).tolist(), strict=True))
        == truth
    )
    assert len(run.validations.get("step", ())) == len(truth)
    assert run.curves["loss"].total == sum(truth.values())
    assert run.latest.get("step") == max(truth, default=None)


def test_missing_and_strange_fields_keep_columns_equally_long() -> None:
    run = opened(
        {"event": "step", "step": 1, "loss": 1.0},
        {"event": "step", "step": 2, "loss": None, "loss_is": "nan", "bytes": {"a": 1}},
        {"event": "step", "step": 3, "loss": "what"},
        {"event": "step", "step": 3, "loss": 2.0, "new": "text", "odd": 1},
        {"event": "step", "step": 4, "odd": "text"},
    )
    assert {len(column) for column in run.steps.values()} == {4}
    assert np.isnan(run.steps["bytes.a"][0])
    assert np.isnan(run.steps["loss"][1])
    assert run.steps["new"].tolist() == [None, None, "text", None]
    assert run.steps["odd"].tolist() == [None, None, 1, "text"]


def test_state_tells_a_living_run_from_a_dead_one() -> None:
    start = {"event": "run", "step": 0, "host": {"name": socket.gethostname()}}
    step = {"event": "step", "step": 1, "loss": 1.0}
    assert opened({**start, "pid": os.getpid()}, step).state == "running"
    assert opened({**start, "pid": os.getpid()}).state == "waiting"
    assert opened({**start, "pid": 2**22 + 1}, step).state == "silent"
    assert opened(start, step).state == "silent"  # the last sign of life is from 1970
    assert opened(start, step, {"event": "end", "reason": "failed"}).state == "failed"
    assert opened(start, {"event": "end", "reason": "failed"}, {**start, "pid": os.getpid()}).state == "waiting"


def test_no_folder_and_no_run_are_the_users_errors(tmp_path: Path) -> None:
    (tmp_path / "language").mkdir()
    with pytest.raises(UserError, match=r"did you mean .*language"):
        RunTables.read(tmp_path / "langauge")
    with pytest.raises(UserError, match="not a run folder"):
        RunTables.read(tmp_path / "language")
    (tmp_path / "language" / "run.toml").write_text("= broken")
    with pytest.raises(UserError, match=r"run\.toml cannot be read"):
        RunTables.read(tmp_path / "language")


def test_an_unknown_table_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps"):
        RunTables.read(made.make(tmp_path, 1)).table("step")


def test_a_notebook_shows_it_escaped(tmp_path: Path) -> None:
    folder = made.make(tmp_path / "<b>x", 3)
    run = RunTables.read(folder)
    assert "&lt;b&gt;x" in run._repr_html_()
    assert "step 3" in repr(run)


def test_frame_gives_pandas_or_says_how(tmp_path: Path) -> None:
    run = RunTables.read(made.make(tmp_path, 3))
    if importlib.util.find_spec("pandas"):
        assert run.frame("steps")["step"].tolist() == [1, 2, 3]
    else:
        with pytest.raises(UserError, match="pip install pandas"):
            run.frame("steps")
