"""Charts as HTML and inline SVG: text stays text at every width, since only the lines are stretched. No script."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

Array = NDArray[Any]

_POINTS = 600
"""Above so many points a line is drawn as the band between the least and the greatest of each column."""
_BANDS = 80
"""Hover columns of a chart."""
_ROUND = re.compile(r"\.0+(?=\s|$)")
_SIDE = 1000.0
"""Side of the square every line is drawn in before it is stretched."""


class Series(NamedTuple):
    """One line of a chart: `x` ascending and `y` of equal length; `kind` is thin, line or dots; `colour` 1 to 8;
    `along` is what x counts."""

    name: str
    x: Array
    y: Array
    kind: str = "line"
    colour: int = 1
    along: str = "step"


class Share(NamedTuple):
    """One piece of a stacked bar."""

    name: str
    value: float
    text: str


def line_chart(
    title: str, series: Sequence[Series], show: Callable[[float], str], zero: bool = False, unit: float = 1.0
) -> Markup:
    """A chart over steps, or what its first series is `along`. `show` writes values of y, whose ticks are round in
    `unit`; `zero` puts 0 on the axis.

    Empty when no series has a finite point.
    """
    series = [_finite(one) for one in series]
    series = [one for one in series if len(one.x)]
    if not series:
        return Markup("")
    x_ticks = ticks(min(one.x[0] for one in series), max(one.x[-1] for one in series), 6, whole=True)
    low, high = _range(series, zero)
    y_ticks = [tick * unit for tick in ticks(low / unit, high / unit, 5)]
    first, last = min(one.x[0] for one in series), max(one.x[-1] for one in series)
    # A little room at the right: half a dot must not be cut off.
    frame = _Frame(first, last + 0.016 * (last - first), y_ticks[0], y_ticks[-1])
    lines = Markup("").join(_drawn(one, frame) for one in series)
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="1000" y1="{0}" y2="{0}"/>').format(_n(frame.down(tick)))
        for tick in y_ticks
    )
    return _PLOT.format(
        title=title,
        along=series[0].along,
        about=_about(series, show),
        legend=_legend(series),
        y=_labels(y_ticks, lambda tick: f"top:{_n(frame.down(tick) / 10)}%", show),
        x=_labels(x_ticks, frame.label, show_step),
        drawing=grid + lines + _bands(series, frame, show),
    )


def stacked(title: str, shares: Sequence[Share], whole: float, text: str) -> Markup:
    """One horizontal bar of `shares`, as wide as they are of `whole`; `text` stands at its end."""
    pieces = Markup("").join(
        Markup('<span class="s{}" style="width:{}%" title="{}: {}"></span>').format(
            index % 8 + 1, _n(100 * share.value / whole) if whole else "0", share.name, share.text
        )
        for index, share in enumerate(shares)
    )
    return Markup(
        '<div class="bar"><span class="what">{}</span><span class="track">{}</span><span class="much">{}</span></div>'
    ).format(title, pieces, text)


def keys(shares: Sequence[Share]) -> Markup:
    """The legend of a stacked bar, with its values."""
    items = Markup("").join(
        Markup('<li><i class="s{}"></i>{} <b>{}</b></li>').format(index % 8 + 1, share.name, share.text)
        for index, share in enumerate(shares)
    )
    return Markup('<ul class="keys">{}</ul>').format(items)


def pairs(rows: Sequence[tuple[str, float, float]], show: Callable[[float], str]) -> Markup:
    """Predicted and measured bars, one pair per (name, predicted, measured)."""
    whole = max((max(predicted, measured) for _, predicted, measured in rows), default=0.0)
    return Markup("").join(
        Markup('<div class="pair"><h4>{}</h4>{}{}</div>').format(
            name,
            stacked("predicted", [Share("predicted", predicted, show(predicted))], whole, show(predicted)),
            stacked("measured", [Share("measured", measured, show(measured))], whole, show(measured)),
        )
        for name, predicted, measured in rows
    )


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About `count` round numbers, 1, 2 or 5 times a power of ten apart, that enclose `low..high`.

    With `whole`: whole numbers that lie within it.
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = (
        (math.ceil(low / step), math.floor(high / step))
        if whole
        else (math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9))
    )
    return [round(index * step, 12) for index in range(first, last + 1)]


def smooth(values: Array, window: int) -> Array:
    """Mean over `window` values round each (fewer at the ends); `values` finite, float64 [n] to float64 [n]."""
    half = max(0, window // 2)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    at = np.arange(len(values))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return np.asarray((sums[last] - sums[first]) / (last - first))


def show_step(value: float) -> str:
    """`1,500`, and `120 k` where that is shorter."""
    return f"{value / 1000:g} k" if value >= 10_000 and value % 100 == 0 else f"{value:,.0f}"


class _Frame(NamedTuple):
    left: float
    right: float
    bottom: float
    top: float

    def along(self, x: Any) -> Any:
        return (x - self.left) / ((self.right - self.left) or 1.0) * _SIDE

    def label(self, x: float) -> str:
        """Where a label of the x axis stands; one at the right end must not stick out."""
        share = self.along(x) / 10
        return "right:0;transform:none" if share > 96 else f"left:{_n(share)}%"

    def down(self, y: Any) -> Any:
        return (self.top - y) / ((self.top - self.bottom) or 1.0) * _SIDE


_PLOT = Markup(
    '<div class="plot">{legend}<div class="ys" aria-hidden="true">{y}</div>'
    '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{title}: {about}">{drawing}</svg>'
    '<div class="xs" aria-hidden="true">{x}<em>{along}</em></div></div>'
)


def _finite(one: Series) -> Series:
    x, y = np.asarray(one.x, np.float64), np.asarray(one.y, np.float64)
    good = np.isfinite(x) & np.isfinite(y)
    return one._replace(x=x[good], y=y[good])


def _range(series: Sequence[Series], zero: bool) -> tuple[float, float]:
    """Lowest and highest value; of a long run the highest 2 in 1000 may leave the picture."""
    low = min(float(one.y.min()) for one in series)
    high = max(float(np.quantile(one.y, 0.998 if len(one.y) > 500 else 1.0)) for one in series)
    return (min(0.0, low) if zero else low), max(high, low)


def _drawn(one: Series, frame: _Frame) -> Markup:
    if one.kind == "dots":
        dots = " ".join(f"M{_n(x)} {_n(y)}h.01" for x, y in zip(frame.along(one.x), frame.down(one.y), strict=True))
        return Markup('<path class="dots c{}" d="{}"/>').format(one.colour, dots)
    if len(one.x) == 1:
        return _drawn(one._replace(kind="dots"), frame)
    if len(one.x) <= _POINTS:
        points = _path(frame.along(one.x), frame.down(one.y))
        return Markup('<polyline class="{} c{}" points="{}"/>').format(one.kind, one.colour, points)
    starts = np.linspace(0, len(one.x), _POINTS, endpoint=False).astype(int)
    x = frame.along(one.x[starts])
    if one.kind == "line":
        mean = np.add.reduceat(one.y, starts) / np.diff([*starts, len(one.y)])
        return Markup('<polyline class="line c{}" points="{}"/>').format(one.colour, _path(x, frame.down(mean)))
    high, low = frame.down(np.maximum.reduceat(one.y, starts)), frame.down(np.minimum.reduceat(one.y, starts))
    points = _path(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
    return Markup('<polygon class="band c{}" points="{}"/>').format(one.colour, points)


def _bands(series: Sequence[Series], frame: _Frame, show: Callable[[float], str]) -> Markup:
    """Invisible columns that show the values under the pointer."""
    main = max(series, key=lambda one: len(one.x))
    at = np.unique(np.linspace(0, len(main.x) - 1, min(_BANDS, len(main.x))).astype(int))
    edges = frame.along(main.x[at])
    width = _SIDE / len(at)
    bands = []
    for x, step in zip(edges, main.x[at], strict=True):
        values = [f"{one.name} {show(float(one.y[_nearest(one.x, step)]))}" for one in series]
        title = f"{main.along} {step:,.0f}\n" + "\n".join(values)
        bands.append(
            Markup('<rect class="hover" x="{}" y="0" width="{}" height="1000"><title>{}</title></rect>').format(
                _n(x - width / 2), _n(width), title
            )
        )
    return Markup("").join(bands)


def _nearest(x: Array, value: float) -> int:
    return int(np.abs(x - value).argmin()) if len(x) < 3000 else min(int(np.searchsorted(x, value)), len(x) - 1)


def _labels(values: Sequence[float], place: Callable[[float], str], show: Callable[[float], str]) -> Markup:
    return Markup("").join(
        Markup('<span style="{}">{}</span>').format(place(tick), _ROUND.sub("", show(tick))) for tick in values
    )


def _legend(series: Sequence[Series]) -> Markup:
    series = [one for one in series if one.kind != "thin"]  # the same colour, and the smoothed line is named
    if len(series) < 2:
        return Markup("")
    items = Markup("").join(
        Markup('<li><i class="{} c{}"></i>{}</li>').format(one.kind, one.colour, one.name) for one in series
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


def _about(series: Sequence[Series], show: Callable[[float], str]) -> str:
    """What someone who cannot see the chart is told."""
    said = [f"{one.name} from {show(float(one.y[0]))} to {show(float(one.y[-1]))}" for one in series]
    return f"{series[0].along}s {series[0].x[0]:,.0f} to {series[0].x[-1]:,.0f}; " + "; ".join(said)


def _path(x: Array, y: Array) -> str:
    return " ".join(f"{_n(a)},{_n(b)}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def shares(table: Mapping[str, float], show: Callable[[float], str]) -> list[Share]:
    """The pieces of `table`, largest first, those above zero."""
    ordered = sorted(((value, str(escape(name))) for name, value in table.items() if value and value > 0), reverse=True)
    return [Share(name.replace("_", " "), value, show(value)) for value, name in ordered]
