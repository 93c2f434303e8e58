"""A step's estimate adds up, sends the ledger's bytes, and better hardware never makes it slower."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from asked import decoder, gpus, plain, processor
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.machine.cluster import Cluster
from espalier.plan import collective_time, step_time
from espalier.plan.layout_estimate import estimate, grid, scaled
from espalier.recipe import Muon, cost


def changed(cluster: Cluster, **device: float) -> Cluster:
    """The cluster with its first device's fields multiplied."""
    node = cluster.nodes[0]
    new = {key: getattr(node.device, key) * factor for key, factor in device.items()}
    return msgspec.structs.replace(
        cluster, nodes=(msgspec.structs.replace(node, device=msgspec.structs.replace(node.device, **new)),)
    )


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_terms_add_up_to_the_step(ranks: int) -> None:
    found = estimate(decoder(batch=64), gpus(count=2), plain(ranks, 1, 2))
    assert sum(found.terms.values()) == pytest.approx(found.step_seconds)
    held = {kind: size for kind, size in found.memory_bytes.items() if kind != "peak"}
    assert sum(held.values()) == found.memory_bytes["peak"]
    assert found.tokens_per_second == pytest.approx(64 * 128 / found.step_seconds)
    assert found.tokens_per_second_per_device == pytest.approx(found.tokens_per_second / ranks)
    assert 0 < found.mfu < 1


@given(st.integers(1, 64), st.integers(1, 2**30))
def test_sent_bytes_are_the_ring_s(ranks: int, bucket: int) -> None:
    request = decoder(batch=64, bucket=f"{bucket}B")
    found = estimate(request, gpus(count=8), plain(ranks, 1, 1))
    assert found.sent_bytes == {
        "gradients": cost.ring_bytes("all_reduce", (request.profile.trainable + request.profile.tensors) * 4, ranks),
        "control": cost.ring_bytes("all_reduce", 8 * (3 + ranks + 1), ranks),
    }


def test_one_rank_waits_for_nobody() -> None:
    assert estimate(decoder(), processor(), plain(1, 2, 4)).terms["all_reduce"] == 0


def test_memory_follows_the_formulas() -> None:
    request = decoder(batch=8)
    found = estimate(request, gpus(), plain(8, 1, 1)).memory_bytes
    assert found["params"] == found["grads"] == 4 * request.profile.parameters
    assert found["optimizer"] == 8 * request.profile.parameters
    assert found["activations"] == 16 * 2 * 128 * 64 * 4
    assert found["runtime"] == 800 * 2**20 + 2**28  # and the buffers of one group
    muon = decoder(optimizer=Muon(), matrices=Counter({(10, 100): 1}))
    assert estimate(muon, gpus(), plain(1, 1, 1)).memory_bytes["optimizer"] == 8 * muon.profile.parameters - 4000
    low = estimate(decoder(precision="bf16"), gpus(), plain(1, 1, 1)).memory_bytes
    assert low["params"] == 6 * request.profile.parameters


def test_muon_pays_for_its_products() -> None:
    adam = estimate(decoder(), gpus(), plain(1, 1, 1)).terms["optimizer"]
    muon = decoder(optimizer=Muon(), matrices=Counter({(4096, 4096): 8}))
    assert estimate(muon, gpus(), plain(1, 1, 1)).terms["optimizer"] > 5 * adam


def test_recomputation_trades_seconds_for_bytes() -> None:
    found = [estimate(decoder(), processor(), plain(1, 2, 4, mode)) for mode in ("none", "selective", "block")]
    seconds = [one.step_seconds for one in found]
    held = [one.memory_bytes["activations"] for one in found]
    assert seconds == sorted(seconds)
    assert held == sorted(held, reverse=True)


def test_ranks_of_a_machine_share_its_memory() -> None:
    one, two = (estimate(decoder(), processor(), plain(n, 1, 1)).memory_limit for n in (1, 2))
    assert one == 2 * two


factors = st.floats(1, 50)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 8, 16]), st.sampled_from([1, 4, 16]), factors, st.sampled_from(["memory", "memory_bandwidth"])
)
def test_a_better_device_is_never_slower_nor_fuller(ranks: int, size: int, factor: float, what: str) -> None:
    request, cluster, candidate = decoder(batch=128), gpus(count=2), plain(ranks, 1, size)
    before = estimate(request, cluster, candidate)
    after = estimate(request, changed(cluster, **{what: factor}), candidate)
    assert after.step_seconds <= before.step_seconds
    assert after.memory_limit - after.memory_bytes["peak"] >= before.memory_limit - before.memory_bytes["peak"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 8, 12, 16]), st.integers(10**4, 10**9), factors, st.sampled_from(["inside", "between"]))
def test_a_better_link_is_never_slower(ranks: int, bucket: int, factor: float, level: str) -> None:
    request = decoder(width=512, batch=64, bucket=f"{bucket}B")
    rates = {"inside": 50.0, "between": 5.0}
    slow = gpus(count=2, **{name: f"{rate}GB/s" for name, rate in rates.items()})
    fast = gpus(count=2, **{name: f"{rate * (factor if name == level else 1)}GB/s" for name, rate in rates.items()})
    before, after = (estimate(request, cluster, plain(ranks, 1, 1)) for cluster in (slow, fast))
    assert after.step_seconds <= before.step_seconds * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 1.0), st.integers(1, 50), st.floats(1e-6, 1.0), st.just(0.0) | st.floats(1e-9, 1))
def test_what_is_hidden_is_never_free_and_never_more_than_all(
    bucket: float, buckets: int, backward: float, interference: float
) -> None:
    exposed = step_time.exposed(bucket, buckets, backward, interference)
    assert interference * bucket * buckets <= exposed * (1 + 1e-9)
    assert min(bucket, backward) * 0 <= exposed <= bucket * buckets * (1 + 1e-9)
    assert exposed >= step_time.exposed(bucket / 2, buckets, backward, interference)


def test_a_grid_is_the_same_as_one_by_one() -> None:
    sizes = np.array([1, 2, 3, 4, 8, 16])
    request, cluster = decoder(batch=32), processor()
    priced = grid(request, collective_time.fleet(cluster, 2), plain(2, 1, sizes, "block"))
    for taken, over, size in zip(priced.seconds, priced.over, sizes, strict=True):
        one = estimate(request, cluster, plain(2, 1, int(size), "block"))
        assert taken == pytest.approx(one.step_seconds)
        assert over == pytest.approx(one.memory_bytes["peak"] - one.memory_limit)


def test_the_last_small_micro_batch_is_paid_for() -> None:
    even, odd = (estimate(decoder(batch=n), processor(), plain(1, 2, 4)) for n in (8, 9))
    assert even.terms["forward"] < odd.terms["forward"] < 1.5 * even.terms["forward"]


def test_the_slowest_device_sets_the_step() -> None:
    fast, slow = gpus("H100", devices=1), gpus("T4", devices=1)
    mixed = msgspec.structs.replace(fast, nodes=(*fast.nodes, *slow.nodes))
    together = estimate(decoder(batch=8), mixed, plain(2, 1, 4)).terms["forward"]
    assert together == estimate(decoder(batch=4), slow, plain(1, 1, 4)).terms["forward"]


def test_thousands_of_devices_are_priced_in_a_second() -> None:
    found = estimate(decoder(width=1024, batch=4096), gpus(count=512), plain(4096, 1, 1))
    assert found.terms["all_reduce"] > 0


def test_every_figure_says_where_it_comes_from() -> None:
    found = estimate(decoder(), gpus(count=2), plain(16, 1, 1))
    assert set(found.terms) <= set(found.sources)
    assert "NVIDIA A100" in found.sources["forward"]


def test_a_trial_scales_the_times_and_nothing_else() -> None:
    before = estimate(decoder(), processor(), plain(2, 1, 4))
    after = scaled(before, 2 * before.step_seconds)
    assert sum(after.terms.values()) == pytest.approx(after.step_seconds)
    assert after.mfu == pytest.approx(before.mfu / 2)
    assert after.memory_bytes == before.memory_bytes
    assert "trial" in after.sources["step"]
