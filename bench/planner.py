"""The planner's seconds against every table of measured steps, by device, on two halves of each table.

    python bench/planner.py [--half development|check|both] [--only TABLE] [--rows] [--json FILE]

Tables: the folder `calibration` in the folder that ESPALIER_DATA names; a table that is not there is left out. A row
belongs to a half by a hash of its text, whatever the order of the file: constants are fitted on `development`, and
`check` is only looked at. Printed: rows, MAPE, bias (median), Spearman, and the share of rows in their own bands.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from buff import h100, rtx3090, share
from espalier.plan.calibration import DATASHEET
from espalier.plan.measurements import score
from espalier.plan.measurements.table import MeasuredRow, read
from table import arguments

Line = Mapping[str, Any]


def gpt_one_node(row: Mapping[str, str]) -> Line:
    """GPT by Megatron-LM on one machine of A100s (vTrain, arXiv 2312.12391)."""
    at = {name: int(value) for name, value in row.items() if name != "iter_ms"}
    return _line(
        {"depth": at["layers"], "width": at["hidden"], "heads": at["heads"], "feed_forward": 4 * at["hidden"],
         "vocabulary": 51200, "tied": True},
        _machines("A100-80GB", at["gpus"], 8),
        {"dp": at["dp"], "tp": at["tp"], "pp": at["pp"], "micro_batch": at["micro_batch"], "recompute": "block"},
        (at["seq"], at["global_batch"], "fp16"),
        float(row["iter_ms"]) / 1000,
        executor="megatron-lm", gradients="fp16", attention="written", sequence_parallel=False,
    )  # fmt: skip


def one_gpu(row: Mapping[str, str]) -> Line | None:
    """GPT under torch.compile on one GPU (languini-kitchen); None: it ran out of memory."""
    at = {name: int(row[name]) for name in ("layers", "width", "heads", "batch")}
    if not row["step_ms"]:
        return None
    compiled = row["gpu"] not in ("P100", "TITAN X")
    return _line(
        {"depth": at["layers"], "width": at["width"], "heads": at["width"] // 64, "feed_forward": 4 * at["width"],
         "vocabulary": 16384, "tied": False, "eager": not compiled},
        _machines(row["gpu"], 1, 1),
        {"micro_batch": at["batch"]},
        (512, at["batch"], "fp16"),
        float(row["step_ms"]) / 1000,
        attention="written", compile=compiled,
    )  # fmt: skip


QWEN = {
    "0.5B": (24, 896, 14, 2, 4864, True),
    "1.5B": (28, 1536, 12, 2, 8960, True),
    "3B": (36, 2048, 16, 2, 11008, True),
    "7B": (28, 3584, 28, 4, 18944, False),
    "14B": (48, 5120, 40, 8, 13824, False),
    "32B": (64, 5120, 40, 8, 27648, False),
}
"""Layers, width, heads, key-value heads, feed-forward, tied tables of Qwen2.5."""


def home_cards(row: Mapping[str, str]) -> Line | None:
    """Qwen2.5 by llmq on cards people own; None: states or activations wait in host memory, which a row cannot say."""
    flags = row["flags"].split()
    if any(flag.startswith("offload") for flag in flags):
        return None
    depth, width, heads, kv_heads, feed_forward, tied = QWEN[row["model"]]
    count = int(row["gpus"])
    words = {"params": "shard-weights", "grads": "shard-gradients"}
    shard = {name: count for name, flag in words.items() if flag in flags}
    half = {"recompute-ffn", "recompute-att", "recompute-block"} & set(flags)
    recompute = "block" if "recompute-block" in flags else "selective" if half else "none"
    return _line(
        {"depth": depth, "width": width, "heads": heads, "kv_heads": kv_heads, "feed_forward": feed_forward,
         "vocabulary": 151_936, "tied": tied, "gated": True},
        _machines(row["gpu"], count, 8),
        {"dp": count, "micro_batch": int(row["micro_batch"]), "algorithm": "zero-1", "recompute": recompute,
         "shard": {**shard, "optimizer": count}},
        (1024, 512, "bf16"),
        float(row["step_s"]),
        compile=True, loss="chunked", update="fused",
    )  # fmt: skip


EXPERTS = {
    "GPT OSS 120B": {"depth": 36, "width": 2880, "heads": 64, "kv_heads": 8, "head_size": 64, "feed_forward": 2880,
                     "vocabulary": 201_088, "experts": 128, "active": 4, "tied": False},
    "Qwen3_235B_a22B": {"depth": 94, "width": 4096, "heads": 64, "kv_heads": 4, "head_size": 128, "feed_forward": 1536,
                        "vocabulary": 151_936, "experts": 128, "active": 8, "tied": False},
    "DeepSeekV3": {"depth": 61, "width": 7168, "heads": 128, "kv_heads": 128, "feed_forward": 2048, "shared": 2048,
                   "vocabulary": 129_280, "experts": 256, "active": 8, "tied": False, "q_lora_rank": 1536,
                   "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}  # fmt: skip
"""As their configurations say. DeepSeek's first three layers are dense: counted as experts', of about the same size."""


def experts(row: Mapping[str, str]) -> Line:
    """Mixtures of experts by Megatron-Bridge, with CUDA graphs where its recipes have them."""
    at = {name: int(row[name]) for name in ("gpus", "tp", "pp", "cp", "vp", "ep", "mbs", "gbs", "seq")}
    dp = at["gpus"] // (at["tp"] * at["pp"] * at["cp"])
    name = row["system"]
    each = 72 if name.startswith("GB") else 8
    return _line(
        {"kind": "moe", "gated": True, **EXPERTS[row["model"]]},
        _machines(name, at["gpus"], each, f"{each * (800 if name.endswith('300') else 400)}Gbit/s"),
        {"dp": dp, "tp": at["tp"], "pp": at["pp"], "vp": at["vp"], "ep": at["ep"], "micro_batch": at["mbs"],
         "algorithm": "zero-1"},
        (at["seq"], at["gbs"], "bf16"),
        at["gbs"] * at["seq"] / at["gpus"] / float(row["tokens_s_gpu"]),
        executor="nemo", graphs=row["model"] != "GPT OSS 120B" or name.endswith("300"),
    )  # fmt: skip


SIZES = {"7.5": (32, 4096, 32), "18": (40, 6144, 48), "22": (48, 6144, 48), "30": (48, 7168, 56), "39": (48, 8192, 64),
    "52": (64, 8192, 64)}  # fmt: skip
"""Layers, width and heads of about so many billion parameters; the table says no more."""


def v100(row: Mapping[str, str]) -> Line:
    """GPT by Megatron-LM on nodes of 4 V100s (BigScience). Three rows name fewer GPUs than their ranks."""
    at = {name: int(row[name]) for name in ("gpus", "tp", "dp", "pp", "mbs", "gbs")}
    depth, width, heads = SIZES[row["size_b"]]
    return _line(
        {"depth": depth, "width": width, "heads": heads, "feed_forward": 4 * width, "vocabulary": 51200, "tied": True},
        _machines("V100-32GB", at["tp"] * at["dp"] * at["pp"], 4, "400Gbit/s"),
        {"dp": at["dp"], "tp": at["tp"], "pp": at["pp"], "micro_batch": at["mbs"], "recompute": "block"},
        (1024, at["gbs"], "fp16"),
        float(row["step_s"]),
        executor="megatron-lm", attention="written", sequence_parallel=False,
    )  # fmt: skip


def nanotron(row: Mapping[str, str]) -> Line | None:
    """Llama 1B by nanotron on H100s; None: it ran out of memory."""
    if not row["step_s"]:
        return None
    at = {name: int(row[name]) for name in ("gpus", "dp", "tp", "pp", "mbs")}
    return _line(
        {"depth": 24, "width": 2048, "heads": 32, "kv_heads": 32, "feed_forward": 4096, "vocabulary": 50257,
         "tied": True, "gated": True},
        _machines("H100", at["gpus"], 8, "3200Gbit/s"),
        {"dp": at["dp"], "tp": at["tp"], "pp": at["pp"], "micro_batch": at["mbs"], "algorithm": "zero-1"},
        (4096, 1024, "bf16"),
        float(row["step_s"]),
        executor="nanotron", compile=False,
    )  # fmt: skip


def _machines(device: str, count: int, each: int, between: str = "800Gbit/s") -> Line:
    machines = -(-count // each)
    nodes = [{"device": device, "count": machines, "devices": count // machines}]
    return {"nodes": nodes, "links": {"between": between} if machines > 1 else {}}


def _line(model: Line, cluster: Line, layout: Line, step: tuple[int, int, str], seconds: float, **train: Any) -> Line:
    """A JSON line; `step`: tokens of a sequence, sequences of a step, precision."""
    sequence, samples, precision = step
    return {
        "model": model,
        "cluster": cluster,
        "layout": layout,
        "train": {"sequence": sequence, "batch_tokens": sequence * samples, "precision": precision, **train},
        "measured": {"step_seconds": seconds},
    }


TABLES: Mapping[str, tuple[Callable[[dict[str, str]], Line | None], Sequence[str]]] = {
    "gpt_a100_one_node": (gpt_one_node, ()),
    "h100_nemo_bf16": (h100, ("model",)),
    "rtx3090_pcie": (rtx3090, ()),
    "one_gpu_p100_to_h100_gpt": (one_gpu, ("gpu",)),
    "home_cards_qwen": (home_cards, ("gpu",)),
    "experts_bf16": (experts, ("model", "system")),
    "gpt_v100": (v100, ("size_b",)),
    "llama_1b_h100_dp_tp_pp": (nanotron, ()),
}
"""How each table is read, and the columns by which its rows are told apart."""
HALVES = ("development", "check")


def half_of(row: Mapping[str, str]) -> str:
    """The half a row belongs to."""
    text = ",".join(f"{name}={row[name]}" for name in sorted(row))
    return HALVES[hashlib.sha256(text.encode()).digest()[0] % 2]


def rows_of(path: Path, folder: Path) -> list[tuple[dict[str, str], MeasuredRow]]:
    """The rows of a table that can be asked, as they stand and as they were read."""
    text = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    given = list(csv.DictReader(text))
    asked = [(row, line) for row in given if (line := TABLES[path.stem][0](row)) is not None]
    file = folder / f"{path.stem}.jsonl"
    file.write_text("\n".join(json.dumps(line) for _, line in asked))
    return list(zip((row for row, _ in asked), read(file).rows, strict=True))


def report(name: str, rows: Sequence[tuple[dict[str, str], MeasuredRow]], each: bool) -> None:
    """Prints the scores of a table, of each of its kinds, and of each row."""
    kinds: dict[str, list[tuple[dict[str, str], MeasuredRow]]] = {}
    for row, measured in rows:
        kind = " ".join(row[column] for column in TABLES[name][1])
        kinds.setdefault(kind, []).append((row, measured))
    groups = {"": rows} | (kinds if len(kinds) > 1 else {})
    for kind, members in groups.items():
        scores = score.score([measured for _, measured in members], DATASHEET)
        rank = "-" if scores.spearman is None else f"{scores.spearman:.3f}"
        cells = (share(scores.mape), share(scores.bias), rank, share(scores.covered))
        print(f"| {name if not kind else '- ' + kind} | {scores.timed} | {' | '.join(cells)} |")
    if each:
        for (row, measured), predicted in zip(
            rows, score.predict([measured.measurement for _, measured in rows]), strict=True
        ):
            taken = measured.measurement.step_seconds or 0.0
            terms = {
                name: round(value, 4) for name, value in predicted.terms.items() if value > 0.01 * predicted.seconds
            }
            print(f"{predicted.seconds / taken - 1:+.1%} {predicted.seconds:.4g} {','.join(row.values())} {terms}")


def main() -> None:
    options = arguments(
        __doc__ or "",
        half={"choices": (*HALVES, "both"), "default": "both"},
        only={"choices": tuple(TABLES)},
        rows={"action": "store_true"},
    )
    folder = Path(os.environ.get("ESPALIER_DATA", ".")) / "calibration"
    print("| table | rows | MAPE | bias | Spearman | in the band |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name in [options.only] if options.only else TABLES:
            path = folder / f"{name}.csv"
            if not path.exists():
                print(f"| {name} is not in {folder} | | | | | |")
                continue
            rows = rows_of(path, Path(scratch))
            for half in HALVES if options.half == "both" else (options.half,):
                members = [(row, measured) for row, measured in rows if half_of(row) == half]
                if members:
                    print(f"| **{half}** | | | | | |")
                    report(name, members, options.rows)


if __name__ == "__main__":
    main()
