"""Fixed-point sums: the same bits in any order, errors within half a step, the compiled form equal to the plain one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels import fixed_point
from espalier.kernels.fixed_point import BLOCK, WIDTHS
from espalier.kernels.fixed_point_cpu import NOT_FINITE


def exponents_plain(values: torch.Tensor) -> torch.Tensor:
    """`exponents` in operations of torch."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return ((padded.view(torch.int32) >> 23) & 0xFF).amax(1).to(torch.uint8)


def encode_plain(values: torch.Tensor, shared: torch.Tensor, form: tuple[int, int]) -> torch.Tensor:
    """`encode` without residual in operations of torch."""
    bits, places = form
    most = 2**places - 1
    each = exponent_of_each(shared, values.numel())
    scaled = torch.ldexp(values.double(), places + 126 - each)
    codes = scaled.round().clamp(-most, most).nan_to_num(0.0).to(WIDTHS[bits])
    return codes * (each != NOT_FINITE).to(WIDTHS[bits])


def encoded(
    values: torch.Tensor, shared: torch.Tensor, form: tuple[int, int], rounding: torch.Tensor | int | None = None
) -> torch.Tensor:
    return fixed_point.encode(values, shared, form, torch.empty(4 * values.numel(), dtype=torch.uint8), rounding)


def decoded(total: torch.Tensor, shared: torch.Tensor, places: int) -> torch.Tensor:
    values = torch.empty(total.numel())
    fixed_point.decode(total, shared, places, values)
    return values


def decode_plain(total: torch.Tensor, shared: torch.Tensor, places: int) -> torch.Tensor:
    """`decode` into memory of its own, in operations of torch."""
    each = exponent_of_each(shared, total.numel())
    values = torch.ldexp(total.double(), each - 126 - places)
    return torch.where(each == NOT_FINITE, math.nan, values).float()


def exponent_of_each(shared: torch.Tensor, count: int) -> torch.Tensor:
    return shared.to(torch.int64).repeat_interleave(BLOCK)[:count]


def drawn(count: int, scale: float, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


@given(
    count=st.integers(1, 3 * BLOCK + 5),
    power=st.sampled_from([-140, -30, 0, 20, 120]),
    bits=st.sampled_from([8, 16, 32]),
    workers=st.integers(1, 9),
)
def test_compiled_forms_equal_the_plain_ones(count: int, power: int, bits: int, workers: int) -> None:
    values = drawn(count, 2.0**power, count)
    shared = fixed_point.exponents(values)
    assert shared.equal(exponents_plain(values))
    form = (bits, fixed_point.shift(bits, workers))
    codes = encoded(values, shared, form)
    assert codes.equal(encode_plain(values, shared, form))
    total = torch.full((count,), 5, dtype=torch.int32)
    fixed_point.add(total, codes)
    assert total.equal(codes.to(torch.int32) + 5)
    assert decoded(total, shared, form[1]).equal(decode_plain(total, shared, form[1]))


@given(
    bits=st.sampled_from([8, 16, 32]),
    workers=st.integers(1, 4),
    seed=st.integers(0, 99),
    scales=st.lists(st.integers(-20, 20), min_size=4, max_size=4),
)
def test_sums_are_the_same_in_every_order_and_off_by_half_a_step_each(
    bits: int, workers: int, seed: int, scales: list[int]
) -> None:
    each = [drawn(300, 2.0 ** scales[rank], seed + rank) for rank in range(workers)]
    shared = torch.stack([fixed_point.exponents(one) for one in each]).amax(0)
    form = (bits, fixed_point.shift(bits, workers))
    codes = [encoded(one, shared, form) for one in each]
    found = []
    for order in itertools.permutations(range(workers)):
        total = torch.zeros(300, dtype=torch.int32)
        for rank in order:
            fixed_point.add(total, codes[rank])
        found.append(decoded(total, shared, form[1]))
    assert all(one.equal(found[0]) for one in found)
    step = torch.ldexp(torch.ones(300), shared.long().repeat_interleave(BLOCK)[:300] - 126 - form[1]).double()
    error = (found[0].double() - torch.stack(each).double().sum(0)).abs()
    largest = torch.finfo(torch.float32).eps * found[0].abs().double()  # of the last rounding, to float32
    clamped = 1.5 if bits == 8 else 0.5  # the largest values of a block may be one step beyond the largest code
    assert bool((error <= workers * clamped * step + largest).all())


@pytest.mark.parametrize("bits", [8, 16])
def test_partial_sums_of_all_workers_fit_into_twice_eight_bits(bits: int) -> None:
    workers = fixed_point.MOST
    most = 2 ** fixed_point.shift(bits, workers) - 1
    assert workers * most <= torch.iinfo(torch.int16).max


def test_sums_of_32_bits_fit() -> None:
    for workers in (1, 2, 3, 4, 100):
        assert workers * 2 ** fixed_point.shift(32, workers) < 2**31


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(bad: float, bits: int) -> None:
    values = drawn(2 * BLOCK, 1.0, 0)
    values[3] = bad
    shared = fixed_point.exponents(values)
    form = (bits, fixed_point.shift(bits, 2))
    found = decoded(encoded(values, shared, form).to(torch.int32), shared, form[1])
    assert bool(found[:BLOCK].isnan().all())
    assert bool(found[BLOCK:].isfinite().all())


@given(seed=st.integers(0, 50))
def test_what_error_feedback_keeps_is_what_was_lost(seed: int) -> None:
    values = drawn(700, 3.0, seed)
    shared = fixed_point.exponents(values)
    form = (8, fixed_point.shift(8, 1))
    residual = torch.zeros(700)
    codes = encoded(values, shared, form, residual)
    sent = decoded(codes.to(torch.int32), shared, form[1])
    assert (sent.double() + residual.double()).float().equal(values)


def test_stochastic_rounding_is_right_on_average_and_repeats_itself() -> None:
    values = drawn(256, 1.0, 0)
    shared = fixed_point.exponents(values)
    form = (8, fixed_point.shift(8, 1))
    each = [encoded(values, shared, form, key) for key in range(400)]
    assert encoded(values, shared, form, 7).equal(each[7])
    mean = torch.stack([decode_plain(one.int(), shared, form[1]) for one in each]).double().mean(0)
    step = 2.0 ** (int(shared[0]) - 126 - form[1])
    assert float((mean - values.double()).abs().max()) < 5 * step * 0.5 / math.sqrt(400)
    assert {one.dtype for one in each} == {WIDTHS[8]}
