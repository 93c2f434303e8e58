"""Measured shapes take their measured time, and more of anything never makes a declared device slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Copy, Device, Rate
from espalier.plan import device_model
from espalier.plan.device_model import DeviceUse
from espalier.recipe.cost import Product, Work
from espalier.recipe.errors import UserError

RATES = (
    Rate("product", "fp32", 64, 64, 64, 1, 1, 10e9),
    Rate("product", "fp32", 1024, 256, 512, 1, 1, 40e9),
    Rate("product", "fp32", 64, 64, 64, 2, 1, 12e9),
    Rate("product", "fp32", 1024, 256, 512, 2, 1, 78e9),
    Rate("product", "bf16", 64, 64, 64, 1, 1, 5e9),
    Rate("attention", "fp32", 256, 64, 256, 1, 1, 7e9),
    Rate("attention", "fp32", 4096, 64, 4096, 1, 1, 14e9),
    Rate("attention", "bf16", 256, 64, 256, 1, 1, 6e9),
)
MEASURED = Device(
    name="mine", kind="cpu", memory=2**33, memory_bandwidth=1e10, flops={"fp32": 78e9, "bf16": 5e9, "fp64": 39e9},
    peak=False, rates=RATES, copies=(Copy(1, 1, 6e9), Copy(2, 1, 9e9)), dispatch=1e-6,
)  # fmt: skip


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate.what == "product"])
def test_a_measured_shape_takes_its_measured_time(rate: Rate) -> None:
    product = Product(rate.rows, rate.inner, rate.columns, 3)
    setting = DeviceUse(rate.threads, rate.processes, cores=2)
    seconds = device_model.product_seconds(MEASURED, rate.precision, product, setting)
    assert seconds == pytest.approx(product.flops / rate.flops, rel=1e-6)


@given(st.integers(1, 10**5), st.integers(1, 10**4), st.integers(1, 10**4), st.sampled_from([1, 2]))
def test_between_and_beyond_measurements_rates_stay_within_them(
    rows: int, inner: int, columns: int, threads: int
) -> None:
    product = Product(rows, inner, columns)
    rate = product.flops / device_model.product_seconds(MEASURED, "fp32", product, DeviceUse(threads, 1, 2))
    assert 0.99 * 6e9 * threads <= rate <= 1.01 * 40e9 * threads


def test_a_precision_not_measured_is_scaled_by_its_rate() -> None:
    product = Product(64, 64, 64)
    ratio = device_model.product_seconds(MEASURED, "fp64", product, DeviceUse()) / device_model.product_seconds(
        MEASURED, "fp32", product, DeviceUse()
    )
    assert ratio == pytest.approx(2.0)


def test_more_threads_than_cores_take_turns() -> None:
    one = device_model.product_seconds(MEASURED, "fp32", Product(64, 64, 64), DeviceUse(2, 1, cores=2))
    crowded = device_model.product_seconds(MEASURED, "fp32", Product(64, 64, 64), DeviceUse(2, 1, cores=1))
    assert crowded == pytest.approx(2 * one)


def attending(flop: float, length: int) -> Work:
    return replace(Work((), 0.0, 0.0, 0.0, 0.0, 0.0, 1, 1), attention=flop, length=length, head_size=64)


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate.what == "attention"])
def test_attention_of_a_measured_length_and_precision_takes_its_measured_time(rate: Rate) -> None:
    work = attending(rate.flops, rate.rows)
    assert device_model.attention_seconds(MEASURED, rate.precision, work, DeviceUse()) == pytest.approx(1.0)


def test_attention_between_measured_lengths_goes_between_their_rates() -> None:
    seconds = device_model.attention_seconds(MEASURED, "fp32", attending(14e9, 1024), DeviceUse())
    assert 1.1 < seconds < 1.9


def test_backward_makes_no_gradient_of_data() -> None:
    inner, leaf = device_model.backward(Product(8, 4, 2)), device_model.backward(Product(8, 4, 2, leaf=True))
    assert sum(one.flops for one in inner) == 2 * Product(8, 4, 2).flops
    assert leaf == (Product(4, 8, 2),)


def test_copies_go_at_their_measured_rate() -> None:
    assert device_model.moved_seconds(MEASURED, 6e9, DeviceUse(1, 1, 2)) == pytest.approx(1.0, rel=1e-6)
    assert device_model.moved_seconds(MEASURED, 9e9, DeviceUse(2, 1, 2)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", clusters.known_devices())
@given(
    st.tuples(st.integers(1, 10**5), st.integers(1, 10**4), st.integers(1, 10**4)), st.integers(0, 2), st.integers(2, 9)
)
def test_a_larger_product_is_never_faster(name: str, sizes: tuple[int, int, int], which: int, factor: int) -> None:
    device = clusters.device(name, cores=4, memory=2**33)
    larger = list(sizes)
    larger[which] *= factor
    setting = DeviceUse(cores=4)
    small = device_model.product_seconds(device, "fp32", Product(*sizes), setting)
    assert device_model.product_seconds(device, "fp32", Product(*larger), setting) >= small


def test_large_products_reach_nearly_the_peak_and_none_exceeds_it() -> None:
    device = clusters.device("A100-80GB")
    for rows in (16, 1024, 65536):
        product = Product(rows, 65536, 65536)
        rate = product.flops / device_model.product_seconds(device, "bf16", product, DeviceUse())
        assert rate <= 312e12
    assert rate == pytest.approx(device.sustained["product"] * 312e12, rel=0.02)


@pytest.mark.parametrize("device", [MEASURED, clusters.device("T4")], ids=["measured", "declared"])
def test_arrays_give_what_numbers_give(device: Device) -> None:
    rows = np.array([0, 64, 300, 5000])
    together = device_model.product_seconds(device, "fp32", Product(rows, 64, 64, 2), DeviceUse())
    alone = [device_model.product_seconds(device, "fp32", Product(int(r), 64, 64, 2), DeviceUse()) for r in rows]
    assert together == pytest.approx(alone)
    assert together[0] == 0


def test_backward_does_each_product_twice() -> None:
    product = Product(100, 20, 30, 4)
    assert sum(one.flops for one in device_model.backward(product)) == 2 * product.flops


def test_a_precision_the_device_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"T4 has no rate for bf16[\s\S]*train.precision"):
        device_model.peak(clusters.device("T4"), "bf16")


def test_mfu_counts_the_vendor_s_peak_of_a_measured_gpu() -> None:
    measured = Device(
        name="H100", kind="cuda", memory=1, memory_bandwidth=1.0, flops={"bf16": 7e14}, peak=False, rates=RATES
    )
    assert device_model.peak(measured, "bf16") == 989.4e12
    assert device_model.peak(MEASURED, "fp32") == 78e9


def product_rate(name: str, rows: int, inner: int, columns: int) -> float:
    """Share of what a device sustains in large products."""
    device, product = clusters.device(name), Product(rows, inner, columns)
    taken = device_model.product_seconds(device, "fp16", product, DeviceUse())
    return float(product.flops / taken / device_model.sustained(device, "fp16"))


def test_a_small_product_is_never_faster_on_a_slower_device() -> None:
    cards = [clusters.device(name) for name in ("RTX 3060", "RTX 3090", "RTX 4090", "A100-80GB", "H100")]
    product = Product(2**11, 2**11, 2**11)
    seconds = [device_model.product_seconds(device, "bf16", product, DeviceUse()) for device in cards]
    assert seconds == sorted(seconds, reverse=True)


def test_a_product_without_arithmetic_goes_at_the_speed_of_memory() -> None:
    """A vector times a matrix: each value of the matrix is read once."""
    device = clusters.device("A100-80GB")
    taken = device_model.product_seconds(device, "bf16", Product(2, 2**15, 2**15), DeviceUse())
    assert taken == pytest.approx(2 * 2**30 / (device.memory_bandwidth * device_model.COPY_SHARE), rel=0.05)


def test_few_tiles_leave_multiprocessors_idle() -> None:
    """The last wave costs the same whether the product has one wave or sixty-four."""
    few, many = (product_rate("H100", rows, 4096, 2048) for rows in (2**10, 2**16))
    assert few < 0.9 * many


def test_what_a_tile_ends_with_counts_where_tensor_cores_are_fast_for_their_vector_units() -> None:
    """The inner size is small: an A100 has a quarter of a 4090's vector rate, and twice its tensor cores'."""
    narrow = {name: product_rate(name, 2**16, 512, 4096) for name in ("A100-80GB", "RTX 4090", "V100-32GB")}
    assert narrow["A100-80GB"] < narrow["V100-32GB"] < 0.98
    assert narrow["A100-80GB"] < 0.85 < narrow["RTX 4090"]


def test_sizes_that_nobody_knows_lose_nothing() -> None:
    assert product_rate("A100-80GB", 2**30, 1, 1) == pytest.approx(1.0)


def test_written_scores_are_priced_as_the_products_they_are() -> None:
    device, work = clusters.device("A100-80GB"), attending(1e12, 512)
    product = device_model.written(work)
    assert product.flops == pytest.approx(work.attention)
    fused = device_model.attention_seconds(device, "bf16", work, DeviceUse())
    assert device_model.product_seconds(device, "bf16", product, DeviceUse()) > 2 * fused


def test_products_of_experts_are_slower_in_backward_too() -> None:
    device, dense = clusters.device("H100"), Product(2**14, 4096, 4096)
    grouped = replace(dense, grouped=True)
    for left, right in zip(
        (dense, *device_model.backward(dense)), (grouped, *device_model.backward(grouped)), strict=True
    ):
        seconds = [device_model.product_seconds(device, "bf16", product, DeviceUse()) for product in (left, right)]
        assert 1.2 < seconds[1] / seconds[0] < 1 / device_model.GROUPED
