"""Out-of-memory advice: what to change when a step did not fit. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from espalier.plan.base import Plan, RunnerUp
from espalier.recipe import units
from espalier.recipe.errors import RunFailed

ROOM = 0.9
"""Of what was measured when memory ran out, the share a plan should keep to. Assumed."""

WORDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "masters": "masters",
    "activations": "activations",
}
SIGNS = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")


def is_exhausted(error: BaseException) -> bool:
    """Whether memory ran out: a Python allocation, torch's allocator on any device, or the system's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error).lower() for sign in SIGNS)


def exhausted(plan: Plan, rank: int, measured: Mapping[str, float]) -> RunFailed:
    """The error for `rank`.

    Args:
        plan: what was running.
        rank: which rank ran out.
        measured: bytes it held by kind (`params`, `grads`, `optimizer`), and under `peak` the most it ever held.
    """
    peak = measured["peak"]
    rows = _rows(plan, measured)
    return RunFailed(
        f"Rank {rank} ran out of memory at {units.show_size(peak)}.",
        why="predicted and measured: " + "; ".join(rows) if rows else "",
        do=_way_out(plan, peak),
    )


def _rows(plan: Plan, measured: Mapping[str, float]) -> list[str]:
    predicted = {} if plan.predicted is None else dict(plan.predicted.memory_bytes)
    rows = []
    for kind in (*WORDS, "peak"):
        planned = predicted.get(kind)
        in_use = measured.get(kind)
        if not (planned or in_use):
            continue
        prediction = "not known" if planned is None else units.show_size(planned)
        measurement = "not known" if in_use is None else units.show_size(in_use)
        rows.append(f"{WORDS.get(kind, kind)} {prediction}, {measurement}")
    return rows


def _way_out(plan: Plan, peak: float) -> str:
    """The fastest plan that should hold less, and how to ask for it."""
    known = plan.predicted.memory_bytes.get("peak", 0.0) if plan.predicted is not None else 0.0
    ratio = peak / known if known else 1.0
    less = [other for other in plan.runners_up if other.peak_bytes * ratio <= ROOM * peak]
    ask = f"plan.memory={ROOM * peak / 2**20:.0f}MiB"
    if not less:
        smaller = f"plan.pin.micro_batch={max(1, plan.micro_batch // 2)}" if plan.micro_batch > 1 else "a smaller model"
        return f"{ask} (the planner then looks for a plan within it), {smaller}, or more devices"
    best = min(less, key=lambda other: other.step_seconds)
    return f"{ask}: {_described(best)} should hold {units.show_size(best.peak_bytes * ratio)} ({best.loses})"


def _described(runner_up: RunnerUp) -> str:
    layout = runner_up.layout
    shard = "/".join(str(layout.shard.get(name, 1)) for name in ("params", "grads", "optimizer"))
    again = f", recompute {layout.recompute}" if layout.recompute != "none" else ""
    return f"{runner_up.ranks} ranks, shard {shard}, micro-batch {layout.micro_batch}{again}"
