"""The run log: what was written is read back, whatever happened to the process or the disk."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.track.events import Log, append, last, read

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.dictionaries(st.text().filter(lambda key: not key.endswith("_is")), inner, max_size=3),
    max_leaves=8,
)


def same(left: object, right: object) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return left == right


@given(value=VALUES)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with Log(path) as log:
        log.write("other", value=value)
    (event,) = read(path)
    assert event["event"] == "other"
    assert same(event["value"], value)
    json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def test_numbers_of_numpy_and_paths_are_plain(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        log.write("step", loss=np.float32(1.5), step=np.int64(3), shape=np.arange(2), path=tmp_path, not_one=np.nan)
    (event,) = read(tmp_path / "log")
    assert (event["loss"], event["step"], event["shape"], event["path"]) == (1.5, 3, [0, 1], str(tmp_path))
    assert math.isnan(event["not_one"])


@given(cut=st.integers(1, 200))
def test_a_torn_last_line_is_left_out_and_cut_off_on_reopening(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with Log(path) as log:
        log.write("run", text="x" * 50)
        whole = path.stat().st_size
        log.write("step", step=1, text="y" * 200)
    os.truncate(path, min(whole + cut, path.stat().st_size - 2))
    assert [event["event"] for event in read(path)] == ["run"]
    with Log(path) as log:
        log.write("step", step=2)
    assert [event.get("step") for event in read(path)] == [None, 2]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"event":"run","time":1}')
    with Log(path) as log:
        log.write("step", step=1)
    assert [event["event"] for event in read(path)] == ["run", "step"]


@pytest.mark.parametrize("size", [10, 200_000])
def test_the_last_event_of_a_name_is_read_from_the_end(tmp_path: Path, size: int) -> None:
    assert last(tmp_path / "log", "step") is None
    with Log(tmp_path / "log") as log:
        log.write("run", step=0, text="x" * size)
        for step in (1, 2):
            log.write("step", step=step, loss=math.nan)
        log.write("other", text="x" * size)
    with (tmp_path / "log").open("a") as file:
        file.write('{"event":"step","step":3')
    step, run = last(tmp_path / "log", "step", "run"), last(tmp_path / "log", "run")
    assert step is not None and run is not None  # noqa: PT018
    assert (step["step"], run["step"]) == (2, 0)
    assert math.isnan(step["loss"])
    assert last(tmp_path / "log", "end") is None


def test_a_line_that_is_not_an_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"event":"run"}\n\0\0garbage\n{"event":"end"}\n')
    events = list(read(path))
    assert [event["event"] for event in events] == ["run", "end", "incident"]
    assert "line 2" in events[2]["what"]


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (
        "import sys; from espalier.track.events import Log\n"
        "log = Log(sys.argv[1])\n"
        "while True: log.write('step', step=1, text='z' * 5000)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)]) as child:
        while not path.exists() or path.stat().st_size < 100_000:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    events = list(read(path))
    assert len(events) > 10
    assert {event["event"] for event in events} == {"step"}


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        threads = [
            threading.Thread(target=lambda: [log.write("step", step=1, text="t" * 3000) for _ in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [event["event"] for event in read(tmp_path / "log")] == ["step"] * 200


def test_a_full_disk_and_an_unwritable_place_are_the_users_errors(tmp_path: Path) -> None:
    with Log("/dev/full") as log, pytest.raises(UserError, match="disk is full"):
        log.write("step", step=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        Log(tmp_path / "file" / "log")
    with pytest.raises(UserError, match="missing cannot be read"):
        list(read(tmp_path / "missing"))


def test_the_log_and_its_views_need_no_torch() -> None:
    names = ", ".join(
        f"espalier.track.{name}" for name in ("events", "progress", "run_tables", "report", "live_report")
    )
    program = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_another_process_may_append_while_a_line_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Log(path) as log:
        log.write("run", step=0)
        append(path, "eval", step=1, task="a", metric="b", value=float("nan"))
        log.write("step", step=1)
        with path.open("a") as file:
            file.write('{"event":"step","st')  # on its way: nothing of it is cut off
        append(path, "eval", step=2, task="a", metric="b", value=0.5)
    found = list(read(path))
    assert [event["event"] for event in found] == ["run", "eval", "step", "eval", "incident"]
    assert math.isnan(found[1]["value"])
    assert path.read_text().endswith("}\n")


def test_appending_makes_no_log_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot write"):
        append(tmp_path / "events.jsonl", "eval")
    assert not (tmp_path / "events.jsonl").exists()


def test_the_last_event_is_one_whose_fields_fit(tmp_path: Path) -> None:
    lines = ['{"event": "step", "step": 3}', '{"event": "step", "step": "x"}', '{"event": "end", "steps": [1]}']
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    assert last(tmp_path / "log", "step") == {"event": "step", "step": 3}
    assert last(tmp_path / "log", "end") is None
