"""Quantities: what people write is what is meant, and what is shown can be read back."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe import units
from espalier.recipe.errors import UserError


@pytest.mark.parametrize(
    ("text", "meant"),
    [("80GiB", 80 * 2**30), ("512 MB", 512_000_000), ("1_000B", 1000), ("1.5KiB", 1536), (".5kB", 500), (4096, 4096)],
)
def test_sizes(text: str | int, meant: int) -> None:
    assert units.size(text) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [("400Gbit/s", 50e9), ("300GB/s", 300e9), ("100Mbps", 12.5e6), ("1GiB/s", 2.0**30), (7.5, 7.5)],
)
def test_rates(text: str | float, meant: float) -> None:
    assert units.rate(text) == meant


@pytest.mark.parametrize(
    ("text", "meant"), [("5ms", 5e-3), ("20us", 20e-6), ("20µs", 20e-6), ("2h", 7200.0), ("1e3s", 1000.0), ("7", 7.0)]
)
def test_times(text: str, meant: float) -> None:
    assert units.seconds(text) == pytest.approx(meant, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a quantity"),
        ("fast", "not a quantity"),
        ("-5GiB", "not a quantity"),
        (-1, "not a quantity"),
        (math.inf, "not a quantity"),
        (math.nan, "not a quantity"),
        (True, "not a quantity"),
        ("80", "no unit"),
        ("80gb", "did you mean GB?"),
        ("80Gbit/s", "unknown unit"),
        ("1e999GiB", "too large"),
    ],
)
def test_what_is_not_a_size_is_refused_with_an_example(text: str | float, says: str) -> None:
    with pytest.raises(UserError) as error:
        units.size(text, "bucket")
    assert str(error.value).startswith("bucket")
    assert says in str(error.value)
    assert "80GiB" in str(error.value)


def test_bits_are_offered_where_bits_were_meant() -> None:
    with pytest.raises(UserError, match=r"did you mean Gbit/s\?"):
        units.rate("10Gb/s")


@given(st.text() | st.floats() | st.integers())
def test_anything_is_a_quantity_or_the_user_error(value: str | float) -> None:
    for read in (units.size, units.rate, units.seconds):
        with suppress(UserError):
            assert 0 <= read(value) < math.inf


@given(st.integers(min_value=0, max_value=2**59))
def test_a_shown_size_reads_back_to_three_digits(count: int) -> None:
    assert units.size(units.show_size(count)) == pytest.approx(count, rel=5.1e-3)


@given(st.floats(min_value=1, max_value=1e14))
def test_a_shown_rate_reads_back_to_three_digits(count: float) -> None:
    assert units.rate(units.show_rate(count)) == pytest.approx(count, rel=5.1e-3)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.00035, "350 µs"),
        (0.012, "12 ms"),
        (0.9996, "1.0 s"),
        (3.21, "3.2 s"),
        (59.97, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (-3.21, "-3.2 s"),
        (math.inf, "inf s"),
    ],
)
def test_durations_are_shown_at_the_scale_people_think_in(value: float, shown: str) -> None:
    assert units.show_seconds(value) == shown


def test_counts_and_operations() -> None:
    assert units.show_count(1_920_000) == "1.92 M"
    assert units.show_count(0) == "0"
    assert units.show_count(999_900) == "1.00 M"
    assert units.show_flops(80.1e9) == "80.1 GFLOP/s"
    assert units.show_size(1536) == "1.50 KiB"
