"""Measurement files for the planner's tests, and made-up measurements with known coefficients."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from asked import gpus

from espalier.plan.calibration import Batch, Measurement
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.layouts import Layouts
from espalier.plan.reference_models import ReferenceDecoder
from espalier.recipe.decoder_shapes import DecoderSizes

HEAD = "gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,iter_ms"
LINE = "8,32,2,2048,16,24,1024,2,2,2,900.5"
ROW: dict[str, Any] = {
    "model": {"depth": 24, "width": 2048, "heads": 16, "feed_forward": 8192, "vocabulary": 51200, "tied": True},
    "cluster": {"nodes": [{"device": "A100-80GB", "count": 2, "devices": 8}], "links": {"between": "400Gbit/s"}},
    "layout": {"dp": 16, "micro_batch": 2, "accumulate": 1, "recompute": "block"},
    "train": {"sequence": 1024, "batch_tokens": 32768, "precision": "fp16"},
    "measured": {"step_seconds": 1.0, "peak_gib": 40.0, "out_of_memory": False},
}


def changed(**tables: dict[str, Any]) -> dict[str, Any]:
    """ROW with keys of its tables changed; a key set to ... is left out."""
    row = {name: {**ROW[name], **tables.get(name, {})} for name in ROW}
    return {name: {key: value for key, value in table.items() if value is not ...} for name, table in row.items()}


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def table(folder: Path, *body: str, head: str = HEAD) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join((head, *body)) + "\n")
    return path


def sizes(width: int, layers: int, heads: int = 16) -> DecoderSizes:
    return DecoderSizes(
        layers=layers, width=width, heads=heads, kv_heads=heads, feed_forward=4 * width, vocabulary=51200, context=2048,
        tied=True, rope_theta=1e4, norm_epsilon=1e-5,
    )  # fmt: skip


def unmeasured() -> list[Measurement]:
    """Layouts of a small decoder on one machine and of two large ones on two, with tensor, data and pipeline ranks."""
    found = []
    for width, layers, machines in ((1024, 12, 1), (4096, 24, 2), (16384, 8, 2)):
        request = ReferenceDecoder(sizes(width, layers), 1024, gated=False).request(64, "fp16")
        cluster, ranks = gpus(count=machines), 8 * machines
        for tp, pp, micro_batch in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
            if tp * pp <= ranks:
                dp = ranks // (tp * pp)
                found.append(Measurement(request, cluster, megatron(dp, tp, pp, micro_batch)))
    return found


def megatron(dp: int, tp: int, pp: int, micro_batch: int) -> Layouts:
    return Layouts(algorithm="megatron", recompute="block", dp=dp, tp=tp, pp=pp, micro_batch=micro_batch)


def timed(
    rows: Sequence[Measurement], factors: CostFactors = PLAIN, noise: float = 0.0, seed: int = 0
) -> list[Measurement]:
    """The rows as if measured on machines with these factors, with log-normal noise."""
    seconds, peaks, _ = Batch(rows).predict(factors)
    scatter = np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return [
        replace(row, step_seconds=float(seconds[at] * scatter[at]), peak_bytes=float(peaks[at]))
        for at, row in enumerate(rows)
    ]
