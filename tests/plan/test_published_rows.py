"""Rows of measured runs whose memory others published: peaks, first batches that did not fit, and what words change.

Sources: nanotron's Llama of 1B on H100s (Hugging Face nanotron/old_bench, July 2024: allocated and reserved MiB);
languini's GPTs on one GPU (github languini-kitchen/languini-kitchen, projects/gpt, Apache-2.0: the largest batch that
ran and the first that did not); llm.q's Qwen2.5 on cards at home (github IST-DASLab/llmq, Apache-2.0); LitGPT's LoRA on
an A100-40GB (github Lightning-AI/litgpt, resource-tables.md, Apache-2.0).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rows import ROW, lines

from espalier.plan.calibration import Batch
from espalier.plan.layout_estimate import price
from espalier.plan.measurements import score
from espalier.plan.measurements.run_records import by_cost
from espalier.plan.measurements.table import read
from espalier.plan.reference_models import LatentAttention, ReferenceDecoder
from espalier.recipe.cost import Cut
from espalier.recipe.decoder_shapes import DecoderSizes

# ranks by data, tensor and pipeline; samples of a micro-batch; MiB allocated, reserved
NANOTRON = [(1, 1, 16, 1, 12603.56, 13042), (16, 1, 1, 4, 42900.39, 44042), (1, 4, 4, 8, 24436.91, 24816),
            (1, 8, 2, 8, 16549.94, 16842), (2, 1, 8, 4, 42485.19, 42994), (1, 4, 2, 8, 25707.36, 26100),
            (2, 1, 4, 4, 39056.83, 39710), (2, 4, 1, 8, 25808.34, 27166)]  # fmt: skip
# device, cards, shape of Qwen2.5, samples of a micro-batch: what ran with nothing recomputed or offloaded
LLMQ = [("RTX 4090", 4, "0.5b", 16), ("RTX 5060 Ti", 1, "0.5b", 10), ("H100", 1, "7b", 4), ("H100", 8, "1.5b", 32),
        ("RTX PRO 6000", 1, "7b", 8), ("L40S", 1, "3b", 4), ("L40S", 4, "3b", 8)]  # fmt: skip
QWEN = {"0.5b": (24, 896, 14, 2, 4864), "1.5b": (28, 1536, 12, 2, 8960), "3b": (36, 2048, 16, 2, 11008),
        "7b": (28, 3584, 28, 4, 18944)}  # fmt: skip
# device, layers, width, heads, the largest batch that ran, the first that did not
LANGUINI = [("RTX 3090", 12, 768, 12, 32, 36), ("V100-32GB", 12, 768, 12, 48, 52), ("V100-32GB", 24, 1536, 16, 9, 16),
            ("RTX 4090", 4, 512, 8, 88, 100), ("RTX 4090", 12, 768, 12, 34, 36), ("RTX 3090", 4, 512, 8, 88, 104),
            ("V100-32GB", 4, 768, 12, 104, 107), ("RTX 3090", 4, 768, 12, 77, 80)]  # fmt: skip


def predicted(folder: Path, *rows: dict[str, Any]) -> list[score.Prediction]:
    return score.predict(read(lines(folder, *rows)).measurements)


def row(**tables: dict[str, Any]) -> dict[str, Any]:
    """ROW on one machine of 8 A100s, in bf16, with keys of its tables changed."""
    base: dict[str, Any] = {
        "model": ROW["model"],
        "cluster": {"nodes": [{"device": "A100-80GB", "devices": 8}]},
        "layout": {"dp": 8, "micro_batch": 4, "recompute": "block"},
        "train": {"sequence": 1024, "batch_tokens": 32768, "precision": "bf16"},
    }
    return {name: {**base.get(name, {}), **tables.get(name, {})} for name in {**base, **tables}}


def nanotron(dp: int, tp: int, pp: int, micro_batch: int, memory: str) -> dict[str, Any]:
    model = {"depth": 24, "width": 2048, "heads": 32, "feed_forward": 4096, "vocabulary": 50257, "tied": True}
    nodes = {"device": "H100", "devices": 8, "count": dp * tp * pp // 8}
    return {
        "model": model,
        "cluster": {"nodes": [nodes], "links": {"between": "3200Gbit/s"}},
        "layout": {"dp": dp, "tp": tp, "pp": pp, "micro_batch": micro_batch, "shard": {"optimizer": dp}},
        "train": {"sequence": 4096, "batch_tokens": 2**22, "precision": "bf16", "executor": "nanotron"},
        "measured": {"memory": memory},
    }


@pytest.mark.parametrize(("memory", "column"), [("allocated", 4), ("reserved", 5)])
def test_nanotron_s_peaks_are_met(tmp_path: Path, memory: str, column: int) -> None:
    """Unequal stages, whole inputs of tensor ranks, rotated copies: within 5 %, 2 % on average."""
    peaks = [run.peak / 2**20 for run in predicted(tmp_path, *(nanotron(*run[:4], memory) for run in NANOTRON))]
    missed = np.abs(np.array(peaks) / [run[column] for run in NANOTRON] - 1)
    assert missed.max() < 0.05
    assert missed.mean() < 0.02


def test_stages_of_equal_cost_have_fewer_layers_beside_the_head() -> None:
    assert by_cost(24, 42e6, 103e6, 8) == (4, 3, 3, 4, 3, 3, 4, 0)
    assert by_cost(24, 42e6, 103e6, 1) == (24,)


def languini(device: str, layers: int, width: int, heads: int, batch: int) -> dict[str, Any]:
    model = {"depth": layers, "width": width, "heads": heads, "feed_forward": 4 * width, "vocabulary": 16384}
    return {
        "model": {**model, "tied": False},
        "cluster": {"nodes": [{"device": device}]},
        "layout": {"dp": 1, "micro_batch": batch},
        "train": {
            "sequence": 512,
            "batch_tokens": 512 * batch,
            "precision": "fp16",
            "compile": True,
            "attention": "written",
        },
    }


def test_the_first_batch_that_does_not_fit_is_known_within_a_few_percent(tmp_path: Path) -> None:
    smaller = predicted(tmp_path, *(languini(*run[:4], int(0.95 * run[4])) for run in LANGUINI))
    first = predicted(tmp_path, *(languini(*run[:4], run[5]) for run in LANGUINI))
    assert all(run.fits for run in smaller)
    assert not any(run.fits for run in first)


def test_what_llmq_ran_fits_with_its_states_in_16_bits_and_not_in_32(tmp_path: Path) -> None:
    rows = []
    for device, cards, shape, micro_batch in LLMQ:
        sizes = dict(zip(("depth", "width", "heads", "kv_heads", "feed_forward"), QWEN[shape], strict=True))
        rows.append({
            "model": {**sizes, "vocabulary": 151936, "tied": shape != "7b"},
            "cluster": {"nodes": [{"device": device, "devices": cards}]},
            "layout": {"dp": cards, "micro_batch": micro_batch, "shard": {"optimizer": cards}},
            "train": {"sequence": 1024, "batch_tokens": 524288, "precision": "bf16", "executor": "llmq"},
        })  # fmt: skip
    assert all(run.fits for run in predicted(tmp_path, *rows))
    wide = [{**made, "train": {**made["train"], "states": "fp32"}} for made in rows]
    assert sum(run.fits for run in predicted(tmp_path, *wide)) <= 5


class SavedBytes:
    """Bytes that autograd keeps, each storage once. Has state."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def written_block(x: torch.Tensor, weights: list[torch.Tensor], heads: int) -> torch.Tensor:
    """A GPT's block of PyTorch's operations, each in the precision that autocast gives it on a GPU."""
    low = torch.bfloat16
    width, batch, length = x.shape[-1], x.shape[0], x.shape[1]

    def linear(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(value.to(low), weight)

    normed = F.layer_norm(x, (width,))
    query, key, value = (
        linear(normed, weight).view(batch, length, heads, -1).transpose(1, 2) for weight in weights[:3]
    )
    scores = (query @ key.transpose(-1, -2)) * 0.1
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    answer = (torch.softmax(scores.float(), -1).to(low) @ value).transpose(1, 2).reshape(batch, length, width)
    x = x + linear(answer, weights[3])
    inner = linear(F.layer_norm(x, (width,)), weights[4])
    inner = 0.5 * inner * (1 + torch.tanh(0.8 * (inner + 0.04 * torch.pow(inner.float(), 3.0))))
    return x + linear(inner, weights[5])


def test_a_written_block_keeps_what_is_predicted() -> None:
    batch, length, width, heads = 4, 64, 128, 4
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    weights = [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    x, saved = torch.randn(batch, length, width, requires_grad=True), SavedBytes()
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        written_block(x, weights, heads)
    live = saved.bytes - sum(storage.nbytes() for at, storage in saved.storages.items() if at in own)
    size = DecoderSizes(1, width, heads, heads, 4 * width, 100, length, True, 1e4, 1e-5)
    decoder = ReferenceDecoder(size, length, gated=False, fused=False, operations="eager")
    layer = decoder.anatomy(batch, "none", "bf16", Cut()).layer
    assert float(layer.saved) == pytest.approx(live, rel=0.05)


def test_sixteen_bit_gradients_are_cast_however_an_update_is_fused(tmp_path: Path) -> None:
    """An executor's name takes no bytes away that its update needs."""
    words = ({}, {"update": "fused"}, {"executor": "internevo"}, {"gradients": "fp32", "update": "fused"})
    cases = [
        row(layout={"micro_batch": 1, "shard": {"optimizer": 8}}, train={"sequence": 64, "batch_tokens": 512, **more})
        for more in words
    ]
    foreach, fused, internevo, wide = (run.peak for run in predicted(tmp_path, *cases))
    owned = (24 * (12 * 2048**2 + 2 * 2048) + 51201 * 2048) / 8
    assert 1.1 * 4 * owned == pytest.approx(foreach - fused, rel=0.01)
    assert 1.1 * 2 * owned == pytest.approx(internevo - fused, rel=0.01)
    assert wide > fused - 1.1 * 4 * owned


def states(folder: Path, made: dict[str, Any]) -> float:
    [(_, request, on, layouts)] = Batch(read(lines(folder, made)).measurements).groups
    sizes = price(request, on, layouts)[0].memory_bytes
    return float(np.max(sum(sizes[name] for name in ("params", "grads", "optimizer"))))


def test_spread_experts_lie_on_fewer_ranks(tmp_path: Path) -> None:
    model = {"kind": "moe", "experts": 8, "active": 2}
    alone, spread = (states(tmp_path, row(model=model, layout={"ep": ep})) for ep in (1, 4))
    experts = 24 * 8 * 2 * 2048 * 8192
    assert alone - spread == pytest.approx(16 * experts * 3 / 4, rel=1e-6)
    sharded = {"algorithm": "fsdp", "ep": 4}
    assert states(tmp_path, row(model=model, layout=sharded)) == pytest.approx(
        states(tmp_path, row(model=model, layout={"algorithm": "fsdp"})), rel=0.01
    )


def test_more_expert_ranks_than_replicas_are_priced_as_the_most_that_divide_them_and_noted(tmp_path: Path) -> None:
    model = {"kind": "moe", "experts": 8, "active": 2}
    most, more = row(model=model, layout={"ep": 8}), row(model={**model, "experts": 16}, layout={"ep": 16})
    table = read(lines(tmp_path, most, more))
    assert table.rows[1].measurement.request.expert_ranks == 8
    assert any("layout.ep = 16 is priced as 8" in note for note in table.notes)


def test_latent_attention_has_the_parameters_of_deepseek_v3_s() -> None:
    size = DecoderSizes(61, 7168, 128, 128, 2048, 129280, 4096, False, 1e4, 1e-6, experts=256, active=8, shared=2048)
    decoder = ReferenceDecoder(size, 4096, latent=LatentAttention(1536, 512, 128, 64, 128))
    outside_attention = 257 * 3 * 7168 * 2048 + 2 * 7168
    assert (
        decoder.layer_parameters - outside_attention == 187_105_280
    )  # config.json and modeling_deepseek.py, less norms


def lora(rank: int, micro_batch: int, **tune: Any) -> dict[str, Any]:
    model = {"depth": 32, "width": 2560, "heads": 32, "feed_forward": 6912, "vocabulary": 50304, "tied": False}
    return {
        "model": model,
        "cluster": {"nodes": [{"device": "A100-40GB"}]},
        "layout": {"dp": 1, "micro_batch": micro_batch},
        "train": {"sequence": 1034, "precision": "bf16", "executor": "litgpt", "batch_tokens": 1034 * micro_batch},
        "tune": {"kind": "lora", "rank": rank, "targets": ["query", "value"], **tune},
        "measured": {"memory": "reserved"},
    }


def test_adapters_of_a_3b_model_take_what_was_measured(tmp_path: Path) -> None:
    """9.69 and 16.92 GB, of a micro-batch of 1 and of 4; 6.35 GB with weights in 4 bits."""
    *plain, four_bits = (
        run.peak / 1e9 for run in predicted(tmp_path, lora(8, 1), lora(8, 4), lora(8, 1, frozen="nf4"))
    )
    assert plain == pytest.approx([9.69, 16.92], rel=0.12)
    assert four_bits == pytest.approx(6.35, rel=0.1)


def test_a_stack_that_begins_with_a_system_s_name_has_its_habits(tmp_path: Path) -> None:
    named = {**row(), "stack": "llm-foundry v0.3.0"}
    table = read(lines(tmp_path, named, row(train={"executor": "llm-foundry"})))
    left, right = (entry.measurement.request for entry in table.rows)
    assert left == right
    assert any("llm-foundry assumed" in note for note in table.notes)
    sharded = read(lines(tmp_path, row(layout={"algorithm": "FSDP2"}), row(layout={"algorithm": "zero-3"})))
    assert [entry.measurement.stack for entry in sharded.rows] == ["fsdp on A100-80GB", "unnamed on A100-80GB"]
    assert any("fsdp assumed" in note for note in sharded.notes)


def test_heads_that_divide_no_width_are_said_to_be_assumed(tmp_path: Path) -> None:
    table = read(lines(tmp_path, row(model={"heads": 24})))
    assert any("86 assumed" in note for note in table.notes)


def test_fp8_is_a_rate_of_products_alone(tmp_path: Path) -> None:
    flops = {"bf16": 989e12, "fp8": 1979e12}
    device = {"name": "mine", "kind": "cuda", "memory": 2**36, "memory_bandwidth": 3.35e12, "flops": flops}
    cluster = {"nodes": [{"device": device, "devices": 8}]}
    low, fast = predicted(tmp_path, *(row(cluster=cluster, train={"precision": name}) for name in ("bf16", "fp8")))
    assert fast.peak == low.peak
    assert 0.5 < fast.terms["forward"] / low.terms["forward"] < 0.9
