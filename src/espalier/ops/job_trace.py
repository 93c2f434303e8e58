"""Job trace of a cluster: who has the GPUs, who waits, how jobs end. Of Acme's columns, Slurm's `sacct`, or runs.

After Acme (Hu et al., NSDI 2024, arXiv 2403.07648; columns as in its public release), the sections that characterise
jobs and failures: shares by count and by GPU time, which differ by orders of magnitude, medians beside means, and the
curve of GPUs in use. A row that cannot be read is counted, never guessed.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.ops.diagnosis import diagnose
from espalier.ops.taxonomy import NO_FAILURE
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing
from espalier.track.run_tables import RunTables

Floats = NDArray[np.float64]
Words = NDArray[np.str_]

POINTS = 500
"""Of the curve of GPUs in use."""
_TABLES = data_table(__file__)
EXPECTED = (
    "columns of Acme (job_id, gpu_num, type, state, submit_time, start_time, end_time, duration, queue) or of sacct -P "
    "(JobID, Partition, State, Submit, Start, End, ElapsedRaw, AllocTRES, ExitCode)"
)
FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

_GPUS = re.compile(r"gpu(?:[:\w.-]*)?[=:](\d+)")
_CLOCK = re.compile(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?$")


class TracedJob(NamedTuple):
    """One row: devices (of a run on processors its ranks), words (`cause` empty where it did not fail), seconds (NaN
    where the trace does not tell)."""

    gpus: float
    kind: str
    state: str
    cause: str
    submitted: float
    started: float
    seconds: float
    queued: float


@dataclass(frozen=True)
class Jobs:
    """A trace: a column [n] for each field of `TracedJob`.

    Attributes:
        source: the file or folder.
        left_out: rows that could not be read, with the first of them named.
    """

    source: str
    gpus: Floats
    kinds: Words
    states: Words
    causes: Words
    submitted: Floats
    started: Floats
    seconds: Floats
    queued: Floats
    left_out: tuple[int, str] = (0, "")

    def __len__(self) -> int:
        return len(self.gpus)


def _table(source: str, rows: Sequence[TracedJob], left_out: tuple[int, str] = (0, "")) -> Jobs:
    columns: list[NDArray[Any]] = [
        np.array(column, np.str_ if isinstance(column[0], str) else np.float64) for column in zip(*rows, strict=True)
    ]
    names = [field.name for field in fields(Jobs)][1:-1]
    return Jobs(source=source, left_out=left_out, **dict(zip(names, columns, strict=True)))


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> Jobs:
    """The jobs in a trace.

    Raises:
        UserError: there is no such file, a column that is needed is missing, or no row can be read.
    """
    do = "name a file of jobs, or a folder of runs"
    with parsing(path, do), Path(path).open(encoding="utf-8", errors="replace", newline="") as file:
        head = file.readline()
        separator = max("|,\t;", key=head.count)
        names = [name.strip().strip('"').lower() for name in head.rstrip("\r\n").split(separator)]
        return _rows(str(path), csv.reader(file, delimiter=separator), _columns(names, str(path)))


def _columns(names: Sequence[str], path: str) -> dict[str, int]:
    columns = {
        what: names.index(next(name for name in known if name in names))
        for what, known in _TABLES["columns"].items()
        if any(name in names for name in known)
    }
    if "gpus" not in columns or not ({"seconds"} <= columns.keys() or {"started", "ended"} <= columns.keys()):
        lacks = "a number of GPUs" if "gpus" not in columns else "a duration, or a start and an end"
        shown = ", ".join(name for name in names[:12] if name) or "nothing"
        raise UserError(
            f"The trace {path} has no column with {lacks}.", why=f"its columns: {shown}", do=f"expected of {EXPECTED}"
        )
    return columns


def _rows(path: str, reader: Iterator[list[str]], columns: Mapping[str, int]) -> Jobs:
    rows = []
    bad = 0
    first = ""
    number = 1
    while True:
        number += 1
        try:
            row = next(reader)
            if row and not ("id" in columns and "." in row[columns["id"]]):  # else one of sacct's steps of a job
                rows.append(_job(row, columns))
        except StopIteration:
            break
        except (ValueError, IndexError, csv.Error) as error:
            bad += 1
            first = first or f"line {number}: {error}"
    if not rows:
        raise UserError(
            f"The trace {path} has no job that can be read.",
            why=first or "it has a head and no rows",
            do=f"expected {EXPECTED}",
        )
    return _table(path, rows, (bad, first))


def _job(row: Sequence[str], columns: Mapping[str, int]) -> TracedJob:
    def cell(name: str) -> str:
        return row[columns[name]].strip() if name in columns else ""

    submitted, started, ended = (_moment(cell(name)) for name in ("submitted", "started", "ended"))
    seconds = _seconds(cell("seconds")) if "seconds" in columns else ended - started
    queued = _seconds(cell("queued")) if cell("queued") else started - submitted
    if math.isnan(started) and not math.isnan(submitted):
        started = submitted if math.isnan(queued) else submitted + queued
    state = cell("state").split(" ")[0].upper() or "UNKNOWN"
    cause = cell("cause") or _cause(state, cell("code"))
    return TracedJob(_gpus(cell("gpus")), cell("kind") or "all", state, cause, submitted, started, seconds, queued)


def _gpus(text: str) -> float:
    """`8`, `8.0`, and of sacct `billing=64,cpu=64,gres/gpu=8,mem=1T` or `gpu:8`; empty: none."""
    if not text or "=" in text or ":" in text:
        return float(sum(map(int, _GPUS.findall(text)[:1])))
    return float(text)


def _seconds(text: str) -> float:
    """`93784.0`, and of sacct `1-02:03:04`."""
    match = _CLOCK.match(text)
    if match is None:
        return float(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _moment(text: str) -> float:
    if text in ("", "Unknown", "None", "N/A", "nan", "NaT"):
        return math.nan
    try:
        return float(text)
    except ValueError:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


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


def of_runs(folder: str | Path) -> Jobs:
    """The runs below a folder as jobs. Raises UserError where there is none."""
    folders = sorted(path.parent for path in Path(folder).glob("*/events.jsonl"))
    if not folders:
        raise UserError(
            f"There is no run in the folder {folder}.",
            do="name a folder of run folders, such as runs, or a file of jobs",
        )
    return _table(str(folder), list(map(_run, folders)))


def _run(folder: Path) -> TracedJob:
    """A run as a row; the cause of one that failed is diagnosed from its logs."""
    run = RunTables.read(folder)
    state = _TABLES["states"].get(run.state, "UNKNOWN")
    kind = str((run.recipe.get("model") or {}).get("kind") or run.start.get("workload") or "run")
    cause = diagnose(folder)[0].reason if state == "FAILED" else ""
    began = float(run.start.get("time") or math.nan)
    lasted = max(0.0, run.last_time - began)
    cause = "not told" if cause == NO_FAILURE else cause
    return TracedJob(float(run.start.get("ranks") or 1), kind, state, cause, began, began, lasted, math.nan)


# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobGroup:
    """Jobs of one type, final state or cause; times in seconds, NaN where the trace does not tell.

    Attributes:
        name, jobs: which, and how many.
        share, time_share: of all GPU jobs, and of all GPU time, 0 to 1.
        gpu_seconds, gpus: GPU time, and GPUs of a job on average.
        duration, mean_duration, queue, long_queue: median and mean run time, median and 95th percentile of the wait.
    """

    name: str
    jobs: int
    share: float
    time_share: float
    gpu_seconds: float
    gpus: float
    duration: float
    mean_duration: float
    queue: float
    long_queue: float


@dataclass(frozen=True)
class Characters:
    """A trace in figures.

    Attributes:
        source, left_out: of the jobs.
        jobs, cpu_jobs: with GPUs, and without.
        gpu_seconds, span: GPU time of all, and seconds from the first start to the last end.
        kinds, states, causes: groups, the largest GPU time first.
        hours, in_use: [m] the curve: hours since the first start, and mean GPUs in use until the next point.
        most: GPUs in use at the highest moment.
        waits, runs: [101] percentiles 0 to 100 of queueing delay and run time, in seconds; [0] where none is told.
    """

    source: str
    left_out: tuple[int, str]
    jobs: int
    cpu_jobs: int
    gpu_seconds: float
    span: float
    kinds: tuple[JobGroup, ...]
    states: tuple[JobGroup, ...]
    causes: tuple[JobGroup, ...]
    hours: Floats
    in_use: Floats
    most: float
    waits: Floats
    runs: Floats

    @property
    def mean_in_use(self) -> float:
        """GPUs in use on average over the span."""
        return self.gpu_seconds / self.span if self.span > 0 else math.nan


def characterise(jobs: Jobs) -> Characters:
    """The figures of a trace. Jobs without GPUs are counted apart and nowhere else."""
    mine = jobs.gpus > 0
    time = np.where(mine, jobs.gpus * np.nan_to_num(jobs.seconds), 0.0)
    hours, in_use, most, span = curve(jobs.started[mine], jobs.seconds[mine], jobs.gpus[mine])
    return Characters(
        source=jobs.source,
        left_out=jobs.left_out,
        jobs=int(mine.sum()),
        cpu_jobs=int((~mine).sum()),
        gpu_seconds=float(time.sum()),
        span=span,
        kinds=_groups(jobs, time, jobs.kinds, mine),
        states=_groups(jobs, time, jobs.states, mine),
        causes=_groups(jobs, time, jobs.causes, mine & (jobs.causes != "")),
        hours=hours,
        in_use=in_use,
        most=most,
        waits=_percentiles(jobs.queued[mine], np.arange(101)),
        runs=_percentiles(jobs.seconds[mine], np.arange(101)),
    )


def _groups(jobs: Jobs, time: Floats, words: Words, chosen: NDArray[np.bool_]) -> tuple[JobGroup, ...]:
    """The `chosen` jobs by their `words`; shares are of all that are chosen."""
    count = int(chosen.sum())
    all_time = float(time[chosen].sum())
    groups = []
    for name in np.unique(words[chosen]):
        rows = chosen & (words == name)
        spent = float(time[rows].sum())
        lasted = jobs.seconds[rows]
        known = np.isfinite(lasted)
        waits = jobs.queued[rows]
        groups.append(
            JobGroup(
                name=str(name),
                jobs=int(rows.sum()),
                share=float(rows.sum()) / count,
                time_share=spent / all_time if all_time else 0.0,
                gpu_seconds=spent,
                gpus=float(jobs.gpus[rows].mean()),
                duration=_percentile(lasted, 50),
                mean_duration=float(lasted[known].mean()) if known.any() else math.nan,
                queue=_percentile(waits, 50),
                long_queue=_percentile(waits, 95),
            )
        )
    return tuple(sorted(groups, key=lambda group: (-group.gpu_seconds, -group.jobs, group.name)))


def curve(started: Floats, seconds: Floats, gpus: Floats) -> tuple[Floats, Floats, float, float]:
    """GPUs in use over time, in bins of equal length.

    Args:
        started, seconds, gpus: [n] of each job; those that are not told are left out.

    Returns:
        Hours since the first start [m], mean GPUs in use in the bin that begins there [m], GPUs at the highest moment,
        and the span in seconds. The mean times the bin's length, summed, is the GPU time of the jobs.
    """
    known = np.isfinite(started) & np.isfinite(seconds) & (seconds >= 0)
    begins = started[known]
    lasts = seconds[known]
    gpus = gpus[known]
    if not len(begins) or not float((begins + lasts).max()) > float(begins.min()):
        return np.empty(0), np.empty(0), 0.0, 0.0
    origin = float(begins.min())
    times = np.concatenate([begins, begins + lasts]) - origin
    steps = np.concatenate([gpus, -gpus])
    order = np.lexsort((steps, times))  # at one moment ends come before starts
    times = times[order]
    level = np.cumsum(steps[order])
    span = float(times[-1])
    edges = np.linspace(0.0, span, POINTS + 1)
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))])
    until = np.interp(edges, times, area)
    return edges[:-1] / 3600, np.diff(until) / (span / POINTS), float(level.max()), span


def _percentile(values: Floats, mark: int) -> float:
    """Of the values that are told; NaN where none is."""
    return float(next(iter(_percentiles(values, [mark])), math.nan))


def _percentiles(values: Floats, marks: Sequence[int] | NDArray[np.int64]) -> Floats:
    """Of the values that are told; empty where none is."""
    known = values[np.isfinite(values)]
    return np.percentile(known, marks) if len(known) else np.empty(0)
