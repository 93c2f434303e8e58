"""MPC: every bit comes back, the fast form writes the plain form's bytes, and no stream is longer than its bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels import mpc
from espalier.recipe.errors import UserError

KINDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def words(length: int, width: int, seed: int) -> torch.Tensor:
    """Random bits, mostly zeros, or a ramp, by the seed."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 2 ** (8 * width) - 1, length, dtype=KINDS[width], endpoint=True)
    found = [noise, noise * (generator.random(length) < 0.03), np.arange(length) + noise[:1].sum()][seed % 3]
    return torch.from_numpy(found.astype(KINDS[width]))


@pytest.mark.parametrize("width", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 7, 32])
def test_the_fast_form_writes_the_plain_forms_bytes(width: int, dims: int) -> None:
    for length in (0, 1, 15, 16, 17, 31, 32, 33, 63, 65, 1023, 1024, 1025, 3000):
        for seed in range(3):
            given_ = words(length, width, seed)
            plain, fast = mpc.pack.reference.run(given_, dims), mpc.pack_by_tiles(given_, dims)
            assert torch.equal(plain, fast)
            assert torch.equal(mpc.unpack.reference.run(fast, width), given_)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 5000), st.integers(0, 10**6), st.sampled_from(list(KINDS)), st.integers(1, 32))
def test_every_bit_comes_back_within_the_bound(length: int, seed: int, width: int, dims: int) -> None:
    given_ = words(length, width, seed)
    wire = mpc.pack(given_, dims)
    assert wire.numel() <= mpc.most_bytes(length, width)
    assert torch.equal(mpc.unpack(wire, width), given_)


def test_the_layout_of_a_stream() -> None:
    """One word 5 after another: a difference of 0, so that bit planes 0 and 2 of the tile are 1 and the rest 0."""
    wire = mpc.pack(torch.tensor([5], dtype=torch.uint32), 1)
    # planes 1, 0, 1, 0, 0 ... -> differences 1, -1, 1, -1, 0 ...
    assert wire.view(torch.int32).tolist() == [0x63706D00, 1, 0b1111, 1, -1, 1, -1]


@pytest.mark.parametrize("harm", ["cut", "longer", "dims", "bitmap"])
def test_a_stream_that_was_changed_is_refused(harm: str) -> None:
    wire = mpc.pack(torch.arange(100, dtype=torch.int32).view(torch.uint32), 1).clone()
    if harm == "cut":
        wire = wire[:-4]
    if harm == "longer":
        wire = torch.cat([wire, wire[:4]])
    if harm == "dims":
        wire[1] = 0
    if harm == "bitmap":
        wire[8] ^= 1
    with pytest.raises(UserError, match="MPC stream"):
        mpc.unpack(wire, 4)


def test_less_than_a_header_is_refused() -> None:
    with pytest.raises(UserError, match="no MPC stream"):
        mpc.unpack(torch.zeros(7, dtype=torch.uint8), 4)
