"""The run log: one JSON line per event, in `events.jsonl`; every view of a run is made from it. Imports no torch.

Every line has `event` (its name) and `time` (unix seconds). Bytes are counts, durations are seconds. The trainer
writes these; a reader ignores names and fields it does not know:

| event      | fields |
|------------|--------|
| run        | step (already done: 0, or the checkpoint resumed from), steps (wanted), name, |
|            | run {id, name, host, begun, meaning: as in run.json}, forked {run, step: where it came from}, |
|            | workload, parameters, |
|            | ranks, threads (per rank), versions {name: text}, host {name: text}, pid, |
|            | notes (of the data, in sentences), |
|            | derivations [{key, value, why}], source (where the state was taken up: memory or disk, and why), |
|            | until (the last step of the phase), entered (unix seconds: when the command was), |
|            | stages [[what, its seconds, seconds from entered to its end]] before the first step |
| plan       | predicted: as `plan.base.Predicted` |
| step       | step, loss, tokens, seconds, mfu, learning_rate, gradient_norm, memory (the most bytes the rank held: |
|            | anonymous and shared pages, or of a GPU), page_cache (bytes of files it has mapped and read, apart), |
|            | fragmentation (of a GPU: the most bytes that PyTorch reserved, less the most that were allocated), |
|            | tasks {name: its own loss} where there are several, |
|            | loss_scale (after the step) and skipped (steps left out so far, as a gradient overflowed) in fp16, |
|            | bytes {traffic class: bytes sent by the rank}, exposed (seconds waiting for communication), |
|            | waited (seconds waiting for the step's batches), |
|            | and of encoded classes saved {class: bytes}, coding {class: seconds}, lost {class: share of the 2-norm} |
|            | offload {tier: read, written (bytes), stalled (seconds that computation waited)} of what waits outside |
|            | the device, and activations and frozen, the same of activations and of frozen weights |
|            | node: on optimizer nodes, pulled and pushed (bytes of parameters and gradients of the rank), stalled |
|            | (seconds that it waited for them), read and written (bytes, by the disks of all nodes) |
|            | store {tier: bytes of features read from it for this step and those ahead} with a [store] |
|            | of experts over ranks: experts {number: rows that it got, in all layers}, dispatch {waited: seconds |
|            | that a rank had nothing to do in these, on average; longest: the rank that had most} |
| fork       | step, run (of the run that began with this run's checkpoint of that step), folder (of that run) |
| data       | changed (files that are not what they were when the run was begun), action |
| phase      | name, step (its first), steps (its last), parameters: a phase begins; a plan of its own follows |
| validation | step, seconds, loss, bits_per_byte (language) and whatever else the workload's `summary` says |
| checkpoint | step, seconds (in the background), blocked (seconds training stood still), bytes, path, |
|            | rate (bytes/s of all ranks together while they wrote) |
| incident   | kind, what, rank, step, action; of ranks that failed also why and attempt, and of their diagnosis |
|            | category, reason, calls_for (its action), suspect (host to test), root (line that shows the cause); |
|            | where a run is to go on by another plan also before and predicted (seconds of a step), cost (of the |
|            | switch), gain (seconds saved) |
| recovered  | kind, category, reason, rank, step (resumed from), attempt, seconds (failure to next step), |
|            | lost_steps (done again), source (memory or disk) |
| rule       | name, step, value, why: a value of the plan that may change while running has changed |
| sample     | step, kind (text, image, table), text (in letters), image (a PNG in a data URI), rows (of cells) |
| eval       | step, task, metric, value, checkpoint (its seal), content (hash of what was asked), figures (how many |
|            | metrics the task has), records, seconds |
| end        | reason (finished, interrupted, failed), what, step, steps, seconds |

A run that resumes appends to the same file. Steps after the one resumed from then come twice: the later wins.
A number that is not finite is written as null beside a text field (`"loss": null, "loss_is": "nan"`), and `read`
gives the number back.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any

import msgspec

from espalier.recipe import serialization
from espalier.recipe.cache_dir import writing
from espalier.recipe.data_table import data_table
from espalier.recipe.foreign_files import parsing, printable
from espalier.recipe.resource import Resource
from espalier.recipe.units import plural

NAME = "events.jsonl"
"""Of the run log, in its run folder."""

Event = dict[str, Any]

BY_STEP = ("step", "validation", "sample", "rule", "eval")
"""Events that an attempt that goes back to an earlier step takes back."""
_MARK = b'_is":"'
_BLOCK = 1 << 20


class Log(Resource):
    """Appends events to the run log at `path`. Has state: an open file. One writer at a time, from any thread.

    Each event is one `write` call, so a process killed at any moment leaves at most one torn last line; opening the
    log again cuts it off. Raises UserError when the folder cannot be written or the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _mend(self._file)

    def write(self, event: str, **fields: Any) -> Event:
        """Appends one event, at once visible to readers, and returns it as readers will see it."""
        entry, line = _entry(event, fields)
        with self._lock, writing(self.path):
            _put(self._file, line, mend=True)
        return entry

    def close(self) -> None:
        """Closes the file. Writing afterwards is an error; closing twice is not."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


def write(path: Path, event: str, **fields: Any) -> Event:
    """Appends one event to the log at `path`, which is opened for it: whoever wrote there may have been killed within a
    line. Returns it."""
    with Log(path) as log:
        return log.write(event, **fields)


def append(path: str | Path, event: str, **fields: Any) -> Event:
    """Appends one event to the log of a run that another process may be writing, and returns it.

    Nothing is mended here, since what looks like a torn line may be one on its way; a newline before ours keeps the two
    apart. Raises UserError when the log is not there or cannot be written.
    """
    entry, line = _entry(event, fields)
    with writing(path):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            _put(file, b"\n" * torn + line)
        finally:
            os.close(file)
    return entry


def _entry(event: str, fields: Mapping[str, Any]) -> tuple[Event, bytes]:
    entry: Event = {"event": event, "time": time.time(), **fields}
    return entry, msgspec.json.encode(_plain(entry)) + b"\n"


def _put(file: int, line: bytes, mend: bool = False) -> None:
    """Writes a line by one call. With `mend`, what is torn where the disk fills up within it is cut off."""
    if os.write(file, line) < len(line):
        if mend:
            _mend(file)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read(path: str | Path) -> Iterator[Event]:
    """The events in the file `path`, in order. A torn last line is left out. Other lines that are no events, or whose
    fields do not fit, are left out and counted: an incident after the last event says how many. Raises UserError when
    there is no such file."""
    misfits = []
    with parsing(path, "name the folder of a run (runs/NAME)"), Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            event, reason = parsed(line.rstrip(b"\n"))
            if event is not None:
                yield event
            elif line != b"\n" and (reason != NO_EVENT or line.endswith(b"\n")):
                misfits.append((number, reason))
    yield from left_out(Path(path).name, len(misfits), *([*misfits, (0, "")][0]))


def logged(path: Path) -> Iterable[Event]:
    """The events in the file `path`; none where it is not there."""
    return read(path) if path.exists() else ()


def left_out(name: str, count: int, number: int, reason: str) -> list[Event]:
    """The incident of `count` lines of the log `name` that are no events, the first of which is line `number`."""
    first = f"line {number} of {name}: {reason}"
    what = f"{plural(count, 'line')} of the run log left out that do not fit, the first {first}"
    return [{"event": "incident", "kind": "log", "what": what, "action": "read on"}] if count else []


def blocks(path: Path, stop: int | None = None) -> Iterator[list[bytes]]:
    """The lines of the file `path` up to byte `stop`, in blocks, the last of the file first; each block is in order.
    The last line of the first block is what stands after the last line end."""
    rest = b""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END) if stop is None else stop
        while start > 0:
            stop, start = start, max(0, start - _BLOCK)
            file.seek(start)
            rest, *lines = (file.read(stop - start) + rest).split(b"\n")
            yield lines
    yield [rest]


def last(path: str | Path, *names: str) -> Event | None:
    """The last event with one of these `names` in the file `path` whose fields fit, read from its end; None where there
    is none."""
    with suppress(FileNotFoundError):
        for lines in blocks(Path(path)):
            for line in reversed(lines):
                event = _parse(line)
                if event is not None and event["event"] in names and not misfit(event):
                    return event
    return None


def _mend(file: int) -> None:
    """Cuts a torn last line off; ends a whole one that only lacks its newline."""
    size = os.fstat(file).st_size
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        step = min(_BLOCK, start)
        start -= step
        tail = os.pread(file, step, start) + tail
    rest = tail.rpartition(b"\n")[2]
    if not rest:
        return
    if _parse(rest) is not None:
        os.write(file, b"\n")
    else:
        os.ftruncate(file, size - len(rest))


def _parse(line: bytes) -> Event | None:
    try:
        event = serialization.from_json(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(event, dict) or "event" not in event:
        return None
    return _restored(event) if _MARK in line.replace(b'": "', b'":"') else event


NO_EVENT = "it is no table with the key event"


def parsed(line: bytes) -> tuple[Event | None, str]:
    """The event in a line, or None and why it is none, as a predicate."""
    event = _parse(line)
    reason = NO_EVENT if event is None else misfit(event)
    return (None, reason) if reason else (event, "")


def _plain(value: Any) -> Any:
    """`value` in what JSON has; numbers that are not finite become null beside `NAME_is`."""
    if isinstance(value, dict):
        plain = {}
        for key, given in value.items():
            item = plain[str(key)] = _plain(given)
            if isinstance(item, float) and not isfinite(item):
                plain[str(key)], plain[f"{key}_is"] = None, repr(item)
        return plain
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in value]
        return [repr(item) if isinstance(item, float) and not isfinite(item) else item for item in items]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()  # halves of characters, of names that are no UTF-8
    if value is None or isinstance(value, bool | int | float):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # NumPy and torch scalars
        return _plain(value.item())
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.to_builtins(value))
    return str(value)


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    restored = {key: _restored(item) for key, item in value.items()}
    for key in [key for key, item in restored.items() if item is None and f"{key}_is" in restored]:
        restored[key] = float(restored.pop(f"{key}_is"))
    return restored


# --- what fields hold ---------------------------------------------------------------------------------------------

_LARGEST = 1e200
"""Of numbers, so that their sums are finite."""


class _Event(msgspec.Struct, kw_only=True):
    event: str = ""
    time: Annotated[float, msgspec.Meta(ge=0, lt=253402300800)] | None = None  # before the year 10000


def _forms(number: Any, **options: Any) -> dict[str, Any]:
    """The struct of each table, with numbers of the type `number`."""
    kinds: dict[str, Any] = {
        "whole": Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)],
        "number": number,
        "process": Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)],
        "text": str,
        "numbers": dict[str, number],
        "table": dict[str, Any],
        "texts": list[str],
        "cells": list[list[Any]],
    }
    forms: dict[str, Any] = {}
    for kind, table in _TABLES.items():
        names: list[Any] = [
            (name, type_) if name in table.get("needed", ()) else (name, type_ | None, None)
            for word, type_ in kinds.items()
            for name in table.get(word, ())
        ]
        form: Any = msgspec.defstruct(kind, names, bases=(_Event,), kw_only=True, **options)
        forms[kind] = form
        kinds |= {"moved": dict[str, form]} if kind == "Moved" else {kind.lower(): form, f"{kind.lower()}s": list[form]}
    return forms


_TABLES = data_table(__file__)
_FORMS = _forms(float)
_FINITE = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
decode_step = msgspec.json.Decoder(_forms(_FINITE, forbid_unknown_fields=True, gc=False)["step"]).decode
"""The step in a line, where all its numbers are finite and none of its fields unknown: a quick way past `parsed`.

Raises msgspec.DecodeError for any other line."""


def step_fields(*words: str) -> tuple[str, ...]:
    """The fields of a step that are of the kinds `words` in events.toml."""
    return tuple(name for word in words for name in _TABLES["step"].get(word, ()))


def as_step(event: Event) -> Any:
    """The fields that `events.toml` names of a step event that fits."""
    return msgspec.convert(event, _FORMS["step"])


def misfit(event: dict[str, Any]) -> str:
    """Why a line of a log is no event, as a predicate; empty: it is one."""
    try:
        form = _FORMS.get(str(event["event"]))
        msgspec.convert(event, form or _Event)
        return "it has a number of more than 200 digits" if form and _is_large(event) else ""
    except (msgspec.ValidationError, ArithmeticError) as error:
        return printable(error)


def _is_large(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float) and _LARGEST < abs(value) < inf
