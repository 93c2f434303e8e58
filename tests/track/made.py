"""Run folders as the trainer leaves them, made up from a seed: for tests, and to look at the report by hand.

`python tests/track/made.py FOLDER [STEPS]` writes one.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPE = """name = "language"
[model]
kind = "gpt"
depth = 4
width = 192
[[data]]
path = "python:stdlib"
[train]
steps = 2000
sequence = 256
seed = 1
"""

PLAN: dict[str, Any] = {
    "version": 1,
    "planner": "uniform",
    "ranks": [{"role": "trainer", "device": "cpu", "threads": 1}] * 2,
    "layout": {
        "dp": 2,
        "tp": 1,
        "pp": 1,
        "algorithm": "data",
        "shard": {"params": 1, "grads": 1, "optimizer": 1},
        "micro_batch": 8,
        "accumulate": 1,
        "recompute": "none",
        "precision": "fp32",
    },
    "why": [
        "Two ranks with one thread each are 1.18 times faster than one rank with two threads here.",
        "A micro-batch of 8 is the largest whose activations stay in the fast part of memory.",
        "Nothing is recomputed: the activations need 310 MiB of the 11.6 GiB each rank may use.",
    ],
    "predicted": {
        "step_seconds": 0.71,
        "tokens_per_second": 5769.0,
        "tokens_per_second_per_device": 2884.0,
        "mfu": 0.34,
        "terms": {"forward": 0.21, "backward": 0.43, "optimizer": 0.03, "all_reduce": 0.04},
        "memory_bytes": {
            "params": 7.6e6,
            "grads": 7.6e6,
            "optimizer": 15.2e6,
            "activations": 310e6,
            "transient": 67e6,
            "runtime": 290e6,
            "peak": 697.4e6,
        },
        "memory_limit": 12.4e9,
        "sent_bytes": {"gradients": 7.6e6, "control": 64.0},
    },
    "runners_up": [
        {
            "layout": {"micro_batch": size, "recompute": recompute},
            "ranks": ranks,
            "threads": 2 // ranks,
            "step_seconds": 0.71 * slower,
            "peak_bytes": 5e8 * slower,
            "loses": f"{slower - 1:.0%} of the time",
        }
        for size, recompute, ranks, slower in [(8, "none", 1, 1.18), (4, "none", 2, 1.24), (8, "block", 2, 1.31)]
    ],
}

SAMPLE = '''def read_lines(self, path):
    """Return the lines of the file as a list."""
    with open(path, encoding="utf-8") as handle:
        return [line.rstrip("\\n") for line in handle]
'''

DERIVED = [
    {"key": "model.width", "value": 192, "why": "48 per layer of depth 4, so that heads are 48 wide"},
    {"key": "train.batch_tokens", "value": 4096, "why": "about the square root of all tokens, times the sequence"},
    {"key": "train.optimizer.learning_rate", "value": 0.02, "why": "Muon's rate for this width"},
]

START = {
    "name": "language",
    "workload": "language",
    "parameters": 1_912_320,
    "ranks": 2,
    "threads": 1,
    "steps": 2000,
    "versions": {"espalier": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.9"},
    "host": {"cpu": "Xeon Platinum 8481C", "cores": 2, "memory": "23.4 GiB", "system": "Linux 6.1"},
    "derivations": DERIVED,
    "notes": ["2 files were skipped in python:stdlib"],
}


def step_event(step: int, chance: random.Random, when: float) -> dict[str, Any]:
    slow = 1.9 if chance.random() < 0.01 else 1.0
    seconds = 0.74 * slow * chance.gauss(1, 0.03)
    warm = min(1.0, step / 40)
    return {
        "event": "step",
        "time": when,
        "step": step,
        "loss": 1.35 + 4.2 * math.exp(-((step / 60) ** 0.55)) + chance.gauss(0, 0.05),
        "tokens": 4096,
        "seconds": seconds,
        "mfu": 0.34 * 0.71 / seconds,
        "learning_rate": 0.02 * warm * min(1.0, max(0.0, (2000 - step) / 800)),
        "gradient_norm": 0.4 + 2 * math.exp(-step / 80) + abs(chance.gauss(0, 0.06)),
        "memory": 655e6 + 30e6 * warm + chance.gauss(0, 1e6),
        "page_cache": 300 * 2**20,
        "fragmentation": 20 * 2**20,
        "bytes": {"gradients": 7_649_280, "control": 64},
        "exposed": 0.03 * slow,
    }


def events(steps: int, resumed: int = 0, seed: int = 1) -> Iterator[dict[str, Any]]:
    """The log of a run of `steps` steps, taken up again from step `resumed` after reaching a little further."""
    chance, when = random.Random(seed), 1_760_000_000.0
    yield {"event": "run", "time": when, "step": 0, **START}
    spans = [(0, min(resumed + 37, steps)), (resumed, steps)] if resumed else [(0, steps)]
    for first, last in spans:
        if first:
            what = "rank 1 ended with signal 9 (killed); nothing it had acknowledged was lost"
            yield {"event": "incident", "time": when, "kind": "rank", "what": what, "rank": 1, "step": first + 37,
                   "action": f"resumed from step {first}"}  # fmt: skip
            yield {"event": "run", "time": when, "step": first, **START}
        for step in range(first + 1, last + 1):
            event = step_event(step, chance, when := when + 0.75)
            yield event
            if step % 200 == 0:
                loss = event["loss"] + 0.08
                bits = loss / math.log(2)
                yield {"event": "validation", "time": when, "step": step, "loss": loss, "bits_per_byte": bits}
                yield {"event": "checkpoint", "time": when, "step": step, "seconds": 0.21, "blocked": 0.004,
                       "bytes": 23_100_000, "path": f"checkpoints/step-{step:08d}"}  # fmt: skip
                yield {"event": "sample", "time": when, "step": step, "text": SAMPLE}


def make(folder: Path, steps: int = 2000, resumed: int = 0, end: str = "finished") -> Path:
    """Writes a run folder; `end` is the reason of its `end` event, empty for a run still going on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RECIPE)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    with (folder / "events.jsonl").open("w") as file:
        for event in events(steps, resumed):
            file.write(json.dumps(event) + "\n")
        if end:
            what = "the loss was not a number at step 1204" if end == "failed" else ""
            last = {"event": "end", "time": 1_760_001_600.0, "reason": end, "what": what, "steps": steps}
            file.write(json.dumps(last) + "\n")
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000, resumed=800)
