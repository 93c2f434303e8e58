"""What a cluster's jobs are like: who has the GPUs, who waits, how jobs end, how many GPUs are in use.

After Acme (Hu et al., NSDI 2024, arXiv 2403.07648), the sections that characterise jobs and failures: shares by count
and by GPU time, which differ by orders of magnitude, medians beside means, and the curve of GPUs in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.resilience.acme.jobs import Floats, Jobs

POINTS = 500
"""Of a curve."""


@dataclass(frozen=True)
class Group:
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
        waits, runs: [101] percentiles 0 to 100 of queueing delay and run time, in seconds.
    """

    source: str
    left_out: tuple[int, str]
    jobs: int
    cpu_jobs: int
    gpu_seconds: float
    span: float
    kinds: tuple[Group, ...]
    states: tuple[Group, ...]
    causes: tuple[Group, ...]
    hours: Floats
    in_use: Floats
    most: float
    waits: Floats
    runs: Floats

    @property
    def mean_in_use(self) -> float:
        """GPUs in use on average over the span."""
        return self.gpu_seconds / self.span if self.span > 0 else float("nan")


def characterise(jobs: Jobs) -> Characters:
    """The figures of a trace. Jobs without GPUs are counted apart and nowhere else."""
    mine = jobs.gpus > 0
    time = np.where(mine, jobs.gpus * np.nan_to_num(jobs.seconds), 0.0)
    failed = mine & (jobs.causes != "")
    hours, in_use, most, span = curve(jobs.started[mine], jobs.seconds[mine], jobs.gpus[mine])
    return Characters(
        source=jobs.source,
        left_out=jobs.left_out,
        jobs=int(mine.sum()),
        cpu_jobs=int((~mine).sum()),
        gpu_seconds=float(time.sum()),
        span=span,
        kinds=_groups(jobs, time, jobs.kinds, mine, mine),
        states=_groups(jobs, time, jobs.states, mine, mine),
        causes=_groups(jobs, time, jobs.causes, failed, failed),
        hours=hours,
        in_use=in_use,
        most=most,
        waits=_percentiles(jobs.queued[mine]),
        runs=_percentiles(jobs.seconds[mine]),
    )


def _groups(
    jobs: Jobs, time: Floats, words: NDArray[np.str_], chosen: NDArray[np.bool_], whole: NDArray[np.bool_]
) -> tuple[Group, ...]:
    count, all_time = int(whole.sum()), float(time[whole].sum())
    found = []
    for name in np.unique(words[chosen]):
        rows = chosen & (words == name)
        spent = float(time[rows].sum())
        found.append(
            Group(
                name=str(name),
                jobs=int(rows.sum()),
                share=float(rows.sum()) / count,
                time_share=spent / all_time if all_time else 0.0,
                gpu_seconds=spent,
                gpus=float(jobs.gpus[rows].mean()),
                duration=_quantile(jobs.seconds[rows], 50),
                mean_duration=_mean(jobs.seconds[rows]),
                queue=_quantile(jobs.queued[rows], 50),
                long_queue=_quantile(jobs.queued[rows], 95),
            )
        )
    return tuple(sorted(found, key=lambda group: (-group.gpu_seconds, -group.jobs, group.name)))


def curve(started: Floats, seconds: Floats, gpus: Floats) -> tuple[Floats, Floats, float, float]:
    """GPUs in use over time, in bins of equal length.

    Args:
        started, seconds, gpus: [n] of each job; those that are not told are left out.

    Returns:
        Hours since the first start [m], mean GPUs in use in the bin that begins there [m], GPUs at the highest moment,
        and the span in seconds. The mean times the bin's length, summed, is the GPU time of the jobs.
    """
    known = np.isfinite(started) & np.isfinite(seconds) & (seconds >= 0)
    begins, lasts, gpus = started[known], seconds[known], gpus[known]
    if not len(begins) or not float((begins + lasts).max()) > float(begins.min()):
        return np.empty(0), np.empty(0), 0.0, 0.0
    origin = float(begins.min())
    times = np.concatenate([begins, begins + lasts]) - origin
    steps = np.concatenate([gpus, -gpus])
    order = np.lexsort((steps, times))  # at one moment ends come before starts
    times, level = times[order], np.cumsum(steps[order])
    span = float(times[-1])
    edges = np.linspace(0.0, span, POINTS + 1)
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))])
    until = np.interp(edges, times, area)
    return edges[:-1] / 3600, np.diff(until) / (span / POINTS), float(level.max()), span


def _percentiles(values: Floats) -> Floats:
    known = values[np.isfinite(values)]
    return np.percentile(known, np.arange(101)) if len(known) else np.empty(0)


def _quantile(values: Floats, percent: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.percentile(known, percent)) if len(known) else float("nan")


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
