"""Which codec for which traffic: the paper's schemes by name, and `auto` by the break-even rule on measured rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.comm import Traffic
from espalier.comm.codecs import codec
from espalier.mechanisms.codecs import hybrid_compression
from espalier.mechanisms.codecs.hybrid_compression import CodecRate, choose
from espalier.recipe.errors import UserError

FAST = {"int8": CodecRate(3.94, 4e9, 6e9), "split": CodecRate(1.19, 3e8, 4e8)}
SLOW_LINK, FAST_LINK = 12.5e6, 12.5e9


def test_the_papers_schemes() -> None:
    for name, policy in hybrid_compression.POLICIES.items():
        chosen = choose(name, FAST_LINK, {}).codecs
        assert chosen == policy
        assert chosen[Traffic.GRADIENTS] == "zfp:8"
        others = {codec(chosen[kind]).lossless for kind in (Traffic.ACTIVATIONS, Traffic.PARAMETERS)}
        assert others == {name == "mzhybrid"}
    mild = codec(choose("zhybrid", None, {}).codecs[Traffic.ACTIVATIONS])
    assert mild.wire_bytes(4096, 4) == 2 * codec("zfp:8").wire_bytes(4096, 4)


def test_auto_rounds_gradients_only() -> None:
    chosen = choose("auto", SLOW_LINK / 10, FAST)
    assert chosen.codecs[Traffic.GRADIENTS] == "int8"
    lossy = [kind for kind, name in chosen.codecs.items() if not codec(name).lossless]
    assert set(lossy) == {Traffic.GRADIENTS, Traffic.OUTER_STEP}
    assert "3.9 times 10 Mbit/s" in choose("auto", SLOW_LINK / 10, FAST).why


def test_auto_compresses_nothing_where_that_would_not_pay() -> None:
    assert not choose("auto", FAST_LINK, FAST).codecs
    assert "no slower than the codecs" in choose("auto", FAST_LINK, FAST).why
    assert not choose("auto", None, FAST).codecs
    assert "espalier probe" in choose("auto", SLOW_LINK, {}).why
    assert not choose("exact", SLOW_LINK, FAST).codecs


@given(st.floats(1e5, 1e11), st.floats(1e6, 1e11), st.floats(1e6, 1e11), st.floats(0.9, 40))
def test_what_auto_takes_is_never_slower_than_raw(bandwidth: float, encode: float, decode: float, ratio: float) -> None:
    """By the rule itself: one thread encodes and decodes while pieces are sent; the slower of both sets the pace."""
    rate = CodecRate(ratio, encode, decode)
    taken = choose("auto", bandwidth, {"int8": rate}).codecs
    assert bool(taken) == (rate.over(bandwidth) > hybrid_compression.MARGIN * bandwidth)
    if 1 / (1 / encode + 1 / decode) <= hybrid_compression.MARGIN * bandwidth:
        assert not taken


def test_one_thread_encodes_and_decodes_in_turn_while_pieces_cross() -> None:
    """Raw bytes/s: 300 encoded and 150 decoded a second are 100 through both, and four times what the link carries."""
    rate = CodecRate(ratio=4.0, encode=300.0, decode=150.0)
    assert [rate.over(bandwidth) for bandwidth in (10.0, 20.0, 30.0, 1000.0)] == pytest.approx(
        [40.0, 80.0, 100.0, 100.0]
    )


def test_a_codec_may_be_named() -> None:
    assert choose("zfp:6", None, {}).codecs == {Traffic.GRADIENTS: "zfp:6"}


@pytest.mark.parametrize(("option", "near"), [("zhibrid", "zhybrid"), ("itn8", "int8"), ("atuo", "auto")])
def test_a_slip_is_answered_with_the_nearest(option: str, near: str) -> None:
    with pytest.raises(UserError) as error:
        choose(option, None, {})
    assert error.value.do == f"comm.codec={near}"
    assert "zhybrid" in error.value.why


def test_codecs_are_measured_here() -> None:
    found = hybrid_compression.measure(["int8", "mpc"], seconds=0.02)
    assert found["int8"].ratio == pytest.approx(32 / 8.125)
    assert all(rate.encode > 1e6 and rate.decode > 1e6 for rate in found.values())
