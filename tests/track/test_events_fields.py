"""No field of a run log, whatever it holds, ends a view of the run: the line is left out and counted, or shown."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import PLAN, RECIPE

from espalier.evaluate.eval_history import EvalHistory
from espalier.track import events, report, run_comparison
from espalier.track.events import misfit
from espalier.track.run_tables import RunTables

NODE = {"pulled": 5, "pushed": 6, "stalled": 0.1, "read": 7, "written": 8}
MOVED = {"disk": {"read": 10, "written": 20, "stalled": 0.5}}
STEP = {
    "event": "step", "loss": 2.5, "tokens": 64, "seconds": 0.5, "mfu": 0.2, "learning_rate": 0.01,
    "gradient_norm": 1.5, "memory": 1e6, "page_cache": 2e6, "tasks": {"a": 1.5}, "loss_scale": 8.0, "skipped": 1,
    "bytes": {"gradients": 100, "halo": 5}, "exposed": 0.1, "waited": 0.1, "saved": {"halo": 5},
    "coding": {"halo": 0.1}, "lost": {"halo": 0.1}, "offload": MOVED, "activations": MOVED, "frozen": MOVED,
    "node": NODE,
    "store": {"disk_cache": 5, "packed": 6}, "experts": {"0": 5, "1": 7}, "dispatch": {"waited": 0.1, "longest": 0.2},
}  # fmt: skip
RUN = {
    "event": "run", "time": 100.0, "step": 0, "steps": 5, "name": "a", "workload": "language", "parameters": 500,
    "run": {"id": "a", "name": "a", "host": "b", "begun": 1.5, "meaning": "c"}, "ranks": 2, "threads": 1,
    "versions": {"torch": "2"}, "host": {"name": "b", "cpu": "c"}, "pid": 77, "notes": ["a note"],
    "derivations": [{"key": "a.b", "value": 3, "why": "so"}], "source": "disk", "until": 3,
}  # fmt: skip
FAILED = {"event": "incident", "kind": "rank", "what": "ended", "rank": 1, "step": 2, "action": "resumed", "attempt": 2,
          "why": "a", "category": "b", "reason": "c", "calls_for": "d", "suspect": "h", "root": "e"}  # fmt: skip
LOG: list[dict[str, Any]] = [
    RUN,
    {"event": "plan", "predicted": PLAN["predicted"]},
    *({"time": 101.0 + step, "step": step, **STEP} for step in (1, 2)),
    {"event": "phase", "name": "a", "step": 2, "steps": 4, "parameters": 500},
    {"event": "validation", "time": 103.5, "step": 2, "seconds": 0.1, "loss": 2.4, "bits_per_byte": 3.4, "other": 1.5,
     "test_other": 1.4},
    {"event": "checkpoint", "time": 103.6, "step": 2, "seconds": 0.2, "blocked": 0.1, "bytes": 500, "path": "p",
     "rate": 5e6},
    {"time": 103.7, **FAILED},
    {"event": "run", **RUN, "time": 104.0, "step": 2},
    {"event": "recovered", "time": 104.5, "kind": "rank", "category": "b", "reason": "c", "rank": 1, "step": 2,
     "attempt": 2, "seconds": 0.7, "lost_steps": 1, "source": "disk"},
    {"time": 105.0, "step": 3, **STEP},
    {"event": "rule", "time": 105.1, "step": 3, "name": "every", "value": 4, "why": "so"},
    {"event": "sample", "time": 105.2, "step": 3, "kind": "text", "text": "a text"},
    {"event": "sample", "time": 105.2, "step": 3, "kind": "table", "text": "", "rows": [["a", "b"], [1, 2.5]]},
    {"event": "sample", "time": 105.2, "step": 3, "kind": "curve", "text": "", "rows": [["x", "b"], [1, 2], [3, 4]]},
    {"event": "sample", "time": 105.2, "step": 3, "kind": "image", "text": "", "image": "data:image/png;base64,AA=="},
    {"event": "eval", "time": 105.3, "step": 3, "task": "t", "metric": "m", "value": 0.5, "checkpoint": "c",
     "content": "d", "figures": 1, "records": 5, "seconds": 0.5},
    {"event": "end", "time": 106.0, "reason": "finished", "what": "", "step": 3, "steps": 5, "seconds": 3.0},
]  # fmt: skip
ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, -1e308, 10**18, -(10**18), 10**30, 10**400, math.nan, math.inf, "", "a",
    "\x1b[2J\u202e", "9" * 400, [], ["a"], [1], [[1]], [[]], [["a"], [1], ["b", {}]], [{}], [{"key": []}], {},
    {"a": 1}, {"a": "b"}, {"a": None}, {"a": [1]},
    {"a": {"b": 1}}, {"": 1}, {"\u2028": -5}, {"a": 1e308, "b": 1e308},
]  # fmt: skip


def places(event: dict[str, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of an event stand, at every depth."""
    for key, value in event.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


PLACES = [(number, *place) for number, event in enumerate(LOG) for place in places(event)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    (made / "run.toml").write_text(RECIPE)
    (made / "plan.json").write_text(json.dumps(PLAN))
    return made


def written(folder: Path, log: list[Any]) -> None:
    """JSON as Python writes it, also numbers of 400 digits."""
    (folder / events.NAME).write_text("".join(f"{json.dumps(event)}\n" for event in log))


def views(folder: Path) -> str:
    """Everything that shows a run; the text of its page."""
    run = RunTables.read(folder)
    repr(run)
    run_comparison.row(run_comparison.summary(folder))
    EvalHistory(folder / events.NAME)
    return report.render(run) + run_comparison.render([run_comparison.summary(folder)])


def with_odd(place: tuple[Any, ...], value: Any, *, extra: bool = False) -> list[dict[str, Any]]:
    """The log with an odd value in the place of another one, or beside it under a name that no event has."""
    log = copy.deepcopy(LOG)
    table: Any = log
    for key in place[:-1]:
        table = table[key]
    table["unheard_of" if extra else place[-1]] = value
    return log


def test_the_plain_log_fits_and_all_views_show_it(folder: Path) -> None:
    written(folder, LOG)
    assert not [event["event"] for event in events.read(folder / events.NAME) if misfit(event)]
    page = views(folder)
    assert "of the run log left out" not in page
    for words in ("a note", "bits per byte", "states on disk", "disks of nodes", "a text"):
        assert words in page


@given(st.sampled_from(PLACES), st.sampled_from(ODD), st.booleans())
def test_no_odd_field_ends_a_view(folder: Path, place: tuple[Any, ...], value: Any, extra: bool) -> None:
    written(folder, with_odd(place, value, extra=extra))
    page = views(folder)
    assert "\x1b" not in page


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LOG)))
def test_no_odd_field_of_any_event_ends_a_view(folder: Path, number: int) -> None:
    failed = []
    for place in (place for place in PLACES if place[0] == number):
        for value in ODD:
            written(folder, with_odd(place, value))
            try:
                views(folder)
            except Exception as error:  # all of them are shown
                failed.append((place, value, repr(error)))
    assert not failed


def test_events_that_do_not_fit_are_left_out_and_counted(folder: Path) -> None:
    odd = [{"event": "step", "time": 101.0, "step": "x"}, {"event": "step", "time": 101.0}, {"event": 5}, [1], 7]
    written(folder, [LOG[0], *odd, *LOG[1:]])
    *others, incident = events.read(folder / events.NAME)
    assert [event["event"] for event in others] == [event["event"] for event in LOG]
    assert "5 lines of the run log left out that do not fit, the first line 2 of events.jsonl" in incident["what"]
    assert "step" in incident["what"]
    assert "5 lines of the run log left out" in views(folder)
