"""The report of a long run beside a plain loop over its log, and beside an earlier checkout: seconds and memory.

    python bench/report.py [--quick] [--pairs N] [--before FOLDER] [--json FILE]

Each turn is a fresh process on one core: processor seconds, imports left out, and the most memory it ever had. Peers:
`plain loop` (json.loads by line, nothing kept), and with `--before` the same report of the checkout in FOLDER.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from table import Row, arguments, compare, publish

ROOT = Path(__file__).parents[1]


def write_run(folder: Path, steps: int) -> Path:
    """A run that was taken up again half-way, with a validation every 200 steps."""
    folder.mkdir()
    (folder / "run.toml").write_text('name = "long"\n[model]\nkind = "gpt"\n[train]\nsteps = 1000000\n')
    chance, now = random.Random(1), 1.76e9
    with (folder / "events.jsonl").open("w") as log:

        def write(event: str, **fields: object) -> None:
            log.write(json.dumps({"event": event, "time": now, **fields}, separators=(",", ":")) + "\n")

        for first, last in ((0, steps // 2 + 37), (steps // 2, steps)):
            write("run", step=first, steps=steps, ranks=2, workload="language")
            for step in range(first + 1, last + 1):
                now += 0.75
                loss = 1.35 + 4 / step**0.5 + chance.gauss(0, 0.05)
                write(
                    "step", step=step, loss=loss, tokens=4096, seconds=0.74 + chance.gauss(0, 0.02), mfu=0.34,
                    learning_rate=0.02 * (1 - step / steps), gradient_norm=0.4 + abs(chance.gauss(0, 0.06)),
                    memory=685e6 + chance.gauss(0, 1e6), page_cache=314572800, exposed=0.03,
                    bytes={"gradients": 7649280, "control": 64},
                )  # fmt: skip
                if step % 200 == 0:
                    write("validation", step=step, loss=loss + 0.08, bits_per_byte=(loss + 0.08) / 0.693)
    return folder


def turn(reader: str, folder: str) -> None:
    """Prints processor seconds and MiB at the peak; what is imported and loaded lazily is so by a small run."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    def read(place: str) -> None:
        if reader == "report":
            from espalier.track import report

            report.write(place)
            return
        with open(f"{place}/events.jsonl", encoding="utf-8") as lines:
            for line in lines:
                json.loads(line)

    read(f"{folder}-small")
    began = time.process_time()
    read(folder)
    print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def one_turn(source: Path, reader: str, folder: Path) -> tuple[float, float]:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "turn", reader, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=1200)
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


def measure(folder: Path, steps: int, before: Path | None, pairs: int) -> list[Row]:
    """Ours beside each peer; all take turns."""
    peers = {"plain loop": (ROOT / "src", "plain")} | ({"before": (before / "src", "report")} if before else {})
    turns: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {name: [] for name in peers}
    for _ in range(pairs):
        for name, (source, reader) in peers.items():
            turns[name].append((one_turn(ROOT / "src", "report", folder), one_turn(source, reader, folder)))
    rows = []
    for name, each in turns.items():
        for index, unit in ((0, "s"), (1, "MiB")):
            columns = [(ours[index], theirs[index]) for ours, theirs in each]
            rows.append(compare(f"report of {steps:,} steps", name, unit, columns, higher_is_better=False))
    return rows


def main() -> None:
    options = arguments(__doc__ or "", before={"metavar": "FOLDER", "help": "an earlier checkout"})
    before = Path(options.before).absolute() if options.before else None
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for steps in (100_000,) if options.quick else (100_000, 1_000_000):
            folder = write_run(Path(place) / str(steps), steps)
            write_run(Path(place) / f"{steps}-small", 10)
            rows += measure(folder, steps, before, options.pairs or (3 if options.quick else 5))
    publish(rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["turn"]:
        turn(*sys.argv[2:])
    else:
        main()
