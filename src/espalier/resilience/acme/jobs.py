"""Jobs of a cluster, from its trace: Acme's columns, Slurm's `sacct`, or the runs in a folder.

After the trace of Acme (Hu et al., NSDI 2024, arXiv 2403.07648; columns as in its public release). A row that cannot be
read is counted, never guessed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.errors import UserError

Floats = NDArray[np.float64]

NAMES = {
    "gpus": ("gpu_num", "gpus", "num_gpus", "ngpus", "alloctres", "reqtres", "allocgres", "reqgres"),
    "kind": ("type", "job_type", "partition", "qos"),
    "state": ("state", "status"),
    "submitted": ("submit_time", "submit", "submit_offset_s", "submitted"),
    "started": ("start_time", "start"),
    "ended": ("end_time", "end"),
    "seconds": ("duration", "duration_s", "elapsedraw", "elapsed", "run_time"),
    "queued": ("queue", "queue_s", "queue_time", "queue_seconds"),
    "code": ("exitcode", "exit_code"),
    "cause": ("reason", "fail_reason", "failure_reason", "cause"),
    "id": ("jobid", "job_id", "job"),
}
"""What a column may be called, by what it holds; sacct's names in small letters."""
EXPECTED = (
    "columns of Acme (job_id, gpu_num, type, state, submit_time, start_time, end_time, duration, queue) or of sacct -P "
    "(JobID, Partition, State, Submit, Start, End, ElapsedRaw, AllocTRES, ExitCode)"
)

_GPUS = re.compile(r"gpu(?:[:\w.-]*)?[=:](\d+)")
_CLOCK = re.compile(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?$")


@dataclass(frozen=True)
class Jobs:
    """A trace: arrays [n] of one value for each job, times in seconds, NaN where the trace does not tell.

    Attributes:
        source: the file or folder.
        gpus: devices of each; of runs on processors their ranks.
        kinds, states, causes: words; of causes empty where the job did not fail.
        submitted, started, seconds, queued: when, and how long.
        left_out: rows that could not be read, with the first of them named.
    """

    source: str
    gpus: Floats
    kinds: NDArray[np.str_]
    states: NDArray[np.str_]
    causes: NDArray[np.str_]
    submitted: Floats
    started: Floats
    seconds: Floats
    queued: Floats
    left_out: tuple[int, str] = (0, "")

    def __len__(self) -> int:
        return len(self.gpus)


def read(path: str | Path) -> Jobs:
    """The jobs in a trace.

    Raises:
        UserError: there is no such file, a column that is needed is missing, or no row can be read.
    """
    try:
        with Path(path).open(encoding="utf-8", errors="replace", newline="") as file:
            head = file.readline()
            names = [name.strip().strip('"').lower() for name in head.rstrip("\r\n").split(_separator(head))]
            columns = _columns(names, str(path))
            return _rows(str(path), csv.reader(file, delimiter=_separator(head)), columns)
    except OSError as error:
        raise UserError(
            f"The trace {path} cannot be read: {error.strerror}.", do="name a file of jobs, or a folder of runs"
        ) from None


def _separator(head: str) -> str:
    return max("|,\t;", key=head.count)


def _columns(names: Sequence[str], path: str) -> dict[str, int]:
    found = {
        what: names.index(next(name for name in known if name in names))
        for what, known in NAMES.items()
        if any(name in names for name in known)
    }
    if "gpus" not in found or not ({"seconds"} <= found.keys() or {"started", "ended"} <= found.keys()):
        lacks = "a number of GPUs" if "gpus" not in found else "a duration, or a start and an end"
        shown = ", ".join(name for name in names[:12] if name) or "nothing"
        raise UserError(
            f"The trace {path} has no column with {lacks}.", why=f"its columns: {shown}", do=f"expected of {EXPECTED}"
        )
    return found


def _rows(path: str, rows: Any, columns: Mapping[str, int]) -> Jobs:
    table: dict[str, list[Any]] = {
        name: [] for name in ("gpus", "kind", "state", "cause", "submitted", "started", "seconds", "queued")
    }
    bad, first = 0, ""
    seen = iter(rows)
    number = 1
    while True:
        number += 1
        try:
            row = next(seen)
            if not row or ("id" in columns and "." in row[columns["id"]]):  # sacct's steps of a job
                continue
            values = _job(row, columns)
        except StopIteration:
            break
        except (ValueError, IndexError, csv.Error) as error:
            bad, first = bad + 1, first or f"line {number}: {error}"
            continue
        for name, value in values.items():
            table[name].append(value)
    if not table["gpus"]:
        raise UserError(
            f"The trace {path} has no job that can be read.",
            why=first or "it has a head and no rows",
            do=f"expected {EXPECTED}",
        )
    return _made(path, table, (bad, first))


def _job(row: Sequence[str], columns: Mapping[str, int]) -> dict[str, Any]:
    def cell(name: str) -> str:
        return row[columns[name]].strip() if name in columns else ""

    submitted, started, ended = (_moment(cell(name)) for name in ("submitted", "started", "ended"))
    seconds = _seconds(cell("seconds")) if "seconds" in columns else ended - started
    queued = _seconds(cell("queued")) if cell("queued") else started - submitted
    if np.isnan(started) and not np.isnan(submitted):
        started = submitted if np.isnan(queued) else submitted + queued
    state = cell("state").split(" ")[0].upper() or "UNKNOWN"
    return {
        "gpus": _gpus(cell("gpus")),
        "kind": cell("kind") or "all",
        "state": state,
        "cause": cell("cause") or _cause(state, cell("code")),
        "submitted": submitted,
        "started": started,
        "seconds": seconds,
        "queued": queued,
    }


def _made(path: str, table: Mapping[str, list[Any]], left_out: tuple[int, str]) -> Jobs:
    numbers = {
        name: np.array(table[name], np.float64) for name in ("gpus", "submitted", "started", "seconds", "queued")
    }
    words = {f"{name}s": np.array(table[name], np.str_) for name in ("kind", "state", "cause")}
    return Jobs(source=path, left_out=left_out, **numbers, **words)  # type: ignore[arg-type]


def _gpus(text: str) -> float:
    """`8`, `8.0`, and of sacct `billing=64,cpu=64,gres/gpu=8,mem=1T` or `gpu:8`; empty: none."""
    if not text or "=" in text or ":" in text:
        return float(sum(int(one) for one in _GPUS.findall(text)[:1]))
    return float(text)


def _seconds(text: str) -> float:
    """`93784.0`, and of sacct `1-02:03:04`."""
    found = _CLOCK.match(text)
    if found is None:
        return float(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _moment(text: str) -> float:
    if text in ("", "Unknown", "None", "N/A", "nan", "NaT"):
        return np.nan
    try:
        return float(text)
    except ValueError:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


def _cause(state: str, code: str) -> str:
    """What a scheduler knows of a failure: its own states, the signal, the exit code."""
    if state not in FAILED:
        return ""
    if state != "FAILED":
        return state.replace("_", " ").lower()
    status, _, number = code.partition(":")
    if number.isdigit() and int(number):
        return f"signal {number}"
    return f"exit code {status}" if status.isdigit() else "not told"


def of_runs(folder: str | Path, opened: Callable[[Path], Mapping[str, Any]]) -> Jobs:
    """The runs below a folder as jobs.

    Args:
        folder: one that holds run folders.
        opened: gives of a run's folder a mapping with the keys of a row: gpus, kind, state, cause, submitted, started,
            seconds, queued.

    Raises:
        UserError: there is no run in it.
    """
    found = sorted(path.parent for path in Path(folder).glob("*/events.jsonl"))
    if not found:
        raise UserError(
            f"There is no run in the folder {folder}.",
            do="name a folder of run folders, such as runs, or a file of jobs",
        )
    rows = [opened(path) for path in found]
    table = {
        name: [row[name] for row in rows]
        for name in ("gpus", "kind", "state", "cause", "submitted", "started", "seconds", "queued")
    }
    return _made(str(folder), table, (0, ""))
