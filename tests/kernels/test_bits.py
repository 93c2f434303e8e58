"""Few bits for a value: the fast form equals the plain one, and the error is the scale's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from espalier.kernels import bits

LENGTHS = (0, 1, 2, 3, 7, 255, 256, 257, 511, 1000, 4099)


def values(length: int, seed: int) -> torch.Tensor:
    """Normal values over many magnitudes, with blocks of zeros and of numbers too small for a scale."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(length) * np.exp(generator.uniform(-30, 30, length))
    x[256:300] = 0
    x[512:768] = 1e-39
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("width", bits.BITS)
@pytest.mark.parametrize("key", [bits.NEAREST, 0, 12345, 2**32 - 1])
def test_the_fast_form_equals_the_plain_one(width: int, key: int) -> None:
    for seed, length in enumerate(LENGTHS):
        x = values(length, seed)
        plain = bits.pack.reference.run(x, width, key)
        fast = bits.pack_by_blocks(x, width, key)
        assert plain is not None
        assert fast is not None
        torch.testing.assert_close(fast[0], plain[0], rtol=1e-6 if width == 1 else 0, atol=0)
        assert torch.equal(fast[1], plain[1])
        back = bits.unpack_by_blocks(*fast, width, length)
        assert torch.equal(back, bits.unpack.reference.run(*fast, width, length))


@settings(deadline=None, max_examples=40)
@example(311, 0, 8, False)
@given(st.integers(0, 2000), st.integers(0, 2**32 - 1), st.sampled_from([8, 4]), st.booleans())
def test_the_error_is_at_most_half_a_scale(length: int, seed: int, width: int, stochastic: bool) -> None:
    x = values(length, seed)
    packed = bits.pack(x, width, seed if stochastic else bits.NEAREST)
    assert packed is not None
    back = bits.unpack(*packed, width, length)
    bound = packed[0].repeat_interleave(bits.BLOCK)[:length] * (1.0 if stochastic else 0.5)
    rounded = 4e-5  # up to 127 scales are divided and multiplied again in fp32: 127 * 2**-23 of a scale each
    assert ((x - back).abs() <= bound * (1 + rounded) + bits.TINY).all()


@pytest.mark.parametrize("width", bits.BITS)
def test_stochastic_rounding_is_right_on_average(width: int) -> None:
    x = torch.linspace(-1, 1, 256)
    total = torch.zeros(256)
    rounds = 2000
    for key in range(rounds):
        packed = bits.pack(x, width, key)
        assert packed is not None
        total += bits.unpack(*packed, width, 256)
    scale = 1 / bits.LEVELS[width]
    assert (total / rounds - x).abs().max() < 5 * scale / rounds**0.5


@pytest.mark.parametrize("width", bits.BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(width: int, bad: float) -> None:
    for place in (0, 255, 256, 299):
        x = torch.zeros(300)
        x[place] = bad
        assert bits.pack(x, width, bits.NEAREST) is None
        assert bits.pack.reference.run(x, width, bits.NEAREST) is None


@pytest.mark.parametrize("width", bits.BITS)
def test_the_largest_numbers_stay_finite(width: int) -> None:
    x = torch.full((300,), torch.finfo(torch.float32).max)
    packed = bits.pack(x, width, bits.NEAREST)
    assert packed is not None
    back = bits.unpack(*packed, width, 300)
    assert back.isfinite().all()
    torch.testing.assert_close(back, x, rtol=1e-6, atol=0)
