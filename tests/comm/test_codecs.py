"""What every codec promises: bytes as announced, shape and dtype back, the same bits each time, an error within its
bound that feedback brings later, and a refusal of everything that it cannot carry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.comm.base import check_feedback, stays
from espalier.comm.c10d_arguments import residual_like
from espalier.comm.codec_input import FLOATS
from espalier.comm.codecs import FAMILIES, codec
from espalier.mechanisms.codecs.hybrid_compression import choose
from espalier.mechanisms.codecs.lowbit import Lowbit
from espalier.mechanisms.local_rounds.co2 import CO2
from espalier.recipe.errors import RunFailed, UserError

LOSSY = ["bf16", "int8", "int8:stochastic", "int4", "int1", "zfp:4", "zfp:8", "zfp:24", "topk:0.01", "topk:1"]
FED = [*(name for name in LOSSY if name != "zfp:4"), "int4:stochastic", "zfp:6", "int8!"]
"""With which error feedback settles."""
DIVERGING = {"zfp:2.25": "zfp:6", "zfp:4": "zfp:6", "zfp:4!": "zfp:6!", "zfp:5.75": "zfp:6", "int1:stochastic": "int1"}
"""With which it does not, and what to take."""
WORST = [2.2058074, -3.1277483, -1.3475347, 3.9873135]
"""A block that `zfp:5.75` takes out of its range: it comes back with another sign."""
LOSSLESS = ["exact", "split", "sparse", "mpc", "mpc:7"]
ERROR = {
    "bf16": 2**-8,
    "int8": 0.02,
    "int8:stochastic": 0.03,
    "int4": 0.2,
    "zfp:8": 0.15,
    "zfp:24": 1e-5,
    "topk:1": 1e-7,
}
"""Largest relative error in the 2-norm on normal values."""


def test_every_family_is_here() -> None:
    assert {name.partition(":")[0] for name in LOSSY + LOSSLESS} == set(FAMILIES)


@pytest.mark.parametrize("name", LOSSY + LOSSLESS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shape_dtype_and_bytes(name: str, dtype: torch.dtype) -> None:
    one = codec(name)
    assert codec(one) is one
    assert codec(one.name).name == one.name
    for shape in ((0,), (1,), (3,), (1023,), (2, 513), (5000,)):
        x = torch.randn(shape).to(dtype)
        wire = one.encode(x.reshape(-1))
        assert wire is not None
        bound = one.wire_bytes(x.numel(), x.element_size())
        assert wire.nbytes == bound if one.fixed else wire.nbytes <= bound
        back = one.decode(wire, x)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        if name in ERROR and x.numel():
            assert (back - x).double().norm() <= (ERROR[name] + 2**-8 * (dtype != torch.float64)) * x.double().norm()


@pytest.mark.parametrize("name", LOSSY + LOSSLESS)
def test_the_same_values_give_the_same_bits_each_time(name: str) -> None:
    """Also those that are rounded at random: a run that is resumed, or saved at other steps, is the same run."""
    x = torch.randn(5000)
    wire, again = codec(name).encode(x), codec(name).encode(x.clone())
    assert wire is not None
    assert again is not None
    assert torch.equal(wire, again)
    assert torch.equal(codec(name).decode(wire, x), codec(name).decode(again, torch.empty_like(x)))


@pytest.mark.parametrize("name", FED)
def test_with_feedback_what_is_lost_arrives_later(name: str) -> None:
    """The residual stays as large as it soon is, however long what was lost is added to what is sent next."""
    one, residual, norms = codec(name), torch.zeros(8192), []
    for step in range(240):
        wanted = torch.randn(8192, generator=torch.Generator().manual_seed(step)) + residual
        wire = one.encode(wanted)
        assert wire is not None
        residual = wanted - one.decode(wire, wanted)
        norms.append(float(residual.norm()))
    assert max(norms[120:]) <= 1.5 * max(norms[:120])


def lost(name: str, x: torch.Tensor) -> float:
    """||x - C(x)||^2 / ||x||^2; of codecs that round at random the mean over 16 of their seeds."""
    one = codec(name)
    drawn = [Lowbit(one.bits, stochastic=True, seed=seed) for seed in range(16)] if "stochastic" in name else [one]
    errors = []
    for each in drawn:
        wire = each.encode(x)
        assert wire is not None
        errors.append(float((x - each.decode(wire, x)).double().square().sum() / x.double().square().sum()))
    return sum(errors) / len(errors)


def worst_block(name: str, seed: int) -> torch.Tensor:
    """The block of four values that loses most: the worst of random ones, then small changes that make it worse."""
    one, generator = codec(name), torch.Generator().manual_seed(seed)
    x = torch.randn(20_000, 4, generator=generator) * torch.exp(3 * torch.rand(20_000, 4, generator=generator))
    for size in [*(0.3 * 0.9**step for step in range(40)), 0.0]:
        wire = one.encode(x.reshape(-1))
        assert wire is not None
        errors = (x - one.decode(wire, x)).double().square().sum(1) / x.double().square().sum(1)
        x = x[errors.topk(200).indices]
        x = torch.cat([x, x.repeat(9, 1) * (1 + size * torch.randn(1800, 4, generator=generator))])
    return x[0]


@pytest.mark.parametrize("name", FED)
def test_error_feedback_is_given_contractions_alone(name: str) -> None:
    check_feedback(codec(name))
    for seed in range(3):
        block = worst_block(name, seed)
        assert lost(name, block) < 1
        assert lost(name, block.repeat(700)) < 1


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=300), st.sampled_from(FED))
def test_contractions_lose_less_than_they_are_given(values: list[float], name: str) -> None:
    x = torch.tensor(values)
    if float(x.abs().max()) > 2**-60:
        assert lost(name, x) < 1


@pytest.mark.parametrize("name", DIVERGING)
def test_codecs_that_may_lose_more_than_they_are_given_are_refused_with_feedback(name: str) -> None:
    """At every door, and with reason: there is a vector that loses all it has, or more."""
    one, instead = codec(name), DIVERGING[name]
    x = torch.tensor([1.0] + [0.1] * 255) if name.startswith("int") else worst_block(name, 0)
    x = torch.tensor(WORST) if name == "zfp:5.75" else x
    assert lost(name, x) >= 1
    for door in (
        lambda: check_feedback(one),
        lambda: residual_like(x, [codec("int8"), one]),
        lambda: choose(name, None, {}),
        lambda: CO2(torch.nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1, requires_grad=True)]), codec=name),
    ):
        with pytest.raises(UserError, match="diverges") as error:
            door()
        assert error.value.do.startswith(instead)
    check_feedback(codec(instead))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3000), st.integers(0, 10**6), st.sampled_from(LOSSLESS), st.sampled_from(FLOATS))
def test_the_lossless_ones_bring_back_every_bit_pattern(length: int, seed: int, name: str, dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 255, length * width, dtype=np.uint8, endpoint=True)
    x = torch.from_numpy(raw).view(dtype) if length else torch.empty(0, dtype=dtype)
    one = codec(name)
    wire = one.encode(x)
    assert wire is not None
    back = one.decode(wire, x)
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def test_codecs_with_kernels_for_gpus_leave_tensors_there() -> None:
    pytest.importorskip("triton")
    there = {name for name in FAMILIES if name != "exact" and stays(codec(name), "cuda")}
    assert there == {"int8", "int4", "int1", "zfp", "mpc"}
    assert all(stays(codec(name), "cpu") and not stays(codec(name), "xpu") for name in there)


@pytest.mark.parametrize("name", LOSSLESS)
def test_special_values_keep_their_bits(name: str) -> None:
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-39, float("inf"), float("-inf"), float("nan")] * 50)
    x.view(torch.int32)[-1] = 0x7FC0BEEF  # a NaN with a payload
    one = codec(name)
    wire = one.encode(x)
    assert wire is not None
    assert torch.equal(one.decode(wire, x).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_the_lossy_ones_refuse_what_would_not_be_finite(name: str, bad: float) -> None:
    x = torch.zeros(2000, dtype=torch.float64)
    x[1500] = bad
    assert codec(name).encode(x) is None


def test_bf16_does_not_round_to_infinity() -> None:
    assert codec("bf16").encode(torch.full((3,), torch.finfo(torch.float32).max)) is None


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_the_lossy_ones_name_the_dtype_they_do_not_take(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=str(dtype).removeprefix("torch.")):
        codec(name).encode(torch.zeros(5, dtype=dtype))


def test_integers_go_through_the_lossless_ones() -> None:
    for dtype in (torch.int64, torch.int32, torch.int16):
        x = torch.arange(-500, 500).to(dtype)
        for name in LOSSLESS:
            wire = codec(name).encode(x)
            assert wire is not None
            assert torch.equal(codec(name).decode(wire, x), x)
    with pytest.raises(UserError, match="words of 2, 4 or 8 bytes"):
        codec("mpc").encode(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("name", [name for name in LOSSY + LOSSLESS if name != "exact"])
def test_a_message_that_was_cut_is_refused(name: str) -> None:
    x = torch.randn(3000)
    wire = codec(name).encode(x)
    assert wire is not None
    for cut in (wire[:-1], wire[:5], wire[:0]):
        with pytest.raises((RunFailed, UserError)):
            codec(name).decode(cut, x)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int9", "int"),
        ("zfp:1", "zfp:2.25"),
        ("zfp:99", "zfp:32"),
        ("zfp:nan", "zfp:8"),
        ("zfp:much", "zfp:8"),
        ("topk:0", "topk:0.01"),
        ("topk:2", "topk:0.01"),
        ("mpc:0", "mpc:1"),
        ("mpc:33", "mpc:1"),
        ("int8:upwards", "int8"),
        ("bf16:3", "bf16"),
        ("spilt", "split"),
        ("", "int8"),
    ],
)
def test_a_name_that_is_none_is_answered_with_one_that_is(name: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        codec(name)
    assert says in error.value.do


def test_topk_keeps_the_largest_of_every_row() -> None:
    x = torch.randn(3000)
    one = codec("topk:0.1")
    wire = one.encode(x)
    assert wire is not None
    back = one.decode(wire, x)
    for first in range(0, 3000, 1024):
        row, kept = x[first : first + 1024], back[first : first + 1024]
        count = min(102, len(row))
        assert int((kept != 0).sum()) == count
        assert torch.equal(kept[kept != 0], row[kept != 0])
        assert row[kept == 0].abs().max() <= kept[kept != 0].abs().min()


def test_int8_is_more_exact_than_zfp_at_the_same_bits_on_noise() -> None:
    x = torch.randn(50_000)
    error = {}
    for name in ("int8", "zfp:8"):
        wire = codec(name).encode(x)
        assert wire is not None
        error[name] = float((codec(name).decode(wire, x) - x).norm() / x.norm())
    assert error["int8"] * 5 < error["zfp:8"]


def test_split_saves_a_third_of_bf16_noise() -> None:
    x = torch.randn(200_000).bfloat16()
    wire = codec("split").encode(x)
    assert wire is not None
    assert x.nbytes / wire.nbytes > 1.4


@pytest.mark.parametrize("name", LOSSY + LOSSLESS)
def test_a_mark_stops_where_a_value_is_not_finite(name: str) -> None:
    """Its messages are those of the codec without the mark; lossless ones look at their values too."""
    plain, strict = codec(name), codec(name + "!")
    assert strict.name == plain.name + "!"
    assert (strict.lossless, strict.fixed) == (plain.lossless, plain.fixed)
    x = torch.randn(5000)
    wire, expected = strict.encode(x), plain.encode(x)
    assert wire is not None
    assert expected is not None
    assert torch.equal(wire, expected)
    assert torch.equal(strict.decode(wire, x), plain.decode(expected, x))
    x[4321] = torch.nan
    assert strict.encode(x) is None
