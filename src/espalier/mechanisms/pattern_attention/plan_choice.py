"""Attention plan by measured cost: each plan is timed once on a pattern, and the fastest is kept on disk.

TorchGT (arXiv 2407.14106, section 3.3) chooses how much of a clustered adjacency it computes in dense blocks by its
auto-tuner. Plans here are exact, so that only their time counts. Small patterns are decided by counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from espalier.kernels import accelerator
from espalier.mechanisms.pattern_attention.attention import EDGE, HYBRID, AttentionPlan, attention, by_counts
from espalier.mechanisms.pattern_attention.pattern import Pattern
from espalier.recipe.cache_dir import cache_folder, hashed, write_atomic
from espalier.recipe.units import show_seconds
from espalier.track.progress import Stages

MEASURED = 1 << 20
"""Entries from which on plans are timed: below, a step is a matter of milliseconds whatever the plan."""
CANDIDATES = {"edge": EDGE, "hybrid": HYBRID, "hybrid of 8 rows": AttentionPlan("hybrid", 8)}
"""`block` computes columns that a single row reads sixteen times: it is never the fastest of so large a pattern."""
RUNS, FORMAT = 3, 2
"""Times that each is run, of which the median counts; another number where plans are computed otherwise."""


KEPT = "attention.txt"
"""File of a run's folder with the name of its plan: another one changes answers by their rounding."""


def choose(pattern: Pattern, heads: int, width: int, folder: Path | None = None) -> str:
    """Decides how `auto` computes `pattern` for heads of so many columns. A sentence; empty where counts decide.

    Ranks that are forked share it, and a run that goes on takes what it began with, from its `folder`. Where
    measurements cannot be kept counts decide: the next run of the same seed could not find them, and measure others.
    """
    if pattern.matrix is None or pattern.entries < MEASURED or accelerator.available():
        return ""
    if folder is not None and (folder / KEPT).exists():
        began = (folder / KEPT).read_text(encoding="utf-8")
        if began in CANDIDATES:
            pattern.chosen["auto"] = CANDIDATES[began]
            return f"Attention along {pattern.entries:,} entries: {began}, as when the run began."
    content = [pattern.identity, heads, width, torch.get_num_threads(), sorted(CANDIDATES), FORMAT]
    place = cache_folder() / "attention plans" / f"{hashed(content)}.json"
    with suppress(OSError, msgspec.DecodeError):
        taken = msgspec.json.decode(place.read_bytes(), type=dict[str, float])
        if set(taken) == set(CANDIDATES):
            return _said(pattern, taken)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, b"{}")
    except OSError as error:
        why = f"by counts, as measurements cannot be kept in {place.parent}: {error.strerror}"
        return f"Attention along {pattern.entries:,} entries: {by_counts(pattern).name}, {why}."
    times: dict[str, float] = {}
    with Stages(f"Trying attention along {pattern.entries:,} entries") as stages:
        for name, plan in CANDIDATES.items():
            stages.begin(name, len(times), len(CANDIDATES))
            times[name] = seconds(pattern, plan, heads, width)
    write_atomic(place, msgspec.json.encode(times))
    return _said(pattern, times)


def name(pattern: Pattern) -> str:
    """Of the candidate that computes `pattern`; empty: none of them does."""
    taken = pattern.chosen.get("auto", by_counts(pattern))
    return next((candidate for candidate, plan in CANDIDATES.items() if plan == taken), "")


def _said(pattern: Pattern, taken: dict[str, float]) -> str:
    fastest_first = sorted(taken, key=taken.__getitem__)
    best, counted = fastest_first[0], by_counts(pattern)
    pattern.forget(keep=CANDIDATES[best].least)
    pattern.chosen["auto"] = CANDIDATES[best]
    measurements = ", ".join(f"{name} {show_seconds(taken[name])}" for name in fastest_first)
    by = "as counts foretell" if CANDIDATES[best] == counted else f"where counts foretell {counted.name}"
    return (
        f"Attention along {pattern.entries:,} entries: {best}, {by}; forward and backward of a layer: {measurements}."
    )


def seconds(
    pattern: Pattern, plan: AttentionPlan, heads: int, width: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The median of forward and backward passes over `pattern`, its windows made before."""
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randn(pattern.tokens, heads, width, generator=drawn).requires_grad_() for _ in range(3)]
    taken = []
    for _ in range(RUNS + 1):
        start = clock()
        attention(rows[0], rows[1], rows[2], pattern, plan=plan).sum().backward()
        taken.append(clock() - start)
    return statistics.median(taken[1:])
