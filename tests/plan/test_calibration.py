"""Calibration finds the coefficients that made the measurements, stays physical, and knows how sure it is."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from asked import decoder, gpus, processor
from rows import timed, unmeasured

from espalier.machine import cluster as clusters
from espalier.machine.cluster.values import Rate
from espalier.plan.calibration import (
    DATASHEET,
    INDIRECT,
    LOWEST,
    PRIOR,
    RANGE,
    UNCALIBRATED,
    UNKNOWN,
    Batch,
    Calibration,
    Measurement,
    calibrate,
)
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.decide import UNTRIED, decide
from espalier.plan.device_model import peak, sustained
from espalier.recipe.errors import UserError

MINE = '{ name = "mine", kind = "cuda", memory = 100000000000, memory_bandwidth = 1e12, flops = { fp32 = 1e13 } }'
TRUTH = CostFactors(product=1.15, small=1.5, memory=1.2, issue=1.8, inside=1.1, call=2.5, activations=1.3)


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return unmeasured()


@pytest.fixture(scope="module")
def fitted(rows: list[Measurement]) -> Calibration:
    return calibrate(timed(rows, TRUTH))


@pytest.fixture(scope="module")
def half(rows: list[Measurement]) -> Calibration:
    return calibrate(timed(rows, TRUTH)[::2])


def distance(found: Calibration, name: str) -> float:
    """From the truth, in standard errors of the calibration."""
    return abs(math.log(getattr(found.factors, name) / getattr(TRUTH, name))) / found.errors[name]


def test_factors_that_made_the_measurements_come_back_within_their_errors(fitted: Calibration) -> None:
    assert {name: far for name in PRIOR if (far := distance(fitted, name)) > 2} == {}
    assert fitted.errors["product"] < PRIOR["product"] / 2, "the rows say more of products than was assumed"
    assert fitted.factors.activations == pytest.approx(TRUTH.activations, rel=0.01)


def test_a_calibrated_prediction_meets_steps_it_was_not_fitted_to(rows: list[Measurement], half: Calibration) -> None:
    unseen = timed(rows, TRUTH)[1::2]
    truth = np.array([row.step_seconds for row in unseen])
    held_out, plain = (Batch(unseen).predict(factors)[0] for factors in (half.factors, PLAIN))
    assert np.mean(abs(held_out / truth - 1)) < 0.02 < np.mean(abs(plain / truth - 1))


@pytest.mark.parametrize("speed", [0.2, pytest.param(8.0, marks=pytest.mark.slow)])
def test_no_measurement_makes_a_coefficient_unphysical(rows: list[Measurement], speed: float) -> None:
    some = timed(rows[::12])
    found = calibrate([replace(row, step_seconds=(row.step_seconds or 0) / speed) for row in some]).factors
    for name in PRIOR:
        assert getattr(found, name) >= LOWEST.get(name, RANGE[0]) * (1 - 1e-9)
        assert getattr(found, name) <= RANGE[1] * (1 + 1e-9)


@pytest.mark.parametrize("device", ["H100-PCIe", "RTX 3090"])
def test_no_product_is_faster_than_the_peak_of_the_device_that_was_measured(
    rows: list[Measurement], device: str
) -> None:
    cluster = gpus(device, devices=8)
    one = cluster.nodes[0].device
    moved = [replace(row, cluster=cluster) for row in rows if row.layout.world <= 8][::12]
    found = calibrate([replace(row, step_seconds=(row.step_seconds or 0) / 8) for row in timed(moved)]).factors
    for precision in {row.request.precision for row in moved}:
        least = sustained(one, precision) / peak(one, precision)
        assert least * (1 - 1e-9) <= found.product < least * 1.01


def test_more_rows_make_no_coefficient_less_sure(fitted: Calibration, half: Calibration) -> None:
    assert all(fitted.errors[name] <= half.errors[name] * 1.001 for name in PRIOR)
    assert fitted.spread <= half.spread


def test_the_order_of_rows_does_not_matter(rows: list[Measurement], half: Calibration) -> None:
    other = calibrate(timed(rows, TRUTH)[::2][::-1])
    left, right = msgspec.structs.asdict(half.factors), msgspec.structs.asdict(other.factors)
    assert left == pytest.approx(right, rel=1e-3)
    assert other.spread == pytest.approx(half.spread, rel=1e-3)


def test_the_band_holds_four_of_five_measurements_not_seen(rows: list[Measurement]) -> None:
    measured = timed(rows, TRUTH, noise=0.1) + timed(rows, TRUTH, noise=0.1, seed=1)
    found = calibrate(measured[: len(rows)])
    low, high = found.band
    fresh = measured[len(rows) :]
    ratio = np.array([row.step_seconds for row in fresh]) / Batch(fresh).predict(found.factors)[0]
    assert 0.7 < np.mean((ratio > low) & (ratio < high)) < 0.92


def test_few_rows_are_not_trusted_like_many(rows: list[Measurement], fitted: Calibration) -> None:
    assert calibrate(timed(rows, TRUTH)[:2]).spread > fitted.spread


@pytest.mark.parametrize(("factor", "hint"), [(1000, "divide"), (1 / 1000, "multiply"), (1e6, "divide")])
def test_other_units_are_refused_and_named(rows: list[Measurement], factor: float, hint: str) -> None:
    wrong = [replace(row, step_seconds=(row.step_seconds or 0) * factor) for row in timed(rows[:8])]
    with pytest.raises(UserError, match=hint):
        calibrate(wrong)
    full = [replace(row, step_seconds=None, peak_bytes=(row.peak_bytes or 0) * factor) for row in timed(rows[:8])]
    with pytest.raises(UserError, match="memory"):
        calibrate(full)


def test_rows_out_of_memory_say_nothing_of_time(rows: list[Measurement]) -> None:
    measured = timed(rows[:8], TRUTH)
    broken = [replace(row, out_of_memory=True, step_seconds=1e9) for row in measured]
    assert calibrate(measured + broken).factors == calibrate(measured).factors
    with pytest.raises(UserError, match="no measured step"):
        calibrate(broken)


def spread(device: str, count: int = 1, inside: str = "") -> float:
    return DATASHEET.on(gpus(device, devices=count, inside=inside), count).spread


def test_where_nothing_was_measured_a_prediction_is_as_certain_as_what_is_known_of_the_devices() -> None:
    assert UNCALIBRATED == spread("A100-80GB") < spread("RTX 4090") < spread("RTX 4090 Laptop")
    mixed = msgspec.structs.replace(gpus("A100-80GB"), nodes=gpus("A100-80GB").nodes + gpus("L40").nodes)
    assert DATASHEET.on(mixed, 8).spread == spread("A100-80GB")
    assert DATASHEET.on(mixed, 9).spread == spread("L40")
    described = clusters.dumps(gpus("A100-80GB")).replace('"A100-80GB"', MINE)
    assert DATASHEET.on(clusters.loads(described), 1).spread == UNKNOWN


def test_an_assumed_processor_is_told_from_one_that_is_described_and_one_that_was_probed() -> None:
    assumed = processor(4)
    (node,) = assumed.nodes
    described = msgspec.structs.replace(node.device, spread=0.0)
    probed = msgspec.structs.replace(described, peak=False, rates=(Rate("product", "fp32", 512, 512, 512, 1, 1, 1e10),))
    spreads = [
        DATASHEET.on(msgspec.structs.replace(assumed, nodes=(msgspec.structs.replace(node, device=it),)), 4).spread
        for it in (probed, described, node.device)
    ]
    assert spreads == [UNCALIBRATED, UNKNOWN, 1.0]


def test_what_nobody_ran_is_said_until_it_was_measured() -> None:
    two, one = (gpus("A100-80GB", devices=count) for count in (2, 1))
    for cluster, calibration, said in (
        (two, DATASHEET, True),
        (two, Calibration(rows=9, ranks=1), True),
        (two, Calibration(rows=9, ranks=2), False),
        (one, DATASHEET, False),
        (processor(4), DATASHEET, False),
    ):
        plan = decide(decoder(), cluster, calibration).plan
        assert (UNTRIED in plan.why) == said
        assert len(plan.ranks) > 1 or not said


def test_exchanges_through_host_memory_or_tcp_make_a_prediction_less_certain() -> None:
    assert spread("RTX 4090") < spread("RTX 4090", 2) == INDIRECT
    assert spread("RTX 3090", 2, inside="56GB/s") == spread("RTX 3090")  # a bridge
    assert DATASHEET.on(gpus("A100-80GB", 2, between="800Gbit/s"), 16).spread == UNCALIBRATED


def test_measurements_say_how_certain_a_prediction_is_whatever_the_devices() -> None:
    measured = Calibration(spread=0.07, rows=9)
    assert measured.on(gpus("RTX 4090 Laptop"), 8) == measured


def test_another_stack_and_more_ranks_are_less_certain(rows: list[Measurement]) -> None:
    found = calibrate([replace(row, stack="one") for row in timed(rows[:24], TRUTH)])
    known, foreign = (found.on(gpus(), found.ranks, stack).spread for stack in ("one", "other"))
    assert known == found.spread == found.on(gpus(), found.ranks).spread
    assert foreign >= math.hypot(known, UNCALIBRATED) * (1 - 1e-9)
    far = [found.on(gpus(count=64), count * found.ranks, "one").spread for count in (1, 8, 64)]
    assert far[0] == known < far[1] < far[2]


def test_a_plan_says_that_its_calibration_is_of_another_stack() -> None:
    request, cluster = decoder(), gpus("A100-80GB")
    for stacks, doubted in (((), False), (("espalier on A100-80GB",), False), (("megatron on A100-80GB",), True)):
        known = Calibration(stacks=stacks, rows=9, spread=0.1, source="mine")
        plan = decide(request, cluster, known).plan
        assert any("Calibrated on megatron on A100-80GB, not on" in one for one in plan.why) == doubted
        assert plan.predicted is not None
        assert (plan.predicted.spread > 0.1) == doubted
