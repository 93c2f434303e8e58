"""Bytes of words apart and joined: the fast form is the plain one, and every bit comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels import byte_planes

KINDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9000), st.integers(0, 10**6), st.sampled_from(list(KINDS)), st.booleans())
def test_the_fast_form_is_the_plain_one_and_every_bit_comes_back(
    length: int, seed: int, width: int, rotated: bool
) -> None:
    noise = np.random.default_rng(seed).integers(0, 2 ** (8 * width) - 1, length, dtype=KINDS[width], endpoint=True)
    words = torch.from_numpy(noise)
    plain, fast = byte_planes.apart.reference.run(words, rotated), byte_planes.apart(words, rotated)
    assert torch.equal(plain, fast)
    assert torch.equal(byte_planes.joined(fast, rotated), words)
    assert torch.equal(byte_planes.joined.reference.run(fast, rotated), words)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, 127), (torch.bfloat16, 127)])
def test_the_first_plane_is_the_exponent(dtype: torch.dtype, bias: int) -> None:
    x = torch.tensor([1.0, -2.0, 0.25, -1e-3]).to(dtype)
    found = byte_planes.apart(x.view(byte_planes.WORDS[x.element_size()]), True)
    assert (found[0].int() - bias).tolist() == [0, 1, -2, -10]
