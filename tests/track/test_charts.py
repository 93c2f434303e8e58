"""Charts: ticks are round and enclose, long lines shrink but keep their extremes, nothing breaks them."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from espalier.track import charts

NUMBERS = st.floats(-1e12, 1e12)


@given(low=NUMBERS, span=st.floats(1e-3, 1e12), count=st.integers(2, 8))
def test_ticks_enclose_the_range_at_one_round_distance(low: float, span: float, count: int) -> None:
    high = low + max(span, abs(low) * 1e-6)
    marks = charts.ticks(low, high, count)
    distance = (marks[-1] - marks[0]) / (len(marks) - 1)
    assert marks[0] <= low + distance * 1e-6
    assert marks[-1] >= high - distance * 1e-6
    assert len(marks) <= count + 2
    assert round(distance / 10.0 ** np.floor(np.log10(distance * 1.0001)), 3) in (1, 2, 5)


@given(low=st.integers(0, 10**6), span=st.integers(0, 10**6))
def test_ticks_of_steps_are_different_whole_numbers_within(low: int, span: int) -> None:
    marks = charts.ticks(low, low + span, 6, whole=True)
    assert all(mark == int(mark) for mark in marks)
    assert len(set(marks)) == len(marks)
    assert all(low <= mark <= low + span + 1 for mark in marks) or span == 0


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), window=st.integers(1, 60))
def test_smoothing_is_the_mean_of_the_neighbours(values: list[float], window: int) -> None:
    half = window // 2
    plain = [np.mean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]
    assert np.allclose(charts.smooth(np.array(values), window), plain, atol=1e-6)


def test_a_long_line_keeps_its_extremes_in_few_points() -> None:
    y = np.zeros(100_000)
    y[12_345], y[54_321] = 10.0, -10.0
    chart = charts.line_chart("x", [charts.Series("x", np.arange(100_000), y, "thin")], str)
    points = re.search(r'polygon[^>]*points="([^"]*)"', chart)
    assert points is not None
    heights = [float(point.split(",")[1]) for point in points[1].split()]
    assert len(heights) == 1200
    assert (max(heights) - min(heights)) > 400
    assert len(chart) < 60_000


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30))
def test_any_numbers_make_a_chart_or_none(values: list[float]) -> None:
    chart = charts.line_chart("x", [charts.Series("x", np.arange(len(values)), np.array(values))], lambda v: f"{v:.3g}")
    assert bool(chart) == bool(np.isfinite(values).any() if values else False)
    assert "nan" not in chart
    assert "inf" not in chart


def test_names_are_escaped() -> None:
    chart = charts.line_chart('<"t">', [charts.Series("<s>", np.arange(3), np.arange(3.0))], str)
    assert "<s>" not in chart
    assert '<"t">' not in chart
    bar = charts._markup("stacked", title="<x>", shares=charts.shares({"<x>": 1.0}, str), whole=1.0, text="<x>")
    assert "<x>" not in bar
    assert bar.count("&lt;x&gt;") == 3


def test_a_chart_says_what_it_is_along() -> None:
    hours = charts.Series("x", np.arange(3), np.arange(3.0), along="hour")
    chart = charts.line_chart("x", [hours], str)
    assert "<em>hour</em>" in chart
    assert "step" not in chart
