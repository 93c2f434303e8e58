"""In which order trials go to few workers: two stages, inference then metric. Pure arithmetic, no processes.

After Acme (arXiv 2403.07648): longest first by prior run times, metrics apart from inference. List scheduling with the
longest first is within 4/3 - 1/(3m) of the best for one stage (Graham, SIAM J. Appl. Math. 17, 1969); Johnson's order
is the best for one worker per stage (Naval Research Logistics Quarterly 1, 1954). For several workers per stage the
problem is NP-hard: we simulate these orders and take the one that ends first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Times(NamedTuple):
    """Seconds of one trial: on an inference worker, then on a metric worker."""

    inference: float
    metric: float


class Pool(NamedTuple):
    """How many workers there are for each stage, at least one of both."""

    inference: int
    metric: int


def order(trials: Sequence[Times], pool: Pool) -> list[int]:
    """The positions of `trials` in the order in which idle inference workers should take them."""
    found = [rule(trials) for rule in (longest_first, longest_inference_first, longest_metric_first, johnson)]
    return min(found, key=lambda one: makespan(trials, one, pool))


def longest_first(trials: Sequence[Times]) -> list[int]:
    """By both stages together, the longest first."""
    return _sorted(trials, lambda times: -(times.inference + times.metric))


def longest_inference_first(trials: Sequence[Times]) -> list[int]:
    """By the inference alone, the longest first."""
    return _sorted(trials, lambda times: -times.inference)


def longest_metric_first(trials: Sequence[Times]) -> list[int]:
    """By what is left when inference ends, the longest first (Jackson's rule for delivery times)."""
    return _sorted(trials, lambda times: (-times.metric, -times.inference))


def johnson(trials: Sequence[Times]) -> list[int]:
    """Johnson's order: those quicker in inference by rising inference, then the others by falling metric."""
    return _sorted(
        trials,
        lambda times: (0, times.inference) if times.inference < times.metric else (1, -times.metric),
    )


def first_come(trials: Sequence[Times]) -> list[int]:
    """FIFO: as they were asked for. The plain answer, and the baseline."""
    return list(range(len(trials)))


def makespan(trials: Sequence[Times], taken: Sequence[int], pool: Pool, longest: bool = True) -> float:
    """Seconds until the last metric is there, when idle inference workers take `taken` from the left.

    A trial's metric can begin once its inference has ended; idle metric workers take the longest waiting one (the one
    that came first, unless `longest`).
    """
    free = [0.0] * pool.inference
    ended: list[tuple[float, int]] = []
    for trial in taken:
        end = heapq.heappop(free) + trials[trial].inference
        heapq.heappush(free, end)
        ended.append((end, trial))
    return max(*free, _metrics_end(trials, sorted(ended), pool.metric, longest))


def _metrics_end(trials: Sequence[Times], ended: Sequence[tuple[float, int]], workers: int, longest: bool) -> float:
    """When the last metric is there; `ended`: (seconds, trial) of every inference, by time."""
    busy = [0.0] * workers
    waiting: list[tuple[float, int]] = []
    last = now = 0.0
    at = 0
    while at < len(ended) or waiting:
        now = max(now, busy[0], 0.0 if waiting else ended[at][0])
        while at < len(ended) and ended[at][0] <= now:
            _, trial = ended[at]
            heapq.heappush(waiting, (-trials[trial].metric if longest else float(at), trial))
            at += 1
        _, trial = heapq.heappop(waiting)
        heapq.heapreplace(busy, now + trials[trial].metric)
        last = max(last, now + trials[trial].metric)
    return last


def coupled_makespan(trials: Sequence[Times], taken: Sequence[int], workers: int) -> float:
    """Seconds until the last trial ends when a worker keeps a trial through both stages, as one job each."""
    free = [0.0] * workers
    for trial in taken:
        heapq.heappush(free, heapq.heappop(free) + sum(trials[trial]))
    return max(free)


def lower_bound(trials: Sequence[Times], pool: Pool) -> float:
    """No schedule ends before this: the larger of the work per worker of each stage with what must come before or
    after it (the two-stage bound), and the longest trial."""
    if not trials:
        return 0.0
    first = sorted(times.inference for times in trials)
    second = sorted(times.metric for times in trials)
    # The metric workers' first trials, and the inference workers' last ones, are different trials each.
    head, tail = sum(first[: pool.metric]), sum(second[: pool.inference])
    longest = max(sum(times) for times in trials)
    return max((sum(first) + tail) / pool.inference, (sum(second) + head) / pool.metric, longest)


def _sorted(trials: Sequence[Times], key: Callable[[Times], object]) -> list[int]:
    return sorted(range(len(trials)), key=lambda at: (key(trials[at]), at))
