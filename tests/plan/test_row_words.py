"""Words of measured rows: each changes what is predicted, or the row's result or a note names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rows import ROW, lines

from espalier.plan.calibration import DATASHEET
from espalier.plan.measurements import score
from espalier.plan.measurements.run_records import _KEYS, UNPRICED
from espalier.plan.measurements.table import MeasuredTable, read

H100 = {"name": "H100", "kind": "cuda", "memory": 2**36, "memory_bandwidth": 3.35e12,
        "flops": {"fp8": 1979e12, "bf16": 989e12, "fp16": 989e12, "fp32": 67e12}}  # fmt: skip
NODE: dict[str, Any] = ROW["cluster"]["nodes"][0]
LATENT = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CUT: dict[str, Any] = {"layout": {"dp": 4, "tp": 2, "pp": 2, "accumulate": ...}, "train": {"batch_tokens": 32 * 1024}}
RING: dict[str, Any] = {"layout": {"dp": 1, "cp": 16, "sp": 16, "accumulate": ...}, "train": {"batch_tokens": 4096}}
SPREAD: dict[str, Any] = {"model": {"kind": "moe", "experts": 8, "active": 2}}
ZERO = {"layout": {"shard": {"optimizer": 16}}}
WAITING = {"layout": {"micro_batch": 1, "dp": 1}, "train": {"batch_tokens": 1024}, "model": {"width": 4096}}

VALUES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "model.kind": ("gpt", "moe", {"model": {"experts": ..., "active": ...}}),
    "model.depth": (24, 12, {}),
    "model.shape": ("llama-7b", "llama3-8b", {"model": dict.fromkeys(ROW["model"], ...)}),
    "model.width": (2048, 1024, {}),
    "model.heads": (16, 8, {"model": {"head_size": 64}}),
    "model.kv_heads": (16, 4, {}),
    "model.feed_forward": (8192, 4096, {}),
    "model.vocabulary": (51200, 32000, {}),
    "model.tied": (True, False, {}),
    "model.head_size": (128, 75, {}),
    "model.experts": (8, 16, SPREAD),
    "model.active": (2, 4, SPREAD),
    "model.shared": (0, 4096, SPREAD),
    "model.gated": (True, False, {}),
    "model.fused": (True, False, {}),
    "model.eager": (True, False, {}),
    **{f"model.{name}": (value, 2 * value, {"model": LATENT}) for name, value in LATENT.items()},
    "layout.dp": (16, 8, {}),
    "layout.tp": (2, 4, {"layout": {"dp": 4}}),
    "layout.sp": (1, 2, {"layout": {"dp": 8}}),
    "layout.cp": (1, 2, {"layout": {"dp": 8}}),
    "layout.pp": (1, 2, {"layout": {"dp": 8}}),
    "layout.ep": (1, 8, SPREAD),
    "layout.algorithm": ("fsdp", "zero-1", {}),
    "layout.shard": ({"optimizer": 16}, {"optimizer": 8}, {}),
    "layout.micro_batch": (2, 1, {}),
    "layout.accumulate": (1, 2, {"train": {"batch_tokens": ...}}),
    "layout.recompute": ("block", "none", {}),
    "layout.precision": ("fp16", "fp32", {"train": {"precision": ...}}),
    **{f"layout.{name}": (1, 2, CUT) for name in ("chunks", "vp", "interleave")},
    "layout.stages": ([12, 12], [14, 10], CUT),
    "layout.window": (1, 8, RING),
    "layout.placement": ("head_first", "context_first", {**RING, "layout": {**RING["layout"], "cp": 4}}),
    "layout.schedule": ("1f1b", "zero_bubble", CUT),
    "train.sequence": (1024, 2048, {}),
    "train.batch_tokens": (32768, 65536, {}),
    "train.precision": ("bf16", "fp8", {"cluster": {"nodes": [{"device": H100, "devices": 8, "count": 2}]}}),
    "train.compile": (True, False, {"model": {"fused": False}, "layout": {"recompute": "none"}}),
    "train.recompute": ("block", "none", {"layout": {"recompute": ...}}),
    "train.optimizer": ("adamw", "muon", {}),
    "tune.kind": ("lora", "full", {}),
    "tune.rank": (8, 64, {}),
    "tune.targets": (["query"], ["q_proj", "v_proj"], {}),
    "tune.frozen": ("bf16", "nf4", {}),
    "measured.step_seconds": (1.0, 2.0, {}),
    "measured.peak_gib": (30, 40, {}),
    "measured.out_of_memory": (True, False, {}),
    "measured.memory": ("allocated", "device", {}),
}  # fmt: skip
STACK: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "executor": ("nemo", "internevo", {}),
    "sequence_parallel": (True, False, CUT),
    "overlap": (True, False, {}),
    "graphs": (True, False, WAITING),
    "bucket": ("25MiB", "whole", {}),
    "gradients": ("fp32", "bf16", {}),
    "states": ("fp32", "bf16", {}),
    "update": ("foreach", "fused", WAITING),
    "attention": ("flash", "written", {}),
    "loss": ("plain", "fused", {"layout": {"recompute": "none"}, "train": {"update": "fused", "gradients": "fp32"}}),
}
VALUES |= {f"{table}.{key}": case for table in ("layout", "train") for key, case in STACK.items()}


def scored(folder: Path, table: str, key: str, value: Any, base: dict[str, Any]) -> tuple[MeasuredTable, Any]:
    """The row with that value at a key, and all that is predicted and measured of it."""
    row = {name: {**ROW[name], **base.get(name, {})} for name in ROW}
    row.setdefault(table, {})[key] = value
    made = {name: {word: given for word, given in words.items() if given is not ...} for name, words in row.items()}
    rows = read(lines(folder, json.dumps(made)))
    measured = rows.rows[0].measurement
    predicted = score.predict(rows.measurements)[0]
    return rows, (predicted, measured.step_seconds, measured.peak_bytes, measured.out_of_memory)


def test_every_word_is_tried_here() -> None:
    unpriced = {f"{table}.{key}" for table, keys in UNPRICED.items() for key in keys}
    assert {f"{table}.{key}" for table, keys in _KEYS.items() for key in keys} == unpriced | {*VALUES}


@pytest.mark.parametrize("name", VALUES)
def test_a_word_changes_the_prediction(tmp_path: Path, name: str) -> None:
    (table, key), (left, right, base) = name.split("."), VALUES[name]
    assert scored(tmp_path, table, key, left, base)[1] != scored(tmp_path, table, key, right, base)[1]


@pytest.mark.parametrize("name", [f"{table}.{key}" for table, keys in UNPRICED.items() for key in keys])
def test_a_word_that_changes_nothing_is_named_in_the_result(tmp_path: Path, name: str) -> None:
    table, key = name.split(".")
    value: Any = {
        "family": "qwen2",
        "attention_bias": True,
        "layers": "first 1",
        "balancing": "bias",
        "rope": {"factor": 2.0},
        "normalized": False,
    }.get(key, 1)
    if table == "model" and key not in ("name", "initial"):
        base = SPREAD if key in ("balance", "balancing", "z_loss", "normalized", "max_iterations") else {}
        base |= {"model": {"initial": "a base"}} if key == "layers" else {}
    else:
        base, value = {}, "x"
    rows, _ = scored(tmp_path, table, key, value, base)
    assert name in rows.rows[0].unpriced
    written = score.with_predictions(rows, score.predict(rows.measurements), DATASHEET)
    assert name in json.loads(written)["predicted"]["unpriced"]


def test_words_inside_tables_are_named_too(tmp_path: Path) -> None:
    optimizer = {"kind": "adamw", "learning_rate": 1e-4}
    rows, _ = scored(tmp_path, "train", "optimizer", optimizer, {"cluster": {"nodes": [{**NODE, "price": 2.5}]}})
    assert rows.rows[0].unpriced == ("train.optimizer.learning_rate", "cluster.nodes.price")


def test_a_key_beside_the_tables_is_named(tmp_path: Path) -> None:
    assert read(lines(tmp_path, {**ROW, "id": 7, "predicted": {}})).notes == (
        "row.id is not known here and was left out",
    )
