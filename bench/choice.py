"""The planner's first choice among all layouts that can be run, on four classes of links.

    python bench/choice.py [--quick] [--pairs N] [--json FILE] [--only loopback,1000,200,50]

Four ranks of one thread each on loopback, or on two nodes of two with so many Mbit/s between them (bench/netlab.py;
needs root). Links are measured as `espalier probe` measures them; processors are those of the probe, calibrated by
measured steps of three layouts on loopback. The planner prices every layout; the best of each kind is run for a few
steps, in turn, through its plan, and compared: how much slower the first choice is than the fastest, and how far
predictions are off.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from choice_rank import Outcome, Task
from cuts import cluster_of, request_of
from cuts_rank import Cut
from cuts_rank import Task as Model
from espalier.machine import probe
from espalier.machine.cluster import Cluster
from espalier.plan import build_plan, search
from espalier.plan.base import Plan
from espalier.plan.calibration import Calibration, Measurement, calibrate
from espalier.plan.layout_estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.plan.search import Option
from espalier.recipe import Pin
from netlab import Lab, Shape, first_said, ranked
from table import Row, arguments, compare, publish

RANKS = 4
CALIBRATING = 5
"""Rounds in which the three layouts are run that the planner is calibrated by."""
MODEL = Model(Cut())
KINDS = 8
"""Layouts that are run, the best of each kind in the planner's order."""
FAR = 2.5
"""Layouts predicted to take so many times as long as the first choice are not run."""
REGRET, ERROR = 0.05, 0.15


def command(task: Task) -> list[str]:
    """What each rank runs."""
    return [sys.executable, str(Path(__file__).parent / "choice_rank.py"), msgspec.json.encode(task).decode()]


def on_links(rate: float) -> Callable[[Task], Outcome]:
    """Runs a task on links of so many bits/s between two nodes; 0: on loopback."""

    def loopback(task: Task) -> Outcome:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        places = ({**os.environ, **ranked(index, [0] * RANKS, "127.0.0.1", port)} for index in range(RANKS))
        return outcome_of(
            [subprocess.Popen(command(task), env=env, stdout=subprocess.PIPE, text=True) for env in places]
        )

    def lab(task: Task) -> Outcome:
        with Lab(Shape(nodes=2, hosts=2, rate=rate)) as made:
            return outcome_of(made.start(command(task)))

    return lab if rate else loopback


def outcome_of(ranks: Sequence[subprocess.Popen[str]]) -> Outcome:
    """What rank 0 said."""
    return msgspec.json.decode(first_said(ranks), type=Outcome)


# --- planning ------------------------------------------------------------------------------------------------------


def kind(option: Option) -> tuple[Any, ...]:
    """What layouts are compared by: degrees, algorithm, and whether states are cut."""
    one = option.layout
    return one.algorithm, one.dp, one.tp, one.hp, one.cp, one.pp, one.optimizer > 1


def calibrated(request: Request, here: Cluster) -> Calibration:
    """What steps of three layouts on loopback say of this machine: samples, matrices and layers over the ranks."""
    measured = on_links(0.0)(Task(MODEL))
    cluster = cluster_of(here, measured.inside, None)
    size = request.profile.global_batch // RANKS
    layouts = (
        Layouts(dp=RANKS, micro_batch=size),
        Layouts(algorithm="megatron", tp=RANKS, micro_batch=request.profile.global_batch),
        Layouts(pp=RANKS, micro_batch=1),
    )
    kept = search.search(request, cluster)
    options = [Option(one, cluster, estimate(request, cluster, one).step_seconds, 0.0, 0.0) for one in layouts]
    plans = tuple(build_plan.make(request, kept, one) for one in options)
    seconds = [statistics.median(one) for one in on_links(0.0)(Task(MODEL, plans, CALIBRATING)).seconds]
    rows = [Measurement(request, cluster, one, taken) for one, taken in zip(layouts, seconds, strict=True)]
    found = calibrate(rows, "steps of three layouts on loopback")
    for plan, taken in zip(plans, seconds, strict=True):
        assert plan.predicted is not None
        print(f"  loopback, {plan.layout}: {taken:.3f} s, from the probe {plan.predicted.step_seconds:.3f} s")
    named = {name: one for name, one in msgspec.structs.asdict(found.factors).items() if abs(one - 1) > 0.02}
    print("  factors: " + ", ".join(f"{name} {one:.2f}" for name, one in named.items()))
    return found


def candidates(request: Request, cluster: Cluster, calibration: Calibration) -> list[Plan]:
    """The planner's choice, then the best of each other kind that it would run, fastest first."""
    request = request.changed(factors=calibration.factors)
    found = search.search(request, cluster, calibration)
    first = found.best()
    assert first is not None
    known = {kind(first): first}
    for option in found.options:
        if option.seconds <= FAR * first.seconds:
            known.setdefault(kind(option), option)
    return [build_plan.make(request, found, one, calibration) for one in [*known.values()][:KINDS]]


# --- measuring -----------------------------------------------------------------------------------------------------


def case(name: str, request: Request, here: Cluster, calibration: Calibration, rounds: int, note: str) -> list[Row]:
    """Rows of one class of links."""
    rate = 0.0 if name == "loopback" else float(name) * 1e6
    told = "loopback" if not rate else f"2 nodes x 2, {name} Mbit/s"
    run = on_links(rate)
    measured = run(Task(MODEL))
    cluster = cluster_of(here, measured.inside, measured.between if rate else None)
    plans = candidates(request, cluster, calibration)
    print(f"{told}{note}: {told_link('inside', measured.inside)}, {told_link('between', measured.between)}")
    print(f"  {len(plans)} kinds, from {plans[0].layout}")
    seconds = run(Task(MODEL, tuple(plans), rounds)).seconds
    middle = [statistics.median(one) for one in seconds]
    for plan, taken, one in sorted(zip(plans, middle, seconds, strict=True), key=lambda row: row[1]):
        assert plan.predicted is not None
        error = plan.predicted.step_seconds / taken - 1
        terms = ", ".join(f"{k} {v:.3f}" for k, v in plan.predicted.terms.items() if v > 0.002)
        first = " <- first choice" if plan is plans[0] else ""
        print(f"  {taken:.3f} s ({min(one):.3f}-{max(one):.3f}), {error:+.0%}: {plan.layout}{first}\n      {terms}")
    best = min(range(len(plans)), key=lambda at: middle[at])
    pairs = list(zip(seconds[0], seconds[best], strict=True))
    chosen = compare(
        f"first choice of {len(plans)} kinds: {told}, {plans[0].layout}{note}", f"fastest: {plans[best].layout}",
        "s/step", pairs, higher_is_better=False,
    )  # fmt: skip
    assert plans[0].predicted is not None
    own = plans[0].predicted.step_seconds
    errors = [(abs(own / one - 1), ERROR) for one in seconds[0]]
    off = compare(f"predicted step of the first choice: {told}{note}", "goal", "relative error", errors, False)
    return [chosen, msgspec.structs.replace(off, ours=abs(own / middle[0] - 1))]


def told_link(name: str, link: Any) -> str:
    """In a few words."""
    return f"{name} {link.bandwidth / 1e6:.0f} MB/s, {link.latency * 1e6:.0f} us, call {link.launch * 1e6:.0f} us"


def main() -> None:
    """Runs the cases and prints their rows."""
    names = ("loopback", "1000", "200", "50")
    asked = arguments(
        (__doc__ or "").splitlines()[0],
        only={"default": ",".join(names), "help": "loopback, or Mbit/s between nodes; with commas"},
    )
    rounds, note = (asked.pairs or 2, ", quick") if asked.quick else (asked.pairs or 5, "")
    rows: list[Row] = []
    request, here = request_of(MODEL, Pin(ranks=RANKS, threads=1, recompute="none")), probe.probe()
    calibration = calibrated(request, here)
    try:
        for name in asked.only.split(","):
            rows += case(name, request, here, calibration, rounds, note)
    finally:
        publish(rows, asked.json)


if __name__ == "__main__":
    main()
