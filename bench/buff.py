"""The planner's predictions against measured runs, and how long it takes to plan.

    python bench/buff.py [--quick] [--pairs N] [--json FILE] [--data FILE]

Predictions: on a table of measured GPT runs (--data, or calibration/gpt_a100_one_node.csv in the folder that
ESPALIER_DATA names; left out without it), fitted to a random fifth and scored on the rest, several times. Peers, on the
same rows: the same model from datasheets alone, and a regression fitted to the same fifth with six coefficients: a
constant, layers passed, FLOP, tensor traffic, gradients, hand-overs. Stacks: every
table of measured runs in that folder, by datasheets and by a calibration on each other one. Planning: the whole command
for Llama's 7B on 64, 1,024 and 10,000 GPUs, beside the goal of 5 s.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).parent))
from espalier.plan.calibration import DATASHEET, calibrate
from espalier.plan.measurements import score
from espalier.plan.measurements.table import MeasuredRow as Measured
from espalier.plan.measurements.table import read
from table import Row, arguments, compare, publish

TABLE = Path("calibration") / "gpt_a100_one_node.csv"
SHARE = 0.2
DEVICES = (64, 1024, 10_000)
GOAL = 5.0
RECIPE = """\
[model]
kind = "gpt"
shape = "llama-7b"

[train]
sequence = 4096
batch_tokens = 67_108_864
precision = "bf16"
optimizer = "adamw"
"""
NOTE = """
On the whole public table of which this is a sample, others' published figures are, for MAPE, Spearman and mean regret:
Calculon 38.9 %, 0.861, 10.0 %; a regression with six coefficients 8.9 %, 0.985, 3.5 %. Not measured here."""


class Split(NamedTuple):
    """One random fifth fitted to, and the scores of the rest: ours, from datasheets alone, by regression."""

    ours: score.Scores
    datasheet: score.Scores
    regression: score.Scores
    seconds: float


# --- predictions -------------------------------------------------------------------------------------------------


def split(rows: Sequence[Measured], seed: int) -> Split:
    order = np.random.default_rng(seed).permutation(len(rows))
    size = round(SHARE * len(rows))
    fitted, rest = [rows[at] for at in order[:size]], [rows[at] for at in order[size:]]
    began = time.perf_counter()
    calibration = calibrate([row.measurement for row in fitted])
    taken = time.perf_counter() - began
    plain = score.predict([row.measurement for row in rest])
    regression = [
        one._replace(seconds=float(seconds)) for one, seconds in zip(plain, regressed(fitted, rest), strict=True)
    ]
    return Split(
        score.score(rest, calibration),
        score.score(rest, DATASHEET, plain),
        score.score(rest, DATASHEET, regression),
        taken,
    )


def regressed(fitted: Sequence[Measured], rest: Sequence[Measured]) -> np.ndarray:
    """Seconds of `rest` by non-negative least squares of relative errors of `fitted`."""
    known = features(fitted)
    scale = known.max(axis=0) + 1e-300  # the columns have different units
    measured = np.array([[row.measurement.step_seconds] for row in fitted])
    coefficients, _ = nnls(known / scale / measured, np.ones(len(fitted)))
    return features(rest) / scale @ coefficients


def features(rows: Sequence[Measured]) -> np.ndarray:
    """What a step's time is a sum of, if every part had a constant speed [rows, 6]."""
    found = []
    for row in rows:
        request, layout = row.measurement.request, row.measurement.layout
        micro_batches = request.profile.global_batch / (layout.dp * layout.micro_batch)
        passes = request.profile.layers / layout.pp * (micro_batches + layout.pp - 1)
        stream = layout.micro_batch * request.profile.tokens_per_sample * request.profile.width
        found.append(
            [
                1.0,
                passes,
                request.model_flops / layout.world * (1 + (layout.pp - 1) / micro_batches),
                passes * stream * (layout.tp - 1) / layout.tp,
                request.profile.parameters / (layout.tp * layout.pp) * (layout.dp - 1) / layout.dp,
                (micro_batches + 2 * layout.pp - 2) * (layout.pp > 1),
            ]
        )
    return np.array(found)


def predictions(path: Path, splits: int) -> list[Row]:
    """Rows of MAPE, rank correlation and regret, and what the intervals were."""
    table = read(path)
    found = [split(table.rows, seed) for seed in range(splits)]
    case = f"{len(table.rows)} runs, a fifth fitted, {splits} splits"
    rows = []
    for peer in ("datasheet", "regression"):
        named = {"datasheet": "datasheets alone", "regression": "six-coefficient regression"}[peer]
        for metric, unit, higher in (
            ("mape", "MAPE", False),
            ("spearman", "Spearman", True),
            ("regret_of_three", "mean regret, groups of 3 or more", False),
        ):
            pairs = [(getattr(one.ours, metric), getattr(getattr(one, peer), metric)) for one in found]
            rows.append(compare(case, named, unit, [pair for pair in pairs if None not in pair], higher))
    for seed, one in enumerate(found):
        low, high = one.ours.regret_interval or (0.0, 0.0)
        print(
            f"split {seed}: MAPE {one.ours.mape:.2%}, Spearman {one.ours.spearman:.4f}, mean regret "
            f"{one.ours.regret_of_three:.2%} (95 % bootstrap interval {low:.2%} to {high:.2%}, "
            f"{one.ours.groups_of_three} groups), largest {one.ours.largest_regret:.2%}; {one.ours.covered:.0%} in the "
            f"band; fitted in {one.seconds:.1f} s"
        )
    means = [statistics.mean(getattr(one.ours, name) for one in found) for name in ("mape", "spearman")]
    print(f"mean of splits: MAPE {means[0]:.2%}, Spearman {means[1]:.4f}{NOTE}\n")
    return rows


# --- stacks ------------------------------------------------------------------------------------------------------


def h100(row: dict[str, str]) -> dict[str, Any]:
    """A published step of NeMo on H100s, as a JSON line."""
    number = {key: int(value) for key, value in row.items() if key not in ("model", "step_s")}
    shape = {key: number[key] for key in ("width", "heads", "kv_heads", "feed_forward", "vocabulary")}
    tied = row["model"].startswith("gpt3")
    return {
        "model": {**shape, "depth": number["layers"], "gated": bool(number["gated"]), "tied": tied},
        "cluster": {
            "nodes": [{"device": "H100", "count": number["gpus"] // 8, "devices": 8}],
            "links": {"between": "3200Gbit/s"} if number["gpus"] > 8 else {},
        },
        "layout": {
            **{key: number[key] for key in ("dp", "tp", "pp", "cp", "vp")},
            "micro_batch": number["mbs"], "algorithm": "zero-1",
        },
        "train": {
            "sequence": number["seq"], "batch_tokens": number["seq"] * number["gbs"], "precision": "bf16",
            "executor": "nemo",
        },
        "measured": {"step_seconds": float(row["step_s"])},
    }  # fmt: skip


def rtx3090(row: dict[str, str]) -> dict[str, Any]:
    """A published step of TouchNet (on TorchTitan) on RTX 3090s, as a JSON line."""
    return {
        "model": {
            "depth": 16, "width": 2048, "heads": 32, "kv_heads": 8, "feed_forward": 8192, "gated": True,
            "vocabulary": 128_256, "tied": False,
        },
        "cluster": {"nodes": [{"device": "RTX 3090", "devices": 8}]},
        "layout": {
            "dp": int(row["fsdp"]), **{key: int(row[key]) for key in ("tp", "pp", "cp")}, "micro_batch": 1,
            "algorithm": "fsdp", "recompute": "block",
        },
        "train": {
            "sequence": int(row["seq"]), "batch_tokens": 32_768, "precision": "bf16", "compile": True,
            "executor": "torchtitan",
        },
        "measured": {"step_seconds": float(row["step_s"])},
    }  # fmt: skip


OTHERS = {"h100_nemo_bf16.csv": h100, "rtx3090_pcie.csv": rtx3090}


def stacks(main_table: Path, folder: Path) -> dict[str, Sequence[Measured]]:
    """The rows of every table beside the main one, by its name."""
    found = {main_table.stem: read(main_table).rows}
    for name, line in OTHERS.items():
        path = main_table.with_name(name)
        if not path.exists():
            print(f"{name} is left out: it is not beside {main_table.name}.")
            continue
        text = [one for one in path.read_text().splitlines() if not one.startswith("#")]
        made = folder / f"{path.stem}.jsonl"
        made.write_text("\n".join(json.dumps(line(row)) for row in csv.DictReader(text)))
        found[path.stem] = read(made).rows
    return found


def across(tables: dict[str, Sequence[Measured]]) -> None:
    """Prints how each table is met by datasheets, and by a calibration on every other one."""
    known = {"datasheets": DATASHEET}
    known |= {name: calibrate([row.measurement for row in rows]) for name, rows in tables.items()}
    print("| scored | calibrated on | rows | MAPE | median error | Spearman | mean regret | in the band |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rows in tables.items():
        for source, calibration in known.items():
            if source != name:
                one = score.score(rows, calibration)
                cells = (
                    share(one.mape),
                    share(one.bias),
                    _rank(one.spearman),
                    share(one.mean_regret),
                    share(one.covered),
                )
                print(f"| {name} | {source} | {one.timed} | {' | '.join(cells)} |")
    print()


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rank(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# --- planning ----------------------------------------------------------------------------------------------------


def planning(devices: int, repeats: int, folder: Path) -> Row:
    """The command from start to end, beside the goal."""
    recipe, cluster = folder / "recipe.toml", folder / f"{devices}.toml"
    recipe.write_text(RECIPE)
    cluster.write_text(
        f'[[nodes]]\ndevice = "A100-80GB"\ncount = {devices // 8}\ndevices = 8\n[links]\nbetween = "800Gbit/s"\n'
    )
    command = [sys.executable, "-m", "espalier", "plan", str(recipe), "--cluster", str(cluster), "--json"]
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        taken.append(time.perf_counter() - began)
        if done.returncode != 0:
            raise SystemExit(f"planning for {devices} devices failed: {done.stderr or done.stdout}")
    layout = json.loads(done.stdout)["layout"]
    print(f"{devices:,} devices: {layout}")
    row = compare(f"plan Llama 7B on {devices:,} GPUs", "goal", "s", [(one, GOAL) for one in taken], False)
    return msgspec.structs.replace(row, spread=f"{row.spread}; the goal is not a measurement")


def data(named: str | None) -> Path | None:
    """The table of measured runs, if there is one."""
    folder = os.environ.get("ESPALIER_DATA")
    path = Path(named) if named else Path(folder) / TABLE if folder else None
    if path is None or not path.exists():
        where = f"{path} is not there" if path else "neither --data nor ESPALIER_DATA is given"
        print(f"Predictions are left out: {where}.\n")
        return None
    return path


def main() -> None:
    options = arguments(__doc__ or "", data={"metavar": "FILE"})
    path = data(options.data)
    rows = predictions(path, options.pairs or (3 if options.quick else 10)) if path else []
    with tempfile.TemporaryDirectory() as folder:
        if path:
            across(stacks(path, Path(folder)))
        rows += [planning(devices, 3 if options.quick else 7, Path(folder)) for devices in DEVICES]
    publish(rows, options.json)


if __name__ == "__main__":
    main()
