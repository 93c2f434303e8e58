"""Run tables: `espalier.open("runs/x").steps["loss"]`. Imports no torch.

A run may have been taken up several times; what a later attempt did anew replaces what an earlier one had done.
"""

from __future__ import annotations

import html
import importlib
import json
import os
import socket
import time
import tomllib
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from espalier.recipe import model_kinds
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.foreign_files import parsing, read_text
from espalier.recipe.units import show_count, show_seconds, show_size
from espalier.track import events as event_log
from espalier.track.curves import Curves
from espalier.track.events import Event
from espalier.track.goodput import Account, GoodputMeter
from espalier.track.log_reader import LogReader, LogSpan

VALIDATION = "validation."
"""Before the names of curves of validations."""
Table = dict[str, NDArray[Any]]

_NAMES = {
    "steps": "step",
    "validations": "validation",
    "checkpoints": "checkpoint",
    "incidents": "incident",
    "samples": "sample",
    "rules": "rule",
    "evals": "eval",
}
_NEWEST = {"step": 50, "validation": 1, "checkpoint": 5, "incident": 1000, "sample": 8, "rule": 0, "eval": 4000}
"""How many events of each kind are held."""
_QUIET = 60.0
"""Seconds without an event, beyond ten steps' time, after which a run counts as silent."""


class RunTables:
    """What a run folder holds. Made by `RunTables.read`.

    Of the log the curves, the sums and the newest events are held, however long it is. Tables are read from it when
    they are asked for: dicts of equally long NumPy arrays, numbers as float64 (`step` as int64; what an event lacks is
    NaN), the rest as objects. Fields that are tables themselves become `bytes.gradients` and the like. A table without
    rows has the column `step` alone.

    Attributes:
        folder: the run folder.
        recipe: run.toml; plan: plan.json; both empty when the file is not there yet.
        start: the latest `run` event; finish: the `end` event after it, or empty while there is none.
        attempts: how often it was begun; resumed: the steps that attempts began after, the first attempt's left out.
        curves: numbers of all steps that count, and those of validations as `validation.NAME`; of_attempt: of the steps
            that the latest attempt made, with the plan that the folder holds.
        best: the lowest loss of a validation, and its step.
        account: where the time went, and what failures cost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = _parsed(folder / "run.toml", tomllib.loads)
        self.plan = _parsed(folder / "plan.json", json.loads)
        self.start: Event = {}
        self.finish: Event = {}
        self.attempts = 0
        self.resumed: list[int] = []
        self.curves, self.of_attempt = Curves(), Curves()
        self.best: tuple[float, int] | None = None
        self._newest: dict[str, list[Event]] = {kind: [] for kind in _NEWEST}  # the latest first
        self._tables: dict[str, Table] = {}
        log = folder / event_log.NAME
        self._size = log.stat().st_size if log.is_file() else 0
        reader = self._reader()
        for span in reader.spans():
            self._take(span, latest=all(segment.end["event"] != "run" for segment in reader.segments))
        self._newest["incident"] = [*reader.left_out(), *self._newest["incident"]]
        segments = reader.segments[::-1]
        self.account: Account = GoodputMeter(segments).account()
        self.last_time = max(max(segment.last, segment.time) for segment in segments)
        for segment in segments:
            self._begin_or_end(segment.end)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """The run in `folder`. Raises UserError when there is no such folder, or no run in it."""
        path = Path(folder)
        if not path.is_dir():
            near = nearest(path.name, _siblings(path))
            hint = f"did you mean {path.parent / near}?" if near else "name the folder of a run, such as runs/language"
            raise UserError(f"No folder {path}.", do=hint)
        if not (path / event_log.NAME).is_file() and not (path / "run.toml").is_file():
            what = f"{path} is not a run folder: it has no events.jsonl."
            raise UserError(what, do="espalier train RECIPE makes one")
        return cls(path)

    @property
    def steps(self) -> Table:
        """One row per step: step, loss, tokens, seconds, mfu, learning_rate, gradient_norm, memory, bytes.CLASS …"""
        return self.table("steps")

    @property
    def validations(self) -> Table:
        """One row per validation: step, loss, bits_per_byte …"""
        return self.table("validations")

    @property
    def checkpoints(self) -> Table:
        """One row per checkpoint: step, seconds, blocked, bytes, rate, path."""
        return self.table("checkpoints")

    @property
    def incidents(self) -> Table:
        """One row per incident, of all attempts: kind, what, rank, step, action."""
        return self.table("incidents")

    @property
    def samples(self) -> Table:
        """One row per sample: step, kind, text, and image or rows."""
        return self.table("samples")

    @property
    def evals(self) -> Table:
        """One row per figure of a checkpoint's evaluation: step, task, metric, value, records, seconds."""
        return self.table("evals")

    @property
    def unit(self) -> str:
        """What speed is counted in: `tokens` of a language model, else `samples`."""
        kind = model_kinds.tagged((self.recipe.get("model") or {}).get("kind"))
        return "tokens" if kind is None else kind.unit

    @property
    def latest(self) -> Event:
        """The newest step event; empty before the first step."""
        return next(iter(self._newest["step"]), {})

    def newest(self, kind: str) -> list[Event]:
        """The newest events of a kind that count, in the order of the log."""
        return self._newest[kind][::-1]

    @property
    def state(self) -> str:
        """`waiting` (no step yet), `running`, `silent` (no sign of life), or how it ended: `finished` …"""
        if self.finish:
            return str(self.finish.get("reason", "finished"))
        if self._silent():
            return "silent"
        return "running" if self.latest else "waiting"

    def table(self, name: str) -> Table:
        """The table `name`: steps, validations, checkpoints, incidents, samples, rules or evals."""
        if name not in _NAMES:
            near = nearest(name, _NAMES)
            raise UserError(f"A run has no table {name!r}.", do=f"ask for {near!r}" if near else ", ".join(_NAMES))
        if name not in self._tables:
            self._tables[name] = _columns(self._rows(_NAMES[name])) or {"step": np.empty(0, np.int64)}
        return self._tables[name]

    def frame(self, name: str) -> Any:
        """The table `name` as a pandas DataFrame. Raises UserError when pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise UserError(
                "Run.frame needs pandas, which is not installed.", do="pip install pandas, or use Run.table(name)"
            ) from None
        return pandas.DataFrame(self.table(name))

    def metrics(self) -> list[str]:
        """The task's own figures among those of validations, as their workload orders them: all but losses and those
        of the test part."""
        names = (name.removeprefix(VALIDATION) for name in self.curves if name.startswith(VALIDATION))
        others = ("step", "time", "seconds", "loss")
        return [name for name in names if name not in others and not name.startswith(("test_", "tasks."))]

    def speed(self) -> float:
        """Tokens per second over the last 50 steps; 0 before the first."""
        seconds, tokens = (sum(row.get(name) or 0.0 for row in self._newest["step"]) for name in ("seconds", "tokens"))
        return tokens / seconds if seconds else 0.0

    def seconds(self) -> float:
        """Seconds from each command of the run to its end, as the terminal counts them."""
        return self.account.wall

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {', '.join(f'{key} {value}' for key, value in self._headline())}>"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{html.escape(key)}</td><td style='text-align:right'>{html.escape(value)}</td></tr>"
            for key, value in self._headline()
        )
        return f"<table><caption>{html.escape(str(self.folder))}</caption>{cells}</table>"

    def _headline(self) -> list[tuple[str, str]]:
        latest, rows = self.latest, [("state", self.state), ("step", f"{self.latest.get('step', 0):,}")]
        if latest.get("loss") is not None:
            rows.append(("loss", f"{latest['loss']:.4g}"))
        for last in self._newest["validation"]:
            rows += [(name.replace("_", " "), f"{last[name]:.4g}") for name in self.metrics()[:1] if name in last]
        if latest.get("tokens"):
            rows.append(("speed", f"{show_count(self.speed())} {self.unit}/s"))
        if latest.get("memory"):
            rows.append(("memory", show_size(latest["memory"])))
        return [*rows, ("time", show_seconds(self.seconds()))]

    def _reader(self) -> LogReader:
        return LogReader(event_log.blocks(self.folder / event_log.NAME, self._size) if self._size else ())

    def _rows(self, kind: str) -> list[Event]:
        """All events of a kind that count, read again."""
        rows: list[Event] = []
        reader = self._reader()
        for span in reader.spans():
            steps = span.counted() if kind == "step" else ()
            rows += [event for event in (*span.events(), *steps) if event["event"] == kind]
        return rows[::-1] + (reader.left_out() if kind == "incident" else [])

    def _take(self, span: LogSpan, latest: bool) -> None:
        """The span before those taken so far, in the log; `latest`: of the latest attempt."""
        columns = span.columns()
        columns["speed"] = columns["tokens"] / np.maximum(columns["seconds"], 1e-9)
        steps = columns["step"].astype(np.int64)
        for curves in (self.curves, self.of_attempt)[: 1 + latest]:
            curves.add(steps, columns)
        validations = [event for event in span.events() if event["event"] == "validation"][::-1]
        names = dict.fromkeys(name for event in validations for name in event)
        numbers = {VALIDATION + name: np.array([_number(event.get(name)) for event in validations]) for name in names}
        self.curves.add(np.array([event["step"] for event in validations], np.int64), numbers)
        losses = [(event["loss"], event["step"]) for event in validations if event.get("loss") is not None]
        self.best = min([*losses, *filter(None, [self.best])], default=None)
        missing = {kind: _NEWEST[kind] - len(rows) for kind, rows in self._newest.items()}
        for event in (*span.events(), *span.counted(missing["step"])):
            if missing.get(event["event"], 0) > 0:
                self._newest[event["event"]].append(event)
                missing[event["event"]] -= 1

    def _begin_or_end(self, event: Event) -> None:
        if event["event"] == "run":
            phase_over = bool(self.start.get("until")) and not self.finish and self.start["until"] == event.get("step")
            if self.start and not phase_over:
                self.resumed.append(event.get("step") or 0)
            self.attempts += not phase_over
            stages = event.get("stages") or self.start.get("stages")
            self.start, self.finish = {**event, "stages": stages}, {}
        elif event["event"] == "end":
            self.finish = event

    def _silent(self) -> bool:
        if not self.last_time:
            return False
        alive = _alive(self.start)
        if alive is not None:
            return not alive
        usual = float(np.median([row.get("seconds") or 0.0 for row in self._newest["step"]] or [0.0]))
        return time.time() - self.last_time > _QUIET + 10 * usual


def _number(value: Any) -> float:
    """NaN where it is none."""
    return value if isinstance(value, int | float) else np.nan


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _columns(rows: list[Event]) -> Table:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    names.pop("event", None)
    table: Table = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if isinstance(_first(values), dict):
            tables = [value if isinstance(value, dict) else {} for value in values]
            table.update({f"{name}.{key}": column for key, column in _columns(tables).items()})
        else:
            table[name] = _array(name, values)
    return table


def _array(name: str, values: list[Any]) -> NDArray[Any]:
    if isinstance(_first(values), int | float):
        try:
            return np.array(values, np.int64 if name == "step" and None not in values else np.float64)
        except (TypeError, ValueError, OverflowError):
            pass  # numbers and other things under one name
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _first(values: list[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _alive(start: Event) -> bool | None:
    """Whether the run's process lives, or None when that cannot be told from here."""
    host = (start.get("host") or {}).get("name")
    if "pid" not in start or host != socket.gethostname():
        return None
    try:
        os.kill(int(start["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    if not path.exists():
        return {}
    do = "restore it from a backup"
    with parsing(path, do):
        table = parse(read_text(path, do))
    return table if isinstance(table, dict) else {}
