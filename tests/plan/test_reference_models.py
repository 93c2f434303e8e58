"""Runs that others published: the plan's figures from datasheets alone stay within the band it claims, in their order.

Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv
2104.04473), table 1, micro-batches and interleaving as in its repository (examples/sc21/run_table_1.sh). Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), table 5 and figures 1 and 7.
InternLM's documentation, train_performance.md (its 7B on nodes of 8 A100-80GB with 4 x 100 Gbit/s between).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asked import gpus
from scipy.stats import spearmanr

from espalier.plan import collective_time, search
from espalier.plan.calibration import UNCALIBRATED, Measurement, calibrate
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.collective_time import Fleet
from espalier.plan.layout_estimate import Priced, grid, price
from espalier.plan.layouts import Layouts, chains
from espalier.plan.reference_models import ReferenceDecoder
from espalier.plan.request import Request
from espalier.recipe.cost import Cut
from espalier.recipe.decoder_shapes import DecoderSizes

# --- Megatron-LM on Selene ---------------------------------------------------------------------------------------

# heads, width, layers, tp, pp, GPUs, batch, micro-batch, chunks of a stage, achieved teraFLOP/s per GPU
WEAK_SCALING = [
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137), (32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    (32, 4096, 36, 4, 1, 128, 512, 16, 1, 142), (48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138), (80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148), (128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163), (160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
]  # fmt: skip
# heads, width, layers, pp, GPUs (all tp = 8, dp = 1), batch, micro-batch, chunks, seconds with all of each layer
# recomputed, and with sequence parallelism and attention's core recomputed
RECOMPUTED = [
    (64, 6144, 48, 1, 8, 4, 4, 1, 1.42, 1.10), (96, 12288, 96, 8, 64, 64, 1, 3, 18.13, 13.75),
    (128, 20480, 105, 35, 280, 280, 1, 3, 49.05, 37.83), (160, 25600, 128, 64, 512, 512, 1, 1, 94.42, 71.49),
]  # fmt: skip
SEQUENCE, VOCABULARY = 2048, 51200


def gpt(heads: int, width: int, layers: int, sequence_parallel: bool = False) -> ReferenceDecoder:
    """Megatron-LM's GPT of that time: two matrices in the feed-forward, attention that writes its scores."""
    size = DecoderSizes(
        layers=layers, width=width, heads=heads, kv_heads=heads, feed_forward=4 * width, vocabulary=VOCABULARY,
        context=SEQUENCE, tied=True, rope_theta=1e4, norm_epsilon=1e-5,
    )  # fmt: skip
    return ReferenceDecoder(size, SEQUENCE, gated=False, fused=False, sequence_parallel=sequence_parallel)


def predicted(decoder: ReferenceDecoder, ranks: int, samples: int, layout: Layouts) -> Priced:
    request = decoder.request(samples, "fp16", bucket=f"{2**40}B")
    on = collective_time.fleet(gpus(count=ranks // 8, between="1600Gbit/s"), ranks)
    return price(request, on, layout)[0]


def selene() -> list[tuple[Priced, float]]:
    """Every published step: its price and its measured seconds. Megatron's FLOP: equation 3 of its paper. Its sequence
    parallelism keeps the shards of what it gathers, which the planner calls `fsp`."""
    found = []
    for heads, width, layers, tp, pp, ranks, batch, size, chunks, achieved in WEAK_SCALING:
        share = 1 + SEQUENCE / (6 * width) + VOCABULARY / (16 * layers * width)
        measured = 96 * batch * SEQUENCE * layers * width**2 * share / (ranks * achieved * 1e12)
        layout = Layouts(
            "megatron" if tp > 1 else "data", "block", ranks // (tp * pp), tp, pp=pp, micro_batch=size, chunks=chunks
        )
        found.append((predicted(gpt(heads, width, layers), ranks, batch, layout), measured))
    for heads, width, layers, pp, ranks, batch, size, chunks, block, selective in RECOMPUTED:
        for algorithm, mode, measured in (("megatron", "block", block), ("fsp", "selective", selective)):
            layout = Layouts(algorithm, mode, 1, 8, pp=pp, micro_batch=size, chunks=chunks)
            decoder = gpt(heads, width, layers, algorithm == "fsp")
            found.append((predicted(decoder, ranks, batch, layout), measured))
    return found


def test_megatron_s_steps_are_within_the_band_of_datasheets() -> None:
    steps = np.array([(float(priced.step), measured) for priced, measured in selene()])
    assert np.abs(steps[:, 0] / steps[:, 1] - 1).max() < UNCALIBRATED
    assert spearmanr(*steps.T).statistic > 0.98


def test_what_ran_fits() -> None:
    for priced, _ in selene():
        assert priced.peak <= priced.limit


def test_recomputing_attention_s_core_only_gains_what_was_measured() -> None:
    """29-32 % more throughput (table 5). Ours says 38-45 %: what is done again counts by FLOP, and softmax has few."""
    steps = np.array([(float(priced.step), measured) for priced, measured in selene()[len(WEAK_SCALING) :]])
    gains = steps[::2] / steps[1::2]
    assert gains.min() > 1
    assert np.abs(gains[:, 0] / gains[:, 1] - 1).max() < 0.15


# Per cent of the activations that tensor parallelism alone keeps (figure 7): with sequence parallelism, with the core
# of attention recomputed, with both, with all of each layer recomputed.
FIGURE_7 = [
    (64, 6144, 48, (66.84, 49.42, 16.18, 7.64)), (96, 12288, 96, (62.04, 56.53, 18.49, 8.71)),
    (128, 20480, 105, (58.31, 62.04, 20.27, 9.42)), (160, 25600, 128, (58.31, 62.04, 20.27, 9.42)),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "width", "layers", "shares"), FIGURE_7)
def test_shares_of_activations_kept(
    heads: int, width: int, layers: int, shares: tuple[float, float, float, float]
) -> None:
    def kept(split: bool, mode: str) -> float:
        decoder = gpt(heads, width, layers, split)
        return float(decoder.anatomy(1, mode, "fp16", Cut(tensor=8, gathered=False)).layer.saved)

    modes = ((True, "none"), (False, "selective"), (True, "selective"), (False, "block"))
    found = [100 * kept(*mode) / kept(False, "none") for mode in modes]
    assert found == pytest.approx(shares, abs=0.15)


# GiB of activations on the first stage with both (figure 1), in the order of `RECOMPUTED`.
FIGURE_1 = (9.5625, 12.3515625, 23.076171875, 26.5625)


def test_activations_of_the_first_stage() -> None:
    found = [float(priced.memory_bytes["activations"]) / 2**30 for priced, _ in selene()[len(WEAK_SCALING) :][1::2]]
    assert found == pytest.approx(FIGURE_1, rel=0.05)


# --- InternLM 7B -------------------------------------------------------------------------------------------------

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
# (tensor ranks, optimizer states over all ranks or inside a node) -> tokens per second and GPU, by GPUS
INTERNLM = {
    (1, "all"): (4062, 3842, 3752, 3690, 3571, 3209, 2861, 2271),
    (1, "node"): (4078, 3939, 3919, 3944, 3928, 3920, 3835, 3625),
    (2, "all"): (3822, 3595, 3475, 3438, 3308, 3094, 2992, 2785),
    (2, "node"): (3761, 3658, 3655, 3650, 3651, 3653, 3589, 3486),
}
TOKENS = 16384  # of each GPU in a step: 4 micro-batches of 2 samples (tp = 2: of 4), nothing recomputed
TIES = 1 + search.TIE  # plans that near are equal: the fewest moving parts win


def internlm(ranks: int, refresh: str = "broadcast") -> Request:
    """Buckets of 512 Mi gradients of 2 bytes. Tensors that owners can divide: in each block five matrices, with which
    norms and biases go; embedding and head."""
    size = DecoderSizes(
        layers=32, width=4096, heads=32, kv_heads=32, feed_forward=11008, vocabulary=103168, context=2048, tied=False,
        rope_theta=1e4, norm_epsilon=1e-5,
    )  # fmt: skip
    more: dict[str, Any] = {"refresh": refresh, "bucket": f"{2**30}B", "temporaries": 0, "tensors": 5 * 32 + 2}
    return ReferenceDecoder(size, 2048, sequence_parallel=False).request(8 * ranks, "bf16", **more)


def layout(ranks: int, tp: int, where: str) -> Layouts:
    dp = ranks // tp
    shards = dp if where == "all" else 8 // tp
    return Layouts("megatron" if tp > 1 else "data", "none", dp, tp, optimizer=shards, micro_batch=2 * tp)


def cluster(ranks: int) -> Any:
    return gpus(count=ranks // 8, between="400Gbit/s")


def fleet(ranks: int, factors: CostFactors) -> Fleet:
    return replace(collective_time.fleet(cluster(ranks), ranks), factors=factors)


def tokens_per_second(factors: CostFactors, refresh: str = "broadcast") -> dict[tuple[int, str], list[float]]:
    def one(ranks: int, tp: int, where: str) -> float:
        (priced,) = price(internlm(ranks, refresh), fleet(ranks, factors), layout(ranks, tp, where))
        return TOKENS / float(priced.step)

    return {key: [one(ranks, *key) for ranks in GPUS] for key in INTERNLM}


@pytest.fixture(scope="module")
def one_node() -> CostFactors:
    """What the four runs on 8 GPUs say of the device: nothing of the network between nodes."""
    rows = [
        Measurement(internlm(8), cluster(8), layout(8, *key), TOKENS / measured[0])
        for key, measured in INTERNLM.items()
    ]
    return calibrate(rows).factors


def off(found: dict[tuple[int, str], list[float]]) -> Any:
    """Of each run, the predicted step over the measured one, less 1."""
    return np.array([np.array(INTERNLM[key]) / np.array(found[key]) - 1 for key in INTERNLM])


def test_internlm_s_steps_are_within_the_band_of_datasheets() -> None:
    assert np.abs(off(tokens_per_second(PLAIN))).max() < UNCALIBRATED


def test_8_gpus_tell_what_1024_will_do(one_node: CostFactors) -> None:
    missed = np.abs(off(tokens_per_second(one_node)))
    assert missed.max() < 0.1
    assert missed.mean() < 0.04


@pytest.mark.parametrize("which", ["datasheets", "one node"])
def test_states_inside_the_node_scale(which: str, one_node: CostFactors) -> None:
    """Published: with states in the node they win at every size beyond it, 3,625 to 2,271 tokens/s at 1,024 GPUs."""
    found = tokens_per_second(PLAIN if which == "datasheets" else one_node)
    assert all(near > far for near, far in zip(found[1, "node"][1:], found[1, "all"][1:], strict=True))
    assert found[1, "node"][-1] / found[1, "all"][-1] == pytest.approx(3625 / 2271, rel=0.1)


@pytest.mark.parametrize("which", ["datasheets", "one node"])
def test_tensor_ranks_pay_only_where_states_are_split_over_many_ranks(which: str, one_node: CostFactors) -> None:
    """Published: with states over all ranks tp = 2 overtakes tp = 1 from 512 GPUs on; with states in the node never.

    That is what the planner decides at every size, as plans within a tie are equal. Strictly, tp = 2 is 2 to 3 % ahead
    at 256 GPUs already, where it was measured 4 % behind: its step is predicted 8 % too short there.
    """
    found = tokens_per_second(PLAIN if which == "datasheets" else one_node)
    assert all(one > two for one, two in zip(found[1, "node"], found[2, "node"], strict=True))
    ahead = [two / one for one, two in zip(found[1, "all"], found[2, "all"], strict=True)]
    assert [ratio > TIES for ratio in ahead] == [ranks >= 512 for ranks in GPUS]
    assert all(ratio < 1 for ratio in ahead[:5])
    assert ahead == sorted(ahead[:2], reverse=True) + sorted(ahead[2:])


def test_one_gather_loses_far_less_than_a_broadcast_per_owner(one_node: CostFactors) -> None:
    theirs, ours = (tokens_per_second(one_node, refresh) for refresh in ("broadcast", "gather"))
    lost = [1 - found[1, "all"][-1] / found[1, "node"][-1] for found in (theirs, ours)]
    assert lost[0] > 0.3
    assert lost[1] < 0.05


def nested(ranks: int, mode: str, factors: CostFactors, refresh: str = "broadcast") -> tuple[Any, Any]:
    """Every nested triple of shards that fits [n, 3], and its seconds over those of the fastest [n]."""
    triples = chains(ranks, 8)
    params, grads, optimizer = triples.T
    every = Layouts("data", mode, ranks, params=params, grads=grads, optimizer=optimizer, micro_batch=2)
    priced = grid(internlm(ranks, refresh), fleet(ranks, factors), every)
    fits = priced.over <= 0
    return triples[fits], priced.seconds[fits] / priced.seconds[fits].min()


def behind(ranks: int, mode: str, factors: CostFactors, refresh: str = "broadcast") -> float:
    """Seconds with optimizer states in the node, over those of the fastest triple, less 1."""
    triples, seconds = nested(ranks, mode, factors, refresh)
    return float(seconds[(triples == (1, 1, 8)).all(axis=1)].item() - 1)


@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize("ranks", GPUS[1:])
def test_states_in_the_node_are_the_best_of_all_nested_triples(ranks: int, mode: str, one_node: CostFactors) -> None:
    """As AMSP has it for 16 to 1,024 GPUs. The executor is InternEvo's: gradients summed whole over all replicas, or
    reduced to each owner in turn where they are sharded, and a broadcast from each owner. From datasheets alone
    (1, 8, 8) is 0.5 % ahead at 32 GPUs without recomputation, which is a tie."""
    assert behind(ranks, mode, one_node) == 0
    assert behind(ranks, mode, PLAIN) < 0.006


def test_with_one_gather_wider_shards_are_better_than_the_original_s_best(one_node: CostFactors) -> None:
    """Ours beside it, at 1,024 GPUs: states over 128 ranks, gathered in buckets, 3 to 4 % faster than (1, 1, 8)."""
    triples, seconds = nested(1024, "none", one_node, "gather")
    best = triples[seconds.argmin()]
    assert (best[0], best[1]) == (1, 1)
    assert best[2] > 8
    (ours,) = price(
        internlm(1024, "gather"), fleet(1024, one_node), Layouts("data", dp=1024, optimizer=int(best[2]), micro_batch=2)
    )
    (theirs,) = price(internlm(1024), fleet(1024, one_node), layout(1024, 1, "node"))
    assert 0.95 < ours.step / theirs.step < 0.98
