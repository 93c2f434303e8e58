"""Charts of the HTML pages, as data: lines over steps, bars of parts, timetables, and the scatter of layouts.

charts.js draws lines and the scatter with uPlot (MIT, in uplot/). charts.html.j2 has the markup of all, and what stands
in their place without scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from espalier.recipe.serialization import Value
from espalier.recipe.units import show_count, show_seconds, show_size

Array = NDArray[Any]

UNITS: Mapping[str, Callable[[float], str]] = {
    "": "{:.3g}".format,
    "size": show_size,
    "seconds": show_seconds,
    "count": show_count,
}
"""How values are written, by unit; charts.js has the same."""


class Series(Value, frozen=True):
    """One line of a chart: `y` over ascending `x`, of equal length; where a value stands for several, `low` and `high`
    are the least and the greatest of them. `dots`: not joined. `run`: which of the page's runs it is of."""

    name: str
    x: Any
    y: Any
    low: Any = None
    high: Any = None
    dots: bool = False
    run: int = 0


class Chart(Value, frozen=True):
    """What a page draws. `along`: what x counts; `zero`: 0 is on the axis; `log`: the axis of y goes by factors."""

    title: str
    remark: str
    series: Sequence[Series]
    unit: str = ""
    along: str = "step"
    zero: bool = False
    log: bool = False


def charts(*candidates: Chart) -> list[Chart]:
    """Those that have something to show, without points that are not finite."""
    shown = [chart.changed(series=[line for line in map(_finite, chart.series) if len(line.x)]) for chart in candidates]
    return [chart for chart in shown if chart.series]


def _finite(line: Series) -> Series:
    good = np.isfinite(np.asarray(line.x, np.float64)) & np.isfinite(np.asarray(line.y, np.float64))
    columns = {name: getattr(line, name) for name in ("x", "y", "low", "high")}
    return line.changed(**{name: np.asarray(column)[good] for name, column in columns.items() if column is not None})


def as_json(value: Any) -> str:
    """JSON for an attribute of a page, whose template escapes it. Arrays have five digits, whole numbers all of theirs;
    what is not finite is null."""
    return msgspec.json.encode(value, enc_hook=_short).decode()


def _short(values: Array) -> list[float]:
    return [value if value % 1 == 0 else float(f"{value:.5g}") for value in values.tolist()]


def smooth(values: Array, window: int) -> Array:
    """Mean over `window` values round each (fewer at the ends); `values` finite, float64 [n] to float64 [n]."""
    half = window // 2
    sums, counts = (np.convolve(terms, np.ones(2 * half + 1)) for terms in (values, np.ones(len(values))))
    return np.asarray((sums / counts)[half : half + len(values)])


class BarShare(NamedTuple):
    """One piece of a stacked bar."""

    name: str
    value: float
    text: str


def shares(table: Mapping[str, float], show: Callable[[float], str]) -> list[BarShare]:
    """The pieces of `table`, largest first, those above zero."""
    ordered = sorted(((value, name) for name, value in table.items() if value and value > 0), reverse=True)
    return [BarShare(name.replace("_", " "), value, show(value)) for value, name in ordered]


class TimetableBar(NamedTuple):
    """One bar of a timetable: seconds from its beginning; `kind` decides the colour."""

    row: str
    start: float
    end: float
    kind: str
    text: str


# --- scatter of layouts ----------------------------------------------------------------------------------------------

MOST = 700
"""Marks drawn at most, beside the front and the plan: more are one cloud, and a heavy page."""
SLOWEST, LARGEST = 12.0, 8.0
"""Layouts so many times slower than the fastest that fits, or larger than the limit, are counted but not drawn."""


class Point(NamedTuple):
    """One layout that was priced: seconds of a step, bytes on the fullest rank, whether it fits every device, a label,
    the algorithm that decides its mark, whether it is the plan, and whether no other is both faster and smaller."""

    seconds: float
    peak_bytes: float
    fits: bool
    label: str
    algorithm: str
    chosen: bool = False
    frontier: bool = False


class Scatter(Value, frozen=True):
    """The picture of layouts: the `points` that are drawn, the limit in bytes (infinite: there is none), how algorithms
    are called, and how many layouts are too `far` from what matters to be drawn."""

    points: Sequence[Point]
    limit: float
    names: Mapping[str, str]
    far: int = 0


def scatter(points: Sequence[Point], limit: float, names: Mapping[str, str]) -> Scatter:
    """The picture of `points`. Where many, it has every so many-th of them by size."""
    good = [point for point in points if 0 < point.seconds < math.inf and 0 < point.peak_bytes < math.inf]
    slowest = SLOWEST * min((point.seconds for point in good if point.fits), default=math.inf)
    near = [
        point
        for point in sorted(good, key=lambda point: point.peak_bytes)
        if point.chosen or (point.seconds <= slowest and point.peak_bytes <= LARGEST * (limit or math.inf))
    ]
    groups: tuple[list[Point], ...] = ([], [], [])
    for point in near:
        groups[2 if point.chosen else point.frontier].append(point)
    drawn = [point for group in groups for point in group[:: len(group) // MOST + 1]]
    return Scatter(drawn, limit, names, len(points) - len(near))
