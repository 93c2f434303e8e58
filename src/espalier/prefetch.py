"""Prefetching of batches one step ahead, the random seed of each step, and the signals that ask a run to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def ahead(
    numbers: Iterator[int],
    make: Callable[[int], Any],
    finish: Callable[[Any], Any],
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Iterator[tuple[Any, float]]]:
    """Gives an iterator of (`finish(make(n))`, seconds waited) for each of `numbers`, made one ahead in a thread.

    The next of `numbers` is asked for once the one before is ready, `finish` runs in the caller's thread. Waits take
    place inside `waiting()`.
    """

    def all_of_them(pool: ThreadPoolExecutor) -> Iterator[tuple[Any, float]]:
        number = next(numbers, None)
        under_way = None if number is None else pool.submit(make, number)
        while under_way is not None:
            begun = time.perf_counter()
            with waiting():
                made = finish(under_way.result())
            waited = time.perf_counter() - begun
            number = next(numbers, None)
            under_way = None if number is None else pool.submit(make, number)
            yield made, waited

    with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
        yield all_of_them(pool)


@contextmanager
def hearing_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` on Ctrl-C, SIGTERM and SIGUSR1 instead of ending the process."""

    def hear(number: int, frame: Any) -> None:
        stop()

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def seed_step(device: torch.device, seed: int) -> None:
    """Seeds the generators a step can draw from. `torch.manual_seed` would, without a GPU in use, queue a call with its
    stack trace for later at every step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
