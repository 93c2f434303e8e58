"""ZFP at a fixed rate: the fast form writes the plain form's bytes, both are zfpy's, tiny blocks come back right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels import zfp

RATES = (2.25, 2.5, 3, 4, 5.3, 6, 8, 9, 12, 16, 16.5, 20, 24, 31, 32)
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 257)


def values(length: int, style: int) -> np.ndarray:
    """Noise, a smooth walk, magnitudes from 1e-26 to 1e26, or mostly zeros."""
    generator = np.random.default_rng(length)
    x = generator.standard_normal(length).astype(np.float32)
    walk = np.cumsum(x) * np.float32(1e-3)
    spread = x * np.exp(generator.uniform(-60, 60, length)).astype(np.float32)
    return [x, walk.astype(np.float32), spread, x * (generator.random(length) < 0.3)][style].astype(np.float32)


@pytest.mark.parametrize("rate", RATES)
def test_the_fast_form_is_the_plain_one(rate: float) -> None:
    for length in LENGTHS:
        for style in range(4):
            x = torch.from_numpy(values(length, style))
            plain, fast = zfp.pack.reference.run(x, rate), zfp.pack_by_planes(x, rate)
            assert plain is not None
            assert fast is not None
            assert torch.equal(plain, fast)
            assert fast.numel() == zfp.stream_bytes(length, rate)
            back = zfp.unpack_by_planes(fast, rate, length)
            assert torch.equal(back, zfp.unpack.reference.run(fast, rate, length))


@pytest.mark.parametrize("rate", RATES)
def test_bytes_and_values_are_those_of_zfpy(rate: float) -> None:
    zfpy = pytest.importorskip("zfpy", reason="zfpy is the oracle")
    for length in LENGTHS[1:]:
        for style in range(4):
            x = values(length, style)
            theirs = zfpy.compress_numpy(x, rate=rate, write_header=False)
            ours = zfp.pack(torch.from_numpy(x), rate)
            assert ours is not None
            assert bytes(ours.numpy()) == theirs
            kind = zfpy.dtype_to_ztype(x.dtype)
            decoded = zfpy._decompress(theirs, kind, x.shape, rate=rate)
            np.testing.assert_array_equal(zfp.unpack(ours, rate, length).numpy(), decoded)


def test_a_stream_known_from_zfpy() -> None:
    """zfpy 1.0.1 on [1, 2, 3, 4, 5] at rate 8, for machines without it."""
    x = torch.tensor([1.0, 2, 3, 4, 5])
    stream = zfp.pack(x, 8)
    assert stream is not None
    assert bytes(stream.numpy()).hex() == "05310b0005ad0200"


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(-120, 100), st.sampled_from([8, 12, 16, 24, 32]))
def test_the_error_falls_with_the_rate_at_every_magnitude(length: int, power: int, rate: int) -> None:
    """Below 2^-98, where the reference decodes wrong values of wrong sign, too. At rate r a block has 4r - 9 bits for
    planes, and a plane takes at most 7, less where the first ones are empty."""
    generator = np.random.default_rng(length)
    x = torch.from_numpy((generator.uniform(-1, 1, length) * 2.0**power).astype(np.float32))
    stream = zfp.pack(x, rate)
    assert stream is not None
    back = zfp.unpack(stream, rate, length)
    rows = torch.nn.functional.pad(x, (0, -length % 4)).view(-1, 4).abs().amax(1).repeat_interleave(4)[:length]
    planes = min(28, (4 * rate - 9) // 7)
    assert ((x - back).abs() <= rows * 2.0 ** (5 - planes) + 2.0**-149).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    for place in (0, 3, 4, 8):
        x = torch.zeros(9)
        x[place] = bad
        assert zfp.pack(x, 8) is None
        assert zfp.pack.reference.run(x, 8) is None
