"""A2Q: codes times steps are the quantized values to the bit; gradients are those of the formulas; a target is kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from espalier.kernels.row_bits import pack_rows, unpack_rows
from espalier.kernels.step_codes import STEPS
from espalier.mechanisms.few_bits import a2q
from espalier.mechanisms.few_bits import bit_allocator as base
from espalier.mechanisms.few_bits.a2q import ColumnQuantizer, FakeQuantize, FeatureQuantizer, Rule
from espalier.mechanisms.few_bits.bit_allocator import (
    BankBits,
    BitAllocator,
    DegreeBits,
    Layer,
    MemoryTarget,
    NodeBits,
    RowIndex,
    UniformBits,
)
from espalier.recipe.errors import UserError


def rows(count: int, columns: int, seed: int, signed: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator) * torch.rand(count, 1, generator=generator) * 4
    return x if signed else x.relu()


def quantizer_of(bits: list[float], columns: int, signed: bool = True, **rule) -> FeatureQuantizer:
    allocator = NodeBits(len(bits), 4)
    allocator.raw_bits.data = torch.tensor(bits) / base.BIT_RATE
    return FeatureQuantizer(allocator, columns, Rule(signed=signed, **rule))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1.0, 12.0), min_size=1, max_size=12), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_unpacked_codes_times_steps_are_the_quantized_values_bit_for_bit(
    bits: list[float], columns: int, signed: bool, seed: int
) -> None:
    x = rows(len(bits), columns, seed, signed)
    quantizer = quantizer_of(bits, columns, signed).eval()
    quantizer.begin(x)
    coded = quantizer.codes(x)
    back = unpack_rows(pack_rows(coded.codes, coded.widths), coded.widths, columns, signed)
    assert torch.equal(back * STEPS[coded.steps.long()][:, None], quantizer(x))
    assert int(coded.widths.max()) <= 8


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("signed", [False, True])
def test_every_width_uses_its_whole_range_and_rounds_within_half_a_step(width: int, signed: bool) -> None:
    bits = float(width if signed else width + 1)
    x = rows(5, 200, width, signed)
    quantizer = quantizer_of([bits] * 5, 200, signed)
    quantizer.allocator.fits = False
    quantizer.allocator.raw_step.data.fill_(-1.0 / quantizer.allocator.rate)
    coded, found = quantizer.codes(x), quantizer(x)
    largest = 2 ** (width - 1) - 1 if signed else 2**width - 1
    assert set(coded.widths.tolist()) == {0 if largest == 0 else width}
    inside = x.abs() <= 0.5 * largest
    assert bool(((found - x).abs()[inside] <= 0.25).all())
    assert bool((found.abs()[~inside] == 0.5 * largest).all())


def test_eight_bits_and_the_largest_value_is_plain_int8() -> None:
    x = rows(4, 30, 1).double()
    step = x.abs().amax(1, keepdim=True) / 127
    codes = a2q.codes_of(x, step, torch.full((4, 1), 8.0), True)
    assert torch.equal(codes, (x / step).sign() * ((x / step).abs() + 0.5).floor())


@pytest.mark.parametrize("signed", [False, True])
def test_gradients_are_finite_differences_of_the_steps_and_the_closed_forms(signed: bool) -> None:
    x = rows(6, 25, 3).double()
    step = torch.full((6, 1), 0.37, dtype=torch.float64)
    bits = torch.full((6, 1), 3.0, dtype=torch.float64)
    for one in (x, step, bits):
        one.requires_grad_()
    weight = rows(6, 25, 4).double()
    (FakeQuantize.apply(x, step, bits, Rule(signed=signed, ste="clip")) * weight).sum().backward()
    largest, e = 3.0, 1e-7
    inside = (x.abs() <= 0.37 * largest) if signed else (x >= 0) & (x <= 0.37 * largest)
    assert torch.equal(x.grad, weight * inside)

    def value(step: torch.Tensor, largest: float) -> torch.Tensor:  # the quantizer with its rounding taken as linear
        code = a2q.codes_of(x, torch.full((6, 1), 0.37), torch.full((6, 1), 3.0), signed).detach()
        straight = (code - x / 0.37 + x / step) * step
        sign = x.sign() if signed else (x > 0).double()
        return torch.where(inside, straight, sign * largest * step).detach()

    slope = (value(step + e, largest) - value(step - e, largest)) / (2 * e)
    code = a2q.codes_of(x, step, bits, signed)
    closed = torch.where(inside, code - x / step, code)
    assert torch.allclose(step.grad, (weight * closed).sum(1, keepdim=True), rtol=0, atol=1e-9)
    assert torch.allclose(torch.where(inside, 0, slope), torch.where(inside, 0, closed), atol=1e-6)
    up, down = (value(step, 2 ** (3 + d - 1) - 1) for d in (e, -e))
    assert torch.allclose(bits.grad, (weight * (up - down) / (2 * e)).sum(1, keepdim=True), atol=1e-5)


def test_the_step_gradient_inside_is_that_of_the_difference_quotient_at_a_fixed_code() -> None:
    x = torch.tensor([[0.9, -0.4]], dtype=torch.float64)
    step = torch.tensor([[0.37]], dtype=torch.float64, requires_grad=True)
    FakeQuantize.apply(x, step, torch.tensor([[4.0]], dtype=torch.float64), Rule()).sum().backward()
    assert step.grad.item() == pytest.approx((2 - 0.9 / 0.37) + (-1 + 0.4 / 0.37))


def test_the_local_gradient_is_that_of_the_rows_own_error_and_features_keep_the_tasks() -> None:
    x = rows(5, 16, 7).double().requires_grad_()
    step = torch.full((5, 1), 0.2, dtype=torch.float64, requires_grad=True)
    bits = torch.full((5, 1), 2.0, dtype=torch.float64, requires_grad=True)
    found = FakeQuantize.apply(x, step, bits, Rule(local=1.0, ste="pass"))
    weight = rows(5, 16, 8).double()
    (found * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    other = [one.detach().clone().requires_grad_() for one in (x, step, bits)]
    again = FakeQuantize.apply(*other, Rule())
    ((again - x.detach()).abs().mean(1) / 0.2).sum().backward()
    assert torch.allclose(step.grad, other[1].grad, rtol=0, atol=1e-9)
    assert torch.allclose(bits.grad, other[2].grad / 2, rtol=0, atol=1e-9), "in its range, which is twice the step here"
    assert bool((bits.grad <= 0).all()), "clipping error pushes bits up"


def test_rows_that_no_loss_reaches_learn_by_the_local_gradient_alone() -> None:
    x, quantizer = rows(10, 8, 2), quantizer_of([3.0] * 10, 8, local=1.0)
    quantizer(x)[:2].sum().backward()
    told = quantizer_of([3.0] * 10, 8)
    told(x)[:2].sum().backward()
    assert int((quantizer.allocator.raw_step.grad != 0).sum()) == 10
    assert int((told.allocator.raw_step.grad != 0).sum()) == 2


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 99))
def test_the_nearest_pair_is_that_of_a_search_through_all(pairs: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(1, 9, (pairs,), generator=generator).float()
    steps = torch.rand(pairs, generator=generator) + 0.01
    x = rows(count, 4, seed)
    ranges = steps * base.largest_code(bits, True)
    distance = (x.abs().amax(1)[:, None] - ranges[None]).abs()
    found = base.nearest(x, bits, steps, True)
    assert torch.allclose(distance[torch.arange(count), found], distance.min(1).values)


def test_permuting_rows_permutes_what_they_become() -> None:
    x, order = rows(7, 9, 5), torch.randperm(7)
    quantizer = quantizer_of([2.0, 3, 4, 5, 6, 7, 8], 9).eval()
    assert torch.equal(quantizer(x)[order], quantizer(x[order], RowIndex(order)))


@settings(deadline=None, max_examples=40)
@given(st.floats(-10, 10), st.integers(2, 8), st.booleans())
def test_a_constant_row_is_within_half_a_step_of_itself(power: float, bits: int, signed: bool) -> None:
    """Not exact, as steps are powers of 2^(1/8)."""
    x = torch.full((1, 12), 2.0**power)
    quantizer = quantizer_of([float(bits + (not signed))], 12, signed).eval()
    quantizer.begin(x)
    coded, found = quantizer.codes(x), quantizer(x).detach()
    assert len(found.unique()) == 1
    assert float((found - x).abs().max()) <= float(STEPS[coded.steps.long()]) / 2
    assert float((found - x).abs().max() / x.max()) <= 2**0.25 - 1, "steps of rows are half an octave apart"


def test_bits_beside_a_gain_of_dropout_are_those_without() -> None:
    x, quantizer = rows(4, 6, 1), quantizer_of([4.0] * 4, 6)
    plain = quantizer(x)
    quantizer.gain = 2.0
    assert torch.equal(quantizer(2 * x), 2 * plain)
    assert torch.equal(quantizer.eval()(x), plain)


@pytest.mark.parametrize("signed", [False, True])
def test_fitted_steps_have_the_least_error_in_either_form(signed: bool) -> None:
    x, bits = rows(300, 23, 3), torch.linspace(1, 8, 300)
    x[7] = 0
    x[-9:] *= torch.logspace(-9, 9, 9, base=4)[:, None]  # beyond both ends of the table of steps
    middle = x.abs().mean(1).clamp(min=2e-5).log2() - 1
    errors = []
    for form in (a2q.fitted.reference.run, a2q.fitted_by_rows):
        found = form(x, middle, bits, signed)
        step = STEPS[base.step_codes(found).long()][:, None]
        errors.append((a2q.codes_of(x, step, bits[:, None], signed) * step - x).square().sum(1))
        assert float((found - middle).abs().max()) <= 2 + 0.5 / a2q.PARTS
    assert torch.allclose(*errors, rtol=1e-5)
    step = STEPS[base.step_codes((a2q.PARTS * middle).round() / a2q.PARTS + 0.5).long()][:, None]
    other = (a2q.codes_of(x, step, bits[:, None], signed) * step - x).square().sum(1)
    assert bool((errors[0] <= other).all())


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    "rule", [Rule(), Rule(ste="pass"), Rule(owned=120), Rule(local=0.7), Rule(local=0.7, owned=120)]
)
def test_the_compiled_form_rounds_to_the_same_bits_and_has_the_same_gradients(signed, by_row, rule) -> None:
    rule, x, upstream = rule._replace(signed=signed), rows(300, 23, 3), rows(300, 23, 4)
    x[7], x[:, 5] = 0, 0
    count = 300 if by_row else 23
    step, bits = (
        (rows(count, 1, 5).abs() + 0.05).view((count, 1) if by_row else (1, count)),
        torch.linspace(1, 8, count),
    )
    given = x, step, bits.view(step.shape), rule
    assert a2q.rounded_values.pick(*given).run is a2q.rounded_by_kernel
    plain = a2q.rounded_values.reference.run(*given)
    double = *(one.double() for one in given[:3]), rule
    for values in (x, x.T.contiguous().T):
        found = a2q.rounded_by_kernel(values, *given[1:])
        assert torch.equal(found.values, plain.values)
        close(found[1:], a2q.rounded_values.reference.run(*double)[1:])
    found = a2q.gradients_by_kernel(*given, upstream)
    close(found, a2q.rounding_gradients.reference.run(*double, upstream.double()))
    again = a2q.gradients_by_kernel(*given, upstream)
    assert all(one is other or torch.equal(one, other) for one, other in zip(found, again, strict=True))


def close(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_rows_that_come_again_are_what_they_are_made_anew() -> None:
    """Values, widths, steps and gradients, while some or all pairs change between."""
    x, random = rows(60, 21, 3), torch.Generator().manual_seed(4)
    quantizer, other = quantizer_of([4.0] * 60, 21, local=1.0), quantizer_of([4.0] * 60, 21, local=1.0)
    for part in (0, 0, 1, 5, 60, 0):
        moved = torch.randn(part, generator=random)
        for one in (quantizer, other):
            one.zero_grad()
            one.allocator.raw_step.data[:part] += moved / one.allocator.rate
            one.allocator.raw_bits.data[:part] += moved
        found, again = quantizer(x), other(x.clone())
        assert torch.equal(found, again)
        for one in (found, again):
            one.sum().backward()
        for one, same in zip(quantizer.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, same.grad)
    assert quantizer.kept_values.made
    assert not other.kept_values.made
    x[0] += 1
    assert torch.equal(quantizer(x), other(x.clone()))
    assert not copy.deepcopy(quantizer).kept_values.made


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60), st.integers(1, 40), st.floats(0.05, 1.0), st.integers(0, 99))
def test_the_shift_that_is_searched_among_few_entries_is_that_of_all(
    entries: int, columns: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for at in range(2):
        allocator = NodeBits(entries, 4.0)
        allocator.raw_bits.data = 9 * torch.rand(entries, generator=generator).round(decimals=2) / base.BIT_RATE
        layers.append(Layer(allocator, columns, signed=bool(at)))
    target = MemoryTarget(layers, max(math.ceil(entries / 4), int(share * entries * columns)))
    assert target.shift() == target.bisected()


def allocators() -> list[BitAllocator]:
    return [NodeBits(50, 4), BankBits(50, 4, pairs=20), UniformBits(50, 4)]


@pytest.mark.parametrize("allocator", allocators(), ids=lambda one: type(one).__name__)
def test_every_policy_begins_near_its_values(allocator: BitAllocator) -> None:
    x = rows(50, 32, 6)
    quantizer = FeatureQuantizer(allocator, 32, Rule())
    quantizer.begin(x)
    assert float((quantizer(x).detach() - x).norm() / x.norm()) < 0.3


def test_a_bank_begins_with_a_sample_of_more_rows_than_a_quantile_takes(monkeypatch) -> None:
    """Of 5,000 rows every fifth, as if there were no others."""
    x, banks, taken = rows(5000, 8, 6), [BankBits(5000, 4, pairs=20) for _ in range(2)], []
    real = torch.Tensor.quantile
    monkeypatch.setattr(torch.Tensor, "quantile", lambda one, q: (taken.append(len(one)), real(one, q))[1])
    banks[0].begin(x[::5], RowIndex(None, None), signed=True)
    monkeypatch.setattr(base, "QUANTILE", 1000)
    banks[1].begin(x, RowIndex(None, None), signed=True)
    assert taken == [1000, 1000]
    assert torch.equal(banks[0].steps, banks[1].steps)


SPARSE_ROWS = [UniformBits(400, 3), NodeBits(400, 3), DegreeBits(torch.arange(400) % 7, 3)]


@pytest.mark.parametrize("allocator", SPARSE_ROWS, ids=lambda one: type(one).__name__)
def test_zeros_of_sparse_rows_do_not_count_where_steps_begin(allocator: BitAllocator) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 40, generator=generator) * (torch.rand(400, 40, generator=generator) < 0.2)
    x, index = x / x.norm(dim=1, keepdim=True).clamp(min=1e-6), RowIndex(None, torch.arange(400) % 7)
    quantizer = FeatureQuantizer(allocator, 40, Rule(signed=False))
    quantizer.begin(x, index)
    steps = allocator.steps.clone()
    quantizer.begin(torch.cat([x, torch.zeros(400, 2000)], 1), index)
    assert torch.equal(allocator.steps, steps)
    assert float((quantizer(x, index).detach() - x).norm() / x.norm()) < 0.35  # by the mean of all values 0.98


def test_nodes_that_were_not_in_training_have_the_pair_of_trained_rows_like_theirs() -> None:
    generator = torch.Generator().manual_seed(1)
    allocator, trained = BankBits(60, 4, pairs=20), rows(60, 12, 2)
    quantizer = FeatureQuantizer(allocator, 12, Rule())
    quantizer.begin(trained)
    allocator.raw_bits.data = torch.randint(1, 9, (20,), generator=generator) / base.BIT_RATE
    quantizer(trained)
    known = quantizer.eval().codes(trained)
    assert len(known.widths.unique()) > 3
    like = torch.randint(60, (200,), generator=generator)
    for unseen in (like, like[:1], like.flip(0)):  # in a graph of another size and order
        own = quantizer.codes(trained[unseen])
        for one, other in zip(own, known, strict=True):
            assert torch.equal(one, other[unseen])
    turned = quantizer.codes(trained[like].flip(1) * torch.tensor([-1.0, 1.0] * 6))
    assert torch.equal(turned.widths, known.widths[like])  # by the largest value alone
    degrees = torch.tensor([1, 1, 2, 5, 40, 40])
    by_degree = FeatureQuantizer(DegreeBits(degrees, 4), 12, Rule())
    by_degree.allocator.raw_bits.data = torch.linspace(1, 8, len(by_degree.allocator.counts)) / base.BIT_RATE
    seen = by_degree.codes(trained[:6], RowIndex(None, degrees)).widths
    strange = torch.tensor([40, 2, 3, 4, 21, 9000, 1])
    own = by_degree.codes(trained[6:13], RowIndex(None, strange)).widths
    assert torch.equal(own, seen[[4, 2, 2, 3, 3, 4, 0]])


def test_hidden_nodes_teach_nothing_and_take_the_nearest_pair_of_the_others() -> None:
    x, hidden = rows(40, 16, 3, signed=False), torch.arange(30, 40)
    allocator = NodeBits(40, 4.0, hidden=hidden)
    quantizer = FeatureQuantizer(allocator, 16, Rule(signed=False, local=1.0))
    quantizer.begin(x)
    quantizer(x).sum().backward()
    for one in (allocator.raw_bits, allocator.raw_step):
        assert one.grad is not None
        assert not one.grad[hidden].any()
    assert allocator.raw_step.grad is not None
    assert allocator.raw_step.grad[:30].any()
    before = quantizer.eval()(x)
    allocator.raw_bits.data[hidden] = 1.0 / base.BIT_RATE
    assert torch.equal(quantizer(x), before)
    others = MemoryTarget([Layer(allocator, 16, signed=False)], 400).bytes_at()
    allocator.raw_bits.data[:30] += 1.0 / base.BIT_RATE
    assert MemoryTarget([Layer(allocator, 16, signed=False)], 400).bytes_at() == pytest.approx(others + 40 * 2)


def target_of(bytes_: int, bits: float = 4.0) -> tuple[MemoryTarget, NodeBits]:
    allocator = NodeBits(100, bits)
    return MemoryTarget([Layer(allocator, 16, False)], bytes_), allocator


def test_evaluation_keeps_to_the_target_exactly_and_takes_no_more_than_it_must() -> None:
    target, allocator = target_of(400)
    allocator.raw_bits.data = torch.linspace(1, 8, 100) / base.BIT_RATE
    assert target.bytes_at() > 400
    assert 350 < target.bytes_at(target.shift()) <= 400
    allocator.raw_bits.data.fill_(0.2)
    assert target.shift() == 0


def test_widths_that_begin_apart_lose_no_more_bits_than_the_target_asks_for() -> None:
    """1.5 bits a value: half of the rows keep two; of equal widths none would."""
    kept = []
    for spreads in (False, True):
        allocator = NodeBits(40, 3.0)
        if spreads:
            allocator.spread(torch.arange(40).flip(0))
            assert torch.equal(allocator.raw_bits.argsort(), torch.arange(40).flip(0))
            assert float(allocator.raw_bits.detach().mean()) == pytest.approx(3.0 / base.BIT_RATE)
        target = MemoryTarget([Layer(allocator, 16, signed=False)], 40 * 16 * 3 // 16)
        kept.append(target.bytes_at(target.shift()))
    assert kept == [80, 120]


@pytest.mark.parametrize(
    ("signed", "bits", "excess"), [(False, 4.0, 2.0), (True, 4.0, 3.0), (True, -2.0, 1.0), (True, 1.0, 0.0)]
)
def test_the_penalty_is_the_square_of_what_is_beyond_the_target(signed: bool, bits: float, excess: float) -> None:
    """Of 100 rows of 16 values, as a share of 200 bytes; the sign of codes without one takes nothing."""
    target = MemoryTarget([Layer(NodeBits(100, bits), 16, signed)], 200)
    assert float(target.penalty().detach()) == pytest.approx(100 * excess**2)


def test_a_heavier_penalty_takes_bits_down_further() -> None:
    left = []
    for weight in (0.0, 0.01, 0.1, 1.0):
        target, allocator = target_of(200)
        target.weight = weight
        x, quantizer = rows(100, 16, 4, signed=False), FeatureQuantizer(allocator, 16, Rule(False, local=1.0))
        quantizer.begin(x)
        optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.01 * 10 / base.BIT_RATE)
        for _ in range(60):
            optimizer.zero_grad()
            (quantizer(x).sum() * 0 + target.penalty()).backward()
            optimizer.step()
        left.append(allocator.bits.abs().mean().item())
    assert left == sorted(left, reverse=True)
    assert left[-1] < left[0] - 1


def test_a_target_without_a_bit_for_every_row_says_the_least() -> None:
    target_of(13)
    with pytest.raises(UserError, match=r"one bit for each of 100 rows takes 13"):
        target_of(12)


@pytest.mark.parametrize("bits", [1, 0, 9])
def test_weights_of_impossible_widths_are_refused(bits: int) -> None:
    with pytest.raises(UserError, match="bits of signed codes"):
        ColumnQuantizer(3, bits, local=False)


def test_columns_are_quantized_by_their_own_steps_exactly() -> None:
    x = rows(20, 5, 9) * torch.tensor([0.1, 1, 10, 100, 1])
    quantizer = ColumnQuantizer(5, 4, local=True)
    quantizer.begin(x)
    codes, step = quantizer.codes(x)
    assert torch.equal(codes * step, quantizer(x))
    assert float((quantizer(x).detach() - x).norm() / x.norm()) < 0.3


def test_anybodys_layer_takes_quantized_rows_and_weights() -> None:
    layer = nn.Linear(8, 3)
    before = layer.weight.detach().clone()
    a2q.quantize_weights(layer, 4)
    assert 0 < (layer.weight - before).abs().max().item() < before.abs().max().item()
    quantizer = quantizer_of([4.0] * 6, 8)
    a2q.quantize_inputs(layer, quantizer)
    x = rows(6, 8, 3)
    quantizer.begin(x)
    expected = torch.nn.functional.linear(quantizer(x), layer.weight, layer.bias)
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    assert quantizer.allocator.raw_step.grad is not None
    assert layer.parametrizations.weight.original.grad is not None


def test_integer_products_and_sums_are_those_of_the_quantized_values_exactly() -> None:
    """A (X_q W_q) in integers, as MixQ has it (arXiv 2505.09361); X_q W_q in float64, sums in float32."""
    generator = torch.Generator().manual_seed(0)
    x, weight = rows(30, 12, 1), rows(5, 12, 2)
    quantizer = quantizer_of([float(one) for one in torch.randint(1, 9, (30,), generator=generator)], 12).eval()
    quantizer.begin(x)
    columns = ColumnQuantizer(5, 4, local=False, dim=0)
    columns.begin(weight)
    coded, (codes, step) = quantizer.codes(x), columns.codes(weight)
    whole = (coded.codes.long() @ codes.long().T).double()
    scales = STEPS[coded.steps.long()].double()[:, None] * step.double().T
    assert torch.equal(whole * scales, quantizer(x).double() @ columns(weight).double().T)
    messages = ColumnQuantizer(5, 4, local=True)
    xw = (whole * scales).float()
    messages.begin(xw)
    adjacency = (torch.rand(30, 30, generator=generator) < 0.3).long()
    codes, step = messages.codes(xw)
    summed = (adjacency @ codes.long()).float() * step
    assert torch.equal(summed, adjacency.float() @ messages(xw)), "in float32, in whatever order"


def test_each_rows_step_is_fitted_to_its_values_and_stored() -> None:
    x, quantizer = rows(40, 16, 5), quantizer_of([3.0] * 40, 16)
    quantizer.allocator.raw_step.data.fill_(-1.0 / quantizer.allocator.rate)
    quantizer.allocator.fits = False
    learned = quantizer(x)
    quantizer.allocator.fits = True
    trained = quantizer.train()(x)
    fitted, coded = quantizer.eval()(x), quantizer.codes(x)
    before, after = ((one - x).detach().square().sum(1) for one in (learned, fitted))
    assert float(after.sum()) < 0.9 * float(before.sum())
    assert torch.equal(coded.codes * STEPS[coded.steps.long()][:, None], fitted)
    assert torch.equal(trained, fitted), "in training as after it"
    assert torch.equal(quantizer(x), fitted), "nothing is kept of it"
    assert torch.equal(quantizer(x[:1], base.RowIndex(torch.tensor([0]))), fitted[:1])


def test_widths_come_down_to_the_target_while_training_and_are_there_at_once_in_evaluation():
    quantizer = FeatureQuantizer(NodeBits(6, bits=4), 4, Rule(local=1.0))
    quantizer.shift = lambda: 2.0
    quantizer.narrowing = 4.0
    rows = torch.randn(6, 4)

    def bits(step: int) -> float:
        quantizer.step = step
        return float(quantizer._pairs(rows, RowIndex())[0][0].detach())

    assert [bits(step) for step in (0, 0, 1, 2, 4, 9)] == [4, 4, 3.5, 3, 2, 2]
    quantizer.eval()
    assert bits(0) == 2
