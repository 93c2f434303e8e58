"""Plans for processors beside what `espalier train` then measures: seconds of a step and bytes at the peak.

    python bench/processors.py [--quick] [--pairs N] [--json FILE] [--only tiny,gcn] [--ranks 1,2,4]

Twelve recipes (decoders, graphs, a module) on 1, 2 and 4 ranks of this machine. The probe of this machine makes each
plan without trials; the plan is then trained, in fresh processes, in as many runs as there are pairs. Each recipe is
also trained as it stands: the planner chooses ranks and threads by trials, and their seconds are compared with the
run's. Memory is anonymous and shared pages of rank 0 at the peak, as the run log has it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import espalier
from espalier.machine import cluster as clusters
from espalier.machine import probe
from espalier.plan import base as plans
from espalier.recipe import recipe_file
from table import Row, arguments, interval, publish

GOAL = 0.10
SECONDS, STEPS, QUICK = 2.5, (8, 60), (5, 8)
"""How long a run's steps are to take, and how many there are at least and at most."""
WARM = 2
"""Steps that do not count: pages are touched and connections made in them."""

ADAMW = {"optimizer": {"kind": "adamw"}}
TEXT = {"path": "python:stdlib"}


def decoder(model: Mapping[str, Any], **train: Any) -> dict[str, Any]:
    """A recipe of a decoder of this shape."""
    return {"model": {"kind": "gpt", **model}, "data": TEXT, "train": {"validate_tokens": 8192, **train}}


def network(kind: str, nodes: int, fanout: Sequence[int] = (), **train: Any) -> dict[str, Any]:
    """A recipe of a graph network on a planted graph, whole or by drawn neighbours."""
    return {
        "model": {"kind": kind, "depth": 2, "width": 64},
        "data": {"path": f"planted:nodes={nodes},degree=16,features=64"},
        "graph": {"fanout": fanout},
        "train": {"validate_every": 1000, **ADAMW, **train},
    }


RECIPES: dict[str, dict[str, Any]] = {
    "tiny": decoder({"depth": 2, "width": 64, "heads": 2}, sequence=128, batch_tokens=2048),
    "small": decoder({"depth": 3, "width": 192, "heads": 3}, sequence=256, batch_tokens=4096),
    "adamw": decoder({"depth": 4, "width": 256, "heads": 4}, sequence=256, batch_tokens=4096, **ADAMW),
    "gqa": decoder({"depth": 4, "width": 256, "heads": 8, "kv_heads": 2}, sequence=512, batch_tokens=4096, **ADAMW),
    "tied": decoder(
        {"depth": 2, "width": 192, "heads": 3, "tied": True, "vocabulary": 8192},
        sequence=256, batch_tokens=2048, **ADAMW,
    ),
    "long": decoder({"depth": 2, "width": 128, "heads": 2}, sequence=4096, batch_tokens=16384),
    "wide": decoder({"depth": 2, "width": 768, "heads": 6}, sequence=128, batch_tokens=1024, **ADAMW),
    "bf16": decoder(
        {"depth": 4, "width": 384, "heads": 6}, sequence=256, batch_tokens=512, precision="bf16", **ADAMW
    ),
    "gcn": network("gcn", 20_000),
    "sage": network("sage", 50_000, (10, 5), batch_tokens=1024),
    "gat": network("gat", 10_000),
    "module": {
        "model": {"kind": "module", "build": "mine:build", "arguments": {"classes": 4}},
        "train": {"batch_tokens": 256, "validate_every": 1000},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """What one run recorded: its plan, seconds of its steps, and the peak in bytes."""

    plan: plans.Plan
    seconds: Sequence[float]
    peak: float


@dataclass(frozen=True)
class Bench:
    """Where runs lie, and how long they are."""

    folder: Path
    cluster: clusters.Cluster
    quick: bool

    def train(self, name: str, seconds: float, changes: Sequence[str]) -> Taken:
        """Trains a recipe by the command, for as many steps of about so many seconds as are wanted."""
        least, most = QUICK if self.quick else STEPS
        steps = WARM + max(least, min(most, round(SECONDS / seconds)))
        run = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder)) / "run"
        command = [
            *(sys.executable, "-m", "espalier", "train", str(self.recipe(name)), "--run", str(run)),
            *("plan.cluster=" + str(self.folder / "cluster.toml"), f"train.steps={steps}", *changes),
        ]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        found = [one for one in map(json.loads, (run / "events.jsonl").open()) if one["event"] == "step"]
        return Taken(
            plans.read(run / "plan.json"),
            [one["seconds"] for one in found[WARM:]],
            max(one["memory"] for one in found),
        )

    def warm(self, name: str) -> None:
        """Reads the data and compiles the kernels of a recipe, which only the first run on a machine does."""
        self.train(name, SECONDS, ("plan.trial=false", "plan.pin.ranks=1"))

    def recipe(self, name: str) -> Path:
        """Its file."""
        file = self.folder / f"{name}.toml"
        if not file.exists():
            file.write_text(recipe_file.dump(recipe_file.from_table(RECIPES[name])), encoding="utf-8")
        return file

    def predicted(self, name: str, layout: Mapping[str, Any]) -> plans.Plan:
        """The plan of a recipe by the probe alone."""
        return espalier.make_plan(self.recipe(name), self.cluster, **layout)


def error(predicted: float, measured: float) -> float:
    """Relative."""
    return predicted / measured - 1


def row(case: str, what: str, predicted: float, measured: Sequence[float], unit: str) -> Row:
    """Predicted beside measured; the ratio is predicted over measured."""
    middle = statistics.median(measured)
    low, high = interval([predicted / one for one in measured])
    return Row(
        f"{case}: {what}", "measured", middle, predicted, predicted / middle, unit,
        f"{low:.3f}-{high:.3f} (n={len(measured)})",
    )  # fmt: skip


def compared(bench: Bench, name: str, ranks: int, pairs: int, note: str) -> list[Row]:
    """Rows of a recipe on so many ranks, without trials."""
    plan = bench.predicted(name, {"ranks": ranks})
    assert plan.predicted is not None
    changes = (f"plan.pin.ranks={ranks}", "plan.trial=false")
    runs = [bench.train(name, plan.predicted.step_seconds, changes) for _ in range(pairs)]
    assert all(one.plan.layout == plan.layout for one in runs)
    case = f"{name}, {ranks} x {plan.ranks[0].threads}{note}"
    seconds = [one for run in runs for one in run.seconds]
    rows = [
        row(case, "step", plan.predicted.step_seconds, seconds, "s"),
        row(case, "peak", plan.predicted.memory_bytes["peak"] / 2**20, [one.peak / 2**20 for one in runs], "MiB"),
    ]
    terms = ", ".join(f"{k} {v * 1e3:.1f}" for k, v in plan.predicted.terms.items() if v > 2e-4)
    held = ", ".join(f"{k} {v / 2**20:.1f}" for k, v in plan.predicted.memory_bytes.items() if v > 2**18)
    fastest = f"fastest {min(seconds):.4f}"
    print(
        f"{case}, micro-batch {plan.micro_batch}: {told(rows[0])} ({fastest}); {told(rows[1])}\n   {terms}\n   {held}"
    )
    return rows


def tried(bench: Bench, name: str, pairs: int, note: str) -> list[Row]:
    """Rows of a recipe as it stands: ranks, threads and micro-batch by trials."""
    guess = bench.predicted(name, {})
    assert guess.predicted is not None
    runs = [bench.train(name, guess.predicted.step_seconds, ()) for _ in range(pairs)]
    plan = runs[0].plan
    runs = [one for one in runs if one.plan.micro_batch == plan.micro_batch and len(one.plan.ranks) == len(plan.ranks)]
    assert plan.predicted is not None
    case = f"{name}, by trials {len(plan.ranks)} x {plan.ranks[0].threads}{note}"
    rows = [row(case, "step", plan.predicted.step_seconds, [one for run in runs for one in run.seconds], "s")]
    print(f"{case}, micro-batch {plan.micro_batch}: {told(rows[0])}")
    return rows


def told(one: Row) -> str:
    """In a few words."""
    return f"{one.case.rsplit(': ')[-1]} {one.ours:.4g} of {one.peer_value:.4g} {one.unit} ({one.ratio - 1:+.0%})"


def summary(what: str, rows: Sequence[Row]) -> Iterator[Row]:
    """The share of rows within the goal, and the median error."""
    if not rows:
        return
    errors = [abs(one.ratio - 1) for one in rows]
    within = sum(one <= GOAL for one in errors) / len(errors)
    middle, (low, high) = statistics.median(errors), interval(errors)
    spread = f"{low:.3f}-{high:.3f} (n={len(rows)})"
    yield Row(f"{what}: share within 10 %", "goal", 1.0, within, within, "of the cases", f"n={len(rows)}")
    yield Row(f"{what}: median error", "goal", GOAL, middle, GOAL / max(middle, 1e-9), "relative error", spread)


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(
        (__doc__ or "").splitlines()[0],
        only={"default": ",".join(RECIPES), "help": "recipes, with commas"},
        ranks={"default": "1,2,4,trials", "help": "with commas; trials: as the planner chooses by trials"},
    )
    pairs, note = (asked.pairs or 1, ", quick") if asked.quick else (asked.pairs or 1, "")
    wanted = asked.ranks.split(",")
    plain: list[Row] = []
    by_trials: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        sys.path.append(folder)
        mine = Path(__file__).parents[1] / "examples" / "mine.py"
        (Path(folder) / "mine.py").write_text(mine.read_text(encoding="utf-8"), encoding="utf-8")
        here = probe.probe()
        print("\n".join(here.notes))
        (Path(folder) / "cluster.toml").write_text(clusters.dumps(here), encoding="utf-8")
        bench = Bench(Path(folder), here, asked.quick)
        try:
            for name in asked.only.split(","):
                if RECIPES[name]["model"]["kind"] not in ("gpt", "module"):
                    bench.warm(name)
                for ranks in (int(one) for one in wanted if one != "trials"):
                    plain += compared(bench, name, ranks, pairs, note)
                if "trials" in wanted:
                    by_trials += tried(bench, name, pairs, note)
        finally:
            seconds, peaks = plain[::2], plain[1::2]
            rows = [
                *summary(f"seconds of a step, from the probe{note}", seconds),
                *summary(f"bytes at the peak{note}", peaks),
                *summary(f"seconds of a step, from trials{note}", by_trials),
            ]
            publish([*rows, *seconds, *peaks, *by_trials], asked.json)


if __name__ == "__main__":
    main()
