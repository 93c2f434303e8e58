"""One checkpoint's evaluation: tasks split into parts, longest first, and each task's figures when its last is scored.

After Acme (arXiv 2403.07648): datasets are split by how long they took before, and the longest parts go first. List
scheduling in that order ends within 4/3 of the best (Graham, SIAM J. Appl. Math. 17, 1969), and short parts, split from
long tasks, fill what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from espalier.evaluate.shared_model import Source
from espalier.evaluate.tasks import Sums, Task, means
from espalier.evaluate.worker_pool import Part, Workers

PARTS = 4
"""For each worker, at least, where tasks can be split: the last ones to end are short then."""


class Result(NamedTuple):
    """What came of one task. `seconds`: of all workers together. `why`: what went wrong, empty when nothing did."""

    task: str
    figures: Mapping[str, float]
    records: int
    seconds: float
    why: str = ""


def split(tasks: Sequence[Task], seconds: Mapping[str, float], workers: int) -> list[Part]:
    """Tasks in parts of at most 1 / (PARTS * workers) of all expected seconds, the longest first.

    `seconds`: for each record of a task, by its name, as measured before; others are taken to be like these.
    """
    usual = fmean(seconds.values()) if seconds else 1.0
    each = {task.name: max(seconds.get(task.name, usual), 1e-9) for task in tasks}
    longest = sum(task.records * each[task.name] for task in tasks) / (PARTS * workers)
    parts = []
    for task in tasks:
        count = min(task.records, math.ceil(task.records * each[task.name] / longest))
        ends = [task.records * at // count for at in range(count + 1)]
        parts += [Part(task.name, start, stop) for start, stop in pairwise(ends)]
    return sorted(parts, key=lambda part: -(part.stop - part.start) * each[part.task])


def evaluate(
    workers: Workers, model: Source, tasks: Sequence[Task], seconds: Mapping[str, float]
) -> Iterator[Result | float]:
    """Each task's result when it is there, and at every tick which share of the records is done.

    `seconds`: see `split`.
    """
    by_name, failed = {task.name: task for task in tasks}, set[str]()
    sums: dict[str, dict[int, Sequence[Sums]]] = {task.name: {} for task in tasks}
    took = dict.fromkeys(by_name, 0.0)
    records, done = sum(task.records for task in tasks), 0
    for scored in workers.evaluate(model, split(tasks, seconds, len(workers))):
        if scored is None:
            yield done / records
            continue
        part, found = scored
        task, own = by_name[part.task], sums[part.task]
        done += part.stop - part.start
        took[task.name] += found.seconds
        own[part.start] = found.sums
        if task.name in failed:
            continue
        if found.why:
            failed.add(task.name)
            yield Result(task.name, {}, task.records, took[task.name], found.why)
        elif sum(map(len, own.values())) == task.records:
            figures = task.summary(means([one for start in sorted(own) for one in own[start]]))
            why = "" if figures else "nothing of it has weight"
            yield Result(task.name, figures, task.records, took[task.name], why)
