"""What other programs do while a machine is measured is not the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.machine import measure
from espalier.machine.cluster import Link


def work() -> None:
    """A fraction of a millisecond of processor time."""
    sum(range(10_000))


def test_time_in_which_another_program_has_the_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempted() -> None:
        work()
        time.sleep(0.05)

    assert measure._best(preempted, 0.0) < 0.025
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert measure._best(preempted, 0.0) >= 0.05, (
        "threads wait for each other: only the clock on the wall says how long"
    )


def test_the_fastest_run_counts() -> None:
    waits = iter([0.0, 0.03, 0.0, 0.03])
    assert measure._best(lambda: time.sleep(next(waits)), 0.0, one_thread=False) < 0.03


def row(rate: float, threads: int) -> list[Any]:
    return ["product", "fp32", 64, 64, 64, threads, 1, rate]


@pytest.mark.parametrize(("busy", "rate"), [(True, 5e10), (False, 1e9)])
def test_on_a_busy_machine_threads_that_never_runtogether_count_as_one(
    monkeypatch: pytest.MonkeyPatch, busy: bool, rate: float
) -> None:
    """Else a plan for such a machine would foretell steps a hundred times too long."""
    asked: list[int] = []

    def together(processes: int, job: Callable[..., Any]) -> list[dict[str, Any]]:
        asked.append(processes)
        return [{"rates": [["product", "fp32", 64, 64, 64, 1e9]], "copy": 1e9}]

    monkeypatch.setattr(measure, "together", together)
    result: dict[str, Any] = {"rates": [row(5e10, 1)], "copies": [[1, 1, 4e10]]}
    measure._add(result, (1, 2), [("product", "fp32", (64, 64, 64))], 0.01, busy)
    assert asked == [1]
    assert result["rates"][-1] == row(rate, 2)
    assert result["copies"][-1] == [2, 1, 4e10 if busy else 1e9]


@given(st.lists(st.tuples(*[st.floats(1.0, 1e3)] * 3), max_size=4))
def test_a_link_is_measured_as_in_a_round_that_nothing_disturbed(factors: list[tuple[float, float, float]]) -> None:
    """Rounds in which messages took any number of times as long change nothing, even where a small one took longer than
    a large one."""
    latency, bandwidth, launch = 3e-5, 2e9, 4e-5
    whole, together = latency + 2**22 / bandwidth, 2 * latency + launch
    rounds = [Link(bandwidth=bandwidth, latency=latency, launch=launch)]
    for small, large, sum_ in factors:
        seen = 2**22 / max(whole * large - latency * small, 1e-9)
        rounds.append(
            Link(bandwidth=seen, latency=latency * small, launch=max(0.0, together * sum_ - 2 * latency * small))
        )
    found = measure.fastest(rounds)
    assert found["latency"] == latency
    assert found["bandwidth"] == pytest.approx(bandwidth, rel=1e-3)
    assert found["launch"] == pytest.approx(launch, rel=1e-6)
