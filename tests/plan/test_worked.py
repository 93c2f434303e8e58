"""The worked examples of Buff (arXiv 2401.09149) and AMSP (arXiv 2311.00257), to the printed digit.

Buff: a 13B decoder of 131,072 tokens on 128 ranks, nodes of 8, 150 GiB/s inside and 100 GiB/s between, no latency, no
price of a launch. AMSP: Llama's 7B and 13B with 2, 2 and 12 bytes per parameter. Where a whole step of ours deviates on
purpose, the test says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from asked import gpus, states

from espalier.machine.cluster import Link
from espalier.plan import collective_time, memory_model, step_time
from espalier.plan.axes.pipeline import hand_overs
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.collective_time import Fleet
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layout_estimate import price
from espalier.plan.layouts import Layouts
from espalier.plan.reference_models import MIXED, ReferenceDecoder
from espalier.plan.request import Request
from espalier.recipe.cost import Cut
from espalier.recipe.decoder_shapes import DecoderSizes

GIB = 2**30
SIZE = DecoderSizes(
    layers=40, width=5120, heads=40, kv_heads=40, feed_forward=13824, vocabulary=50256, context=131072, tied=False,
    rope_theta=1e4, norm_epsilon=1e-5,
)  # fmt: skip
SEQUENCE, BLOCK, TABLE = 131072, 317_204_480, 50256 * 5120
NOTHING_HIDDEN = CostFactors(exposed=5.0, stall=0.0)
MSP: dict[str, Any] = {"algorithm": "megatron", "recompute": "block", "dp": 8, "tp": 8, "pp": 2, "micro_batch": 2}
ISP = {**MSP, "algorithm": "isp", "tp": 1, "hp": 8, "params": 16, "grads": 16, "optimizer": 64}


def fleet() -> Fleet:
    found = collective_time.fleet(gpus("A800", count=16, between="800Gbit/s"), 128)
    return replace(found, inside=Link(bandwidth=150 * GIB), between=Link(bandwidth=100 * GIB), factors=NOTHING_HIDDEN)


def asked(samples: int = 32, **more: Any) -> Request:
    """The model's request; gradients in one piece, as in the example, by InternEvo's executor."""
    return ReferenceDecoder(SIZE, SEQUENCE).request(samples, "bf16", **{"bucket": f"{2**60}B", "fsdp": False, **more})


def step(layouts: dict[str, Any], request: Request | None = None) -> CostInputs:
    on = fleet()
    return CostInputs(request or asked(), on, on.kinds[0], Layouts(**layouts))


def milliseconds(found: Any) -> float:
    return round(float(found) * 1e3, 2)


# --- Buff: bytes -------------------------------------------------------------------------------------------------


def test_states_of_the_13b_model() -> None:
    """ISP keeps 4 of the embedding's 16 bytes per sequence rank; its optimizer states are halved when dp > 1."""
    blocks = states(40 * BLOCK, MIXED, Layouts())
    tables = states(2 * TABLE / 4, MIXED, Layouts(optimizer=2))
    assert ReferenceDecoder(SIZE, SEQUENCE).layer_parameters == BLOCK
    held = {name: round((blocks[name] + tables[name]) / GIB, 2) for name in blocks}
    assert round((blocks["params"] + blocks["grads"] + tables["params"] + tables["grads"]) / GIB, 2) == 47.75
    assert held["optimizer"] == 142.52


def kept(cut: Cut, recompute: str = "none") -> float:
    """Bytes that all blocks keep, with a feed-forward of exactly 8/3 of the width as in the example."""
    columns: Any = 8 * 5120 / 3
    exact = replace(SIZE, feed_forward=columns)
    decoder = ReferenceDecoder(exact, SEQUENCE, keeps_shards=False)  # Buff's MSP keeps what it gathers
    return 40 * float(decoder.anatomy(1, recompute, "bf16", cut).layer.saved)


def test_activations_of_the_13b_model() -> None:
    assert round(kept(Cut(sequence=4)) / GIB, 2) == 245.83
    assert kept(Cut(tensor=4, gathered=False)) == pytest.approx(kept(Cut(sequence=4)))
    assert kept(Cut(tensor=4)) == pytest.approx(40 * SEQUENCE * 5120 * (4 + 106 / 3 / 4))
    assert kept(Cut(sequence=4), "block") == 40 * 2 * SEQUENCE * 5120 / 4


def test_the_head_and_the_last_norm_of_the_13b_model() -> None:
    """0.62 GiB of the norm and 3.07 of logits. The example's 0.31 for the head's input is the norm's output here."""
    rest = ReferenceDecoder(SIZE, SEQUENCE).anatomy(1, "none", "bf16", Cut(sequence=4)).rest
    logits = 2 * SEQUENCE * 50256 / 4
    assert round(logits / GIB, 2) == 3.07
    assert rest.saved == pytest.approx(4 * SEQUENCE * 5120 / 4 + logits)


def test_two_gathered_layers_of_the_13b_model() -> None:
    """Beside them we count the table outside the layers, which stays gathered from forward to backward."""
    gathered = memory_model.memory_bytes(step(ISP), 1, 1)["gathered"]
    assert round((float(gathered) - 2 * TABLE) / GIB, 2) == 2.36
    assert float(memory_model.memory_bytes(step({"algorithm": "isp", "dp": 32, "hp": 4}), 1, 1)["gathered"]) == 0


@pytest.mark.parametrize(("room", "fits"), [(80, False), (8000, True)])
def test_a_whole_replica_on_each_rank_fits_where_memory_is_no_matter_only(room: int, fits: bool) -> None:
    cluster = gpus("A800", count=16, between="800Gbit/s")
    device = msgspec.structs.replace(cluster.nodes[0].device, memory=room * GIB)
    cluster = msgspec.structs.replace(cluster, nodes=(msgspec.structs.replace(cluster.nodes[0], device=device),))
    priced = price(asked(), collective_time.fleet(cluster, 128), Layouts(algorithm="isp", dp=32, hp=4))[0]
    assert (priced.peak <= priced.limit) == fits


# --- Buff: seconds -----------------------------------------------------------------------------------------------


def stream(samples: int, ranks: int) -> float:
    return samples * SEQUENCE / ranks * 5120 * 2


def test_all_to_alls_of_a_layer() -> None:
    def taken(layouts: dict[str, Any], samples: int) -> float:
        found = step(layouts)
        work = found.request.profile.anatomy(samples, found.layouts.recompute, "bf16", found.cut).layer
        return milliseconds(step_time.sequence_seconds(found, work))

    assert taken({"algorithm": "isp", "dp": 32, "hp": 4}, 1) == 12.5
    assert taken({**ISP, "recompute": "selective"}, 2) == 21.88  # 21.875


def test_exchanges_of_tensor_ranks_in_a_layer() -> None:
    assert milliseconds(step_time.tensor_seconds(step(MSP), stream(2, 1), 1)) == 175.00
    assert milliseconds(step_time.tensor_seconds(step({**MSP, "algorithm": "fsp"}), stream(2, 1), 1)) == 204.17


def test_whole_sums_cost_what_gathers_and_scatters_do() -> None:
    """Without sequence parallelism (Buff's MTP): an all-reduce for each pair."""
    whole = step(MSP, asked(sequence_parallel=False))
    assert milliseconds(step_time.tensor_seconds(whole, stream(2, 1), 1)) == 175.00


def test_gathers_and_scatters_of_a_layer_s_weights() -> None:
    found = step_time.weights(step(ISP))
    assert milliseconds(2 * found["all_gather"] + found["reduce_scatter"]) == 16.62


def test_what_hides_behind_products_costs_a_fifth() -> None:
    shown = step_time.exposed(16.62, 1, 317.77, step_time.INTERFERENCE["cuda"])
    assert round(317.77 + float(shown), 2) == 321.09


def test_gradients_of_replicated_states_are_summed() -> None:
    assert milliseconds(step_time.gradients(step(MSP))["seconds"]) == 215.18


def test_gradients_of_isp_are_summed_over_the_replicas_of_each_shard() -> None:
    """The example sums blocks over 4 replicas and the embedding, in one piece per sequence rank, over 8. Ours cuts the
    embedding as the blocks are, so that only the blocks' share is a layout's."""
    blocks = asked(outside=0, trainable=40 * BLOCK, parameters=40 * BLOCK)
    shard = step({**ISP, "optimizer": 16}, blocks)
    embedding = collective_time.seconds("all_reduce", 2 * TABLE / 8, 8, 8, fleet())
    assert milliseconds(step_time.gradients(shard)["seconds"] + embedding) == 97.01


def test_refreshed_parameters_come_back() -> None:
    assert milliseconds(step_time.refresh(step({**MSP, "optimizer": 8}))) == 107.59
    blocks = asked(outside=0, trainable=40 * BLOCK, parameters=40 * BLOCK)
    assert milliseconds(step_time.refresh(step(ISP, blocks))) == 44.31


def test_broadcasts_move_all_bytes_where_buff_counts_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deviation: a broadcast passes the whole tensor on (AMSP, section 2.5), Buff takes (n-1)/n of it."""
    monkeypatch.setattr(collective_time, "CHAIN", 0.0)
    found = step_time.refresh(step({**MSP, "optimizer": 8}, asked(refresh="broadcast")))
    assert milliseconds(found * 7 / 8) == 107.59


def test_hand_overs_between_two_stages() -> None:
    one = collective_time.seconds("send", stream(2, 8), 1, 64, fleet())
    assert milliseconds(hand_overs(2, 2) * one) == 125.0


LAYER = {
    "forward": 0.0, "backward": 0.0, "recompute": 0.0, "launch": 0.0, "tensor": 0.0, "sequence": 0.0, "weights": 0.0
}  # fmt: skip


def whole_step(monkeypatch: pytest.MonkeyPatch, layouts: dict[str, Any], micro_batch: float) -> dict[str, float]:
    """Seconds by part of a step of ours when a micro-batch takes so many seconds and nothing is hidden."""
    monkeypatch.setattr(collective_time, "CHAIN", 0.0)
    layer = step_time.Pass(**{**LAYER, "forward": micro_batch / 20})
    stage = {name: 20 * value for name, value in vars(layer).items()}
    monkeypatch.setattr(step_time, "passes", lambda step, size: (layer, stage))
    found = step_time.step_seconds(step(layouts), 4)
    return {name: float(np.asarray(value)) for name, value in found.items() if name != "optimizer"}


def tokens_per_second(step_seconds: float) -> float:
    """Of one device: 2 samples, 2 micro-batches, 8 replicas, 128 devices."""
    return round(2 * 2 * SEQUENCE * 8 / (128 * step_seconds), 2)


def test_the_step_of_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buff sums gradients over all replicas and then refreshes; ours scatters them to the optimizer's shards (AMSP),
    half of that, which is put back here."""
    parts = whole_step(monkeypatch, {**MSP, "optimizer": 8}, 29.356)
    assert round(parts["all_reduce"], 5) == 0.10759
    taken = sum(parts.values()) + 0.10759
    assert round(taken, 3) == 88.516
    assert tokens_per_second(taken) == 370.19


def test_the_step_of_isp(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the example's gradients and refresh in place of ours, as in the tests above."""
    parts = whole_step(monkeypatch, ISP, 26.360)
    taken = sum(parts.values()) - parts["all_reduce"] - parts["refresh"] + 0.09701 + 0.04431
    assert round(taken, 3) == 79.346
    assert tokens_per_second(taken) == 412.97


def test_isp_beats_megatron_beats_fsp_on_a_long_sequence() -> None:
    def taken(layouts: dict[str, Any]) -> float:
        return float(price(asked(), replace(fleet(), factors=PLAIN), Layouts(**layouts))[0].step)

    msp = {**MSP, "optimizer": 8}
    assert taken(ISP) < taken(msp) < taken({**msp, "algorithm": "fsp"})


# --- AMSP --------------------------------------------------------------------------------------------------------

LLAMA_7B, LLAMA_13B = 6_738_415_616, 13_015_864_320


@pytest.mark.parametrize(
    ("parameters", "shards", "gib"),
    [
        (LLAMA_7B, (1, 1, 1), 100.41), (LLAMA_7B, (1, 1, 8), 34.52), (LLAMA_7B, (1, 8, 8), 23.53),
        (LLAMA_7B, (8, 8, 8), 12.55), (LLAMA_7B, (1, 1, 64), 26.28), (LLAMA_7B, (1, 8, 64), 15.30),
        (LLAMA_7B, (8, 8, 64), 4.31), (LLAMA_7B, (64, 64, 64), 1.57),
        (LLAMA_13B, (1, 1, 8), 66.67), (LLAMA_13B, (1, 8, 8), 45.46), (LLAMA_13B, (8, 8, 8), 24.24),
        (LLAMA_13B, (1, 1, 64), 50.76), (LLAMA_13B, (1, 8, 64), 29.55), (LLAMA_13B, (8, 8, 64), 8.33),
    ],
)  # fmt: skip
def test_states_by_shards(parameters: int, shards: tuple[int, int, int], gib: float) -> None:
    params, grads, optimizer = shards
    held = states(parameters, MIXED, Layouts(params=params, grads=grads, optimizer=optimizer))
    assert round(sum(held.values()) / GIB, 2) == gib


def test_80_gib_with_25_of_activations_ask_for_sharded_gradients_or_states_beyond_the_node() -> None:
    def room(*shards: int) -> float:
        params, grads, optimizer = shards
        held = states(LLAMA_13B, MIXED, Layouts(params=params, grads=grads, optimizer=optimizer))
        return 80 * GIB - 25 * GIB - sum(held.values())

    assert room(1, 1, 8) < 0 < min(room(1, 8, 8), room(1, 1, 64))


def test_the_optimizer_s_step_is_the_peak_of_5_3_of_its_states_where_little_is_kept() -> None:
    """AMSP and Buff: parameters, gradients and 5/3 of the optimizer's 12 bytes."""
    request = ReferenceDecoder(replace(SIZE, context=8), 8).request(1, "bf16")
    held = memory_model.memory_bytes(step({"dp": 1}, request), 1, 1)
    states = sum(float(held[name]) for name in ("params", "grads")) + 5 / 3 * float(held["optimizer"])
    found = sum(float(held[name]) for name in ("params", "grads", "optimizer", "activations", "transient"))
    assert found == pytest.approx(states)
