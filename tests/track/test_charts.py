"""Charts: long lines keep their extremes in few points, nothing breaks them, and the script draws what it is handed."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.terminal import visible
from espalier.recipe.units import show_count, show_seconds, show_size
from espalier.track import charts, page
from espalier.track.charts import Chart, Series
from espalier.track.curves import STRETCHES, Curves


def drawn(chart: Chart, **others: Any) -> str:
    """The markup of a chart."""
    module = page.environment().get_template("track/charts.html.j2").module
    return str(module.plot(chart) if not others else module.stacked(**others))


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), window=st.integers(1, 60))
def test_smoothing_is_the_mean_of_the_neighbours(values: list[float], window: int) -> None:
    half = window // 2
    plain = [np.mean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]
    assert np.allclose(charts.smooth(np.array(values), window), plain, atol=1e-6)


def test_a_long_line_keeps_its_extremes_in_few_points() -> None:
    y = np.zeros(100_000)
    y[12_345], y[54_321] = 10.0, -10.0
    curves = Curves()
    for start in range(90_000, -1, -10_000):  # as a log is read
        curves.add(np.arange(start, start + 10_000), {"x": y[start : start + 10_000]})
    assert len(curves["x"].means) == STRETCHES
    assert (np.nanmax(curves["x"].greatest), np.nanmin(curves["x"].least)) == (10.0, -10.0)
    assert np.nanargmax(curves["x"].greatest) == 12_345 // 100
    line = Series("x", np.arange(STRETCHES), curves["x"].means, curves["x"].least, curves["x"].greatest)
    (chart,) = charts.charts(Chart("x", "", [line]))
    handed = json.loads(charts.as_json(chart))["series"][0]
    assert (max(handed["high"]), min(handed["low"])) == (10.0, -10.0)
    assert len(drawn(chart)) < 60_000


@given(
    rows=st.lists(st.floats(allow_nan=True, width=32) | st.just(float("inf")), min_size=1, max_size=300),
    length=st.integers(1, 4000),
    cuts=st.lists(st.integers(0, 300), max_size=4),
)
def test_curves_hold_what_plain_arrays_say(rows: list[float], length: int, cuts: list[int]) -> None:
    """However the rows are cut into parts, and however far apart their steps are."""
    values, steps = np.array(rows), np.arange(len(rows)) * length
    curves = Curves()
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    for start, stop in list(itertools.pairwise(bounds))[::-1]:
        curves.add(steps[start:stop], {"x": values[start:stop]})
    finite = values[np.isfinite(values)]
    assert ("x" in curves) == bool(len(finite))
    if len(finite):
        assert curves["x"].total == pytest.approx(finite.sum(dtype=np.float64))
        assert curves["x"].average == pytest.approx(finite.mean(dtype=np.float64))
        assert np.nanmin(curves["x"].least) == finite.min()
        assert np.nanmax(curves["x"].greatest) == finite.max()
        assert curves["x"].last == finite[-1]


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30))
def test_any_numbers_make_a_chart_or_none(values: list[float]) -> None:
    chart = charts.charts(Chart("x", "", [Series("x", np.arange(len(values)), np.array(values))]))
    assert bool(chart) == bool(np.isfinite(values).any() if values else False)
    text = "".join(map(drawn, chart))
    assert "nan" not in text
    assert "inf" not in text


EVIL = """</script><script>alert(1)</script>'"\u202e\x1b<s>"""


def test_names_are_escaped() -> None:
    chart = drawn(Chart('<"t">', "", [Series(EVIL, np.arange(3), np.arange(3.0))]))
    assert "<s>" not in chart
    assert "<script" not in chart
    assert '<"t">' not in chart
    (attribute,) = re.findall(r'data-chart="([^"]*)"', chart)
    assert "&#34;" in attribute
    bar = drawn(None, title="<x>", shares=charts.shares({"<x>": 1.0}, str), whole=1.0, text="<x>")  # type: ignore[arg-type]
    assert "<x>" not in bar
    assert bar.count("&lt;x&gt;") == 3


def test_a_chart_says_what_it_is_along() -> None:
    hours = Chart("x", "", [Series("x", np.arange(3), np.arange(3.0))], along="hour")
    assert json.loads(charts.as_json(hours))["along"] == "hour"
    assert "step" not in charts.as_json(hours)


def test_a_chart_without_scripts_is_a_line_with_its_values() -> None:
    x, y = np.arange(500), np.linspace(4.0, 1.0, 500)
    chart = drawn(Chart("Loss", "", [Series("training", x, y, y - 1, y + 1)]))
    assert "training: 4 at first, 1 at last; 0 at least, 5 at most" in chart
    points = [tuple(map(float, point.split(","))) for point in re.findall(r'points="([^"]*)"', chart)[0].split()]
    assert points[0] == (0, 0)
    assert points == sorted(points)
    assert len(points) <= 101


def test_the_script_is_the_pages_own_as_it_stands() -> None:
    """Nothing in a page changes it, so that its hash is that of the page's policy."""
    assert visible(page.script()) == page.script()
    assert "</script" not in page.script()
    assert "Permission is hereby granted" in page.script()
    assert page.script_hash().startswith("sha256-")


SCRIPT = Path(page.__file__).with_name("charts.js")
UPLOT = SCRIPT.parent / "uplot" / "uPlot.iife.min.js"


def ran(program: str) -> Any:
    """What a program says in JSON after the script, without a browser."""
    text = f"const uPlot = {{join: tables => tables}};\n{SCRIPT.read_text()}\nconsole.log(JSON.stringify({program}));"
    done = subprocess.run(["node", "-"], input=text, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@node
def test_the_script_writes_values_as_the_rest_of_the_page() -> None:
    values = [0.0, 1.0, 5e-6, 0.0123, 0.9996, 3.21, 59.96, 61.0, 3599.6, 7322.0, 1024.0, 1e6, 123456.0, 2.5e9]
    for unit, show in (("seconds", show_seconds), ("size", show_size), ("count", show_count)):
        assert ran(f"{json.dumps(values)}.map(UNITS.{unit})") == [show(value) for value in values]


@node
def test_the_script_finds_the_hour_of_a_step_and_lets_no_control_character_through() -> None:
    assert ran("hoursAt([[10, 20, 40], [0, 1, 2]], [5, 10, 15, 30, 40, 41])") == [None, 0, 0.5, 1.5, 2, None]
    assert ran("hoursAt([[], []], [1])") == [None]
    assert ran(f"visible({json.dumps(EVIL)})") == visible(EVIL).replace("\\x1b", "\\u001b")


@node
def test_the_script_draws_what_it_is_handed() -> None:
    line = Series("x", np.array([1, 2, 3]), np.array([1.0, 0.0, 3.0]), np.array([0.5, -1, 2]), np.array([2.0, 1, 4]))
    chart = charts.as_json(Chart("x", "", [line]))
    assert ran(f"aligned({chart}, [], false, false)") == [[[1, 2, 3], [1, 0, 3], [0.5, -1, 2], [2, 1, 4]]]
    assert ran(f"aligned({chart}, [], false, true)") == [[[1, 2, 3], [1, None, 3], [0.5, None, 2], [2, 1, 4]]]
    runs = '[{"clock": [[2, 3], [0, 8]]}]'
    assert ran(f"aligned({chart}, {runs}, true, false)")[0][0] == [0, 8]


@node
def test_the_scripts_axes_by_factors_have_few_round_ticks_inside() -> None:
    for low, high in ((1.0, 1.2), (0.8, 9.0), (4.0, 90.0), (50.0, 600.0), (0.5, 4000.0)):
        for binary in ("true", "false"):
            scale = 2.0**30 if binary == "true" else 1.0
            ticks = ran(f"factorTicks({binary})(null, 0, {low * scale}, {high * scale})")
            assert 2 <= len(ticks) <= 13
            assert ticks == sorted(set(ticks))
            assert low * scale <= ticks[0] * (1 + 1e-9)
            assert ticks[-1] <= high * scale * (1 + 1e-9)


def test_a_single_value_is_a_number_and_no_line() -> None:
    training = Series("training", np.arange(3), np.array([3.0, 2.0, 1.0]))
    held_out = Series("validation", np.array([1200]), np.array([2.25]))
    for lines, boxes in (([held_out], 0), ([training, held_out], 1)):
        (chart,) = charts.charts(Chart("Loss", "", lines))
        text = drawn(chart)
        assert (text.count("<svg"), text.count("<polyline")) == (boxes, boxes)
        assert "<b>2.25</b> validation, at step 1,200" in text
    assert charts.charts(Chart("Loss", "", [Series("validation", np.array([1]), np.array([np.nan]))])) == []
