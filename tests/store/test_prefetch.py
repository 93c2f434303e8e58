"""Pipelines: what stages make, in order; errors where they happened; queues that hold no more than their depth."""

from __future__ import annotations

import threading
import time

import pytest

from espalier.store.prefetch import PrefetchPipeline


def alive():
    return {one.name for one in threading.enumerate() if one.name.startswith("reader-")}


def test_results_are_those_of_the_stages_one_after_the_other_in_order():
    with PrefetchPipeline(range(100), [lambda n: n + 1, lambda n: n * 2, str]) as pipeline:
        assert list(pipeline) == [str((n + 1) * 2) for n in range(100)]
        with pytest.raises(StopIteration):
            next(pipeline)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_an_error_comes_after_the_results_before_it_and_ends_all_threads(broken):
    def stage(number):
        def run(item):
            if number == broken and item == 5:
                raise ValueError(f"item {item}")
            return item

        return run

    pipeline = PrefetchPipeline(range(10), [stage(number) for number in range(3)])
    assert [next(pipeline) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="item 5"):
        next(pipeline)
    assert not alive()


def test_an_error_of_the_source_is_raised_too():
    def items():
        yield 1
        raise OSError("gone")

    with PrefetchPipeline(items(), [lambda n: n]) as pipeline:
        assert next(pipeline) == 1
        with pytest.raises(OSError, match="gone"):
            next(pipeline)


def test_stages_run_ahead_by_their_queues_and_no_further():
    begun = []

    def first(item):
        begun.append(item)
        return item

    with PrefetchPipeline(range(100), [first, lambda item: item], depth=2) as pipeline:
        assert next(pipeline) == 0
        deadline = time.monotonic() + 10
        while len(begun) < 7 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        # one taken, two behind the last stage, one in its hands, two before it, one in the hands of the first
        assert begun == list(range(7))
    assert not alive()


def test_time_waited_for_results_is_counted():
    with PrefetchPipeline(range(3), [lambda item: time.sleep(0.05)]) as pipeline:
        list(pipeline)
    assert pipeline.stalled >= 0.14


def test_closing_ends_stages_that_wait():
    pipeline = PrefetchPipeline(range(100), [lambda n: n, lambda n: n])
    pipeline.close()
    pipeline.close()
    assert not alive()
