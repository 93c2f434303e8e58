"""Running out of memory: what is said, and what is offered."""

from __future__ import annotations

import msgspec
import pytest
import torch

from espalier.plan.base import Layout, Plan, Predicted, RunnerUp
from espalier.plan.oom_advice import exhausted, is_exhausted

GIB = 2.0**30
PREDICTED = Predicted(
    step_seconds=1.0,
    tokens_per_second=1.0,
    tokens_per_second_per_device=1.0,
    mfu=0.1,
    terms={},
    memory_bytes={"params": 1 * GIB, "grads": 1 * GIB, "optimizer": 2 * GIB, "activations": 3 * GIB, "peak": 7 * GIB},
    memory_limit=8 * GIB,
    sent_bytes={},
)


def runner_up(seconds: float, peak: float, **layout: object) -> RunnerUp:
    return RunnerUp(
        layout=msgspec.structs.replace(Layout(dp=4), **layout),
        ranks=4,
        threads=1,
        step_seconds=seconds,
        peak_bytes=peak,
        loses=f"{seconds - 1:.0%} slower",
    )


def test_the_predicted_table_stands_beside_the_measured() -> None:
    error = exhausted(Plan(predicted=PREDICTED), 2, {"params": 1.5 * GIB, "grads": 1 * GIB, "peak": 8 * GIB})
    assert error.what == "Rank 2 ran out of memory at 8.00 GiB."
    for row in ("parameters 1.00 GiB, 1.50 GiB", "activations 3.00 GiB, not known", "peak 7.00 GiB, 8.00 GiB"):
        assert row in error.why


def test_the_fastest_plan_that_should_hold_less_is_offered() -> None:
    """What was held is 8/7 of the prediction, so the others are taken to be wrong by as much."""
    others = (
        runner_up(1.1, 6.5 * GIB),  # 7.4 GiB as things are: too near
        runner_up(1.5, 3 * GIB, shard={"params": 4, "grads": 4, "optimizer": 4}),
        runner_up(1.3, 5 * GIB, shard={"params": 1, "grads": 1, "optimizer": 4}),
    )
    error = exhausted(Plan(predicted=PREDICTED, runners_up=others), 0, {"peak": 8 * GIB})
    assert error.do.startswith("plan.memory=7373MiB: 4 ranks, shard 1/1/4")
    assert "5.71 GiB (30% slower)" in error.do


def test_without_another_plan_smaller_pieces_are_offered() -> None:
    error = exhausted(Plan(micro_batch=8), 0, {"peak": 2 * GIB})
    assert "plan.memory=1843MiB" in error.do
    assert "plan.pin.micro_batch=4" in error.do
    assert "a smaller model" in exhausted(Plan(micro_batch=1), 0, {"peak": GIB}).do


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_exhausted(error: BaseException, answer: bool) -> None:
    assert is_exhausted(error) is answer


def test_torchs_own_allocator_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_exhausted(caught.value)
