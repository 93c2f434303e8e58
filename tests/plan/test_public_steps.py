"""Public figures of training steps on cards people own, beside what the planner predicts from the catalogue alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rows import lines

from espalier.plan.calibration import DATASHEET, Batch
from espalier.plan.calibration_factors import PLAIN
from espalier.plan.measurements.score import score
from espalier.plan.measurements.table import read

GPT2 = {"depth": 12, "width": 768, "heads": 12, "feed_forward": 3072, "vocabulary": 50304, "tied": True}
BERT = {"depth": 24, "width": 1024, "heads": 16, "feed_forward": 4096, "vocabulary": 4769, "tied": True}
"""BERT-large; of 30,522 tokens in the vocabulary, its head scores 0.156 for each position: 80 are masked of 512."""
LLAMA = {
    "depth": 16, "width": 2048, "heads": 32, "kv_heads": 8, "feed_forward": 8192, "vocabulary": 128256, "tied": False,
    "gated": True,
}  # fmt: skip
BAND = 0.4
"""Of cards whose products were measured (`[spread]` of devices.toml)."""


def row(
    model: dict[str, Any], devices: tuple[str, int], layout: dict[str, Any], tokens: tuple[int, int], seconds: float
) -> dict[str, Any]:
    """A measured step; `tokens`: of a sequence and of the batch."""
    name, count = devices
    return {
        "model": model,
        "cluster": {"nodes": [{"device": name, "devices": count}]},
        "layout": {"precision": "bf16", "recompute": "none", **layout},
        "train": {"sequence": tokens[0], "batch_tokens": tokens[1], "compile": True, "update": "fused"},
        "measured": {"step_seconds": seconds},
    }


def bert(tokens: int, samples: int, rate: float) -> dict[str, Any]:
    """A step of DeepSpeed's BERT, whose kernels do a residual with its norm, at `rate` samples/s."""
    layout = {"micro_batch": samples, "precision": "fp16"}
    made = row(BERT, ("V100-32GB", 1), layout, (tokens, tokens * samples), samples / rate)
    return {**made, "train": {**made["train"], "loss": "fused"}}


def megatron(layers: int, width: int, heads: int, ranks: int, teraflops: float) -> dict[str, Any]:
    """A step of 8 sequences of 1,024 tokens on V100s that sustain so many TFLOP/s each, recomputation not counted."""
    model = {"depth": layers, "width": width, "heads": heads, "feed_forward": 4 * width, "vocabulary": 51200,
             "tied": True, "fused": False}  # fmt: skip
    flop = 8 * 1024 * (72 * layers * width**2 + 12 * layers * 1024 * width + 6 * 51200 * width)
    layout = {"dp": 1, "tp": ranks, "micro_batch": 8, "recompute": "block", "precision": "fp16"}
    return row(model, ("V100-32GB", ranks), layout, (1024, 8192), flop / (ranks * teraflops * 1e12))


FSDP = {"dp": 8, "algorithm": "fsdp", "micro_batch": 1, "recompute": "block"}
CUT = {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 1, "recompute": "block",
       "shard": {"params": 2, "grads": 2, "optimizer": 2}}  # fmt: skip
STEPS = {
    "nanoGPT, 8 A100-40GB (karpathy/nanoGPT issue 110)": (
        row(GPT2, ("A100-40GB", 8), {"micro_batch": 12}, (1024, 491_520), 0.562),
        0.35,
    ),
    "nanoGPT, RTX 4090 (karpathy/nanoGPT pull request 225)": (
        row(GPT2, ("RTX 4090", 1), {"micro_batch": 12}, (1024, 491_520), 4.622),
        BAND,
    ),
    "BERT-large at 512 tokens, V100-32GB: 52 samples/s (DeepSpeed, fastest BERT training, May 2020)": (
        bert(512, 16, 52),
        BAND,
    ),
    "BERT-large at 128 tokens, V100-32GB: 272 samples/s (the same)": (
        bert(128, 64, 272),
        BAND,
    ),
    "Megatron-LM 1.2B, V100-32GB: 39 TFLOP/s (arXiv 1909.08053, section 1)": (megatron(40, 1536, 16, 1, 39), BAND),
    "Megatron-LM 8.3B, 8 tensor ranks on V100-32GB: 77 % of that each (arXiv 1909.08053, figure 5)": (
        megatron(72, 3072, 32, 8, 0.77 * 39),
        BAND,
    ),
    "Llama 3.2 1B, 8 RTX 3090, FSDP (TouchNet pull requests 10 and 13)": (
        row(LLAMA, ("RTX 3090", 8), FSDP, (4096, 32_768), 2.0),
        BAND,
    ),
    "Llama 3.2 1B, 8 RTX 3090, tensor ranks, stages and FSDP (the same)": (
        row(LLAMA, ("RTX 3090", 8), CUT, (4096, 32_768), 3.0),
        BAND,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_public_step_is_met_within_the_tolerance(name: str, tmp_path: Path) -> None:
    told, tolerance = STEPS[name]
    (found,) = read(lines(tmp_path, told)).measurements
    assert found.step_seconds is not None
    assert float(Batch([found]).seconds(PLAIN)[0]) == pytest.approx(found.step_seconds, rel=tolerance)


def test_public_steps_lie_in_the_predictions_own_bands_and_are_met_within_a_quarter_on_average(tmp_path: Path) -> None:
    found = score(read(lines(tmp_path, *(told for told, _ in STEPS.values()))).rows, DATASHEET)
    assert found.covered is not None
    assert found.covered >= 0.8
    assert found.mape is not None
    assert found.mape < 0.25
