"""Charts of the HTML pages, as inline SVG: lines over steps, bars of parts, and the scatter of layouts. No script.

Here is the geometry; charts.html.j2 has the markup, and the bars that need no geometry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from espalier.recipe.units import show_seconds, show_size
from espalier.track import page
from espalier.track.page import place

Array = NDArray[Any]
Show = Callable[[float], str]

_POINTS = 600
"""Above so many points a line is drawn as the band between the least and the greatest of each column."""
_BANDS = 80
"""Hover columns of a chart."""
_ROUND = re.compile(r"\.0+(?=\s|$)")
COLOURS = 8
"""Colours of series, from 1."""
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


def line_chart(title: str, series: Sequence[Series], show: Show, zero: bool = False, unit: float = 1.0) -> Markup:
    """A chart over steps, or what its first series is `along`. `show` writes values of y, whose ticks are round in
    `unit`; `zero` puts 0 on the axis.

    Empty when no series has a finite point.
    """
    series = [line for line in map(_finite, series) if len(line.x)]
    if not series:
        return Markup("")
    first, last = min(line.x[0] for line in series), max(line.x[-1] for line in series)
    x_ticks = ticks(first, last, 6, whole=True)
    low, high = _range(series, zero)
    y_ticks = [tick * unit for tick in ticks(low / unit, high / unit, 5)]
    # A little room at the right: half a dot must not be cut off.
    frame = _Frame(first, last + 0.016 * (last - first), y_ticks[0], y_ticks[-1])
    return _markup(
        "lines",
        title=title,
        about=_about(series, show),
        along=series[0].along,
        series=[line for line in series if line.kind != "thin"],  # the same colour, and the smoothed line is named
        y=[(f"top:{place(frame.down(tick) / 10)}%", _ROUND.sub("", show(tick))) for tick in y_ticks],
        x=[(frame.label(tick), show_step(tick)) for tick in x_ticks],
        grid=[place(frame.down(tick)) for tick in y_ticks],
        curves=[_curve(line, frame) for line in series],
        hovers=_hovers(series, frame, show),
    )


def _markup(macro: str, **values: Any) -> Markup:
    """What a macro of charts.html.j2 makes of `values`."""
    drawn: Markup = getattr(page.environment().get_template("track/charts.html.j2").module, macro)(**values)
    return drawn


def shares(table: Mapping[str, float], show: Show) -> list[Share]:
    """The pieces of `table`, largest first, those above zero."""
    ordered = sorted(((value, name) for name, value in table.items() if value and value > 0), reverse=True)
    return [Share(name.replace("_", " "), value, show(value)) for value, name in ordered]


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
        return "right:0;transform:none" if share > 96 else f"left:{place(share)}%"

    def down(self, y: Any) -> Any:
        return (self.top - y) / ((self.top - self.bottom) or 1.0) * _SIDE


class _Curve(NamedTuple):
    """An SVG element: its tag, class, colour and points."""

    tag: str
    kind: str
    colour: int
    points: str


def _finite(line: Series) -> Series:
    x, y = np.asarray(line.x, np.float64), np.asarray(line.y, np.float64)
    good = np.isfinite(x) & np.isfinite(y)
    return line._replace(x=x[good], y=y[good])


def _range(series: Sequence[Series], zero: bool) -> tuple[float, float]:
    """Lowest and highest value; of a long run the highest 2 in 1000 may leave the picture."""
    low = min(float(line.y.min()) for line in series)
    high = max(float(np.quantile(line.y, 0.998 if len(line.y) > 500 else 1.0)) for line in series)
    return (min(0.0, low) if zero else low), max(high, low)


def _curve(line: Series, frame: _Frame) -> _Curve:
    if line.kind == "dots" or len(line.x) == 1:
        at = zip(frame.along(line.x), frame.down(line.y), strict=True)
        return _Curve("path", "dots", line.colour, " ".join(f"M{place(x)} {place(y)}h.01" for x, y in at))
    if len(line.x) <= _POINTS:
        return _Curve("polyline", line.kind, line.colour, _path(frame.along(line.x), frame.down(line.y)))
    starts = np.linspace(0, len(line.x), _POINTS, endpoint=False).astype(int)
    x = frame.along(line.x[starts])
    if line.kind == "line":
        mean = np.add.reduceat(line.y, starts) / np.diff([*starts, len(line.y)])
        return _Curve("polyline", "line", line.colour, _path(x, frame.down(mean)))
    high, low = frame.down(np.maximum.reduceat(line.y, starts)), frame.down(np.minimum.reduceat(line.y, starts))
    return _Curve(
        "polygon", "band", line.colour, _path(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
    )


def _hovers(series: Sequence[Series], frame: _Frame, show: Show) -> list[tuple[str, str, str]]:
    """Invisible columns that show the values under the pointer: where they begin, how wide, and the text."""
    main = max(series, key=lambda line: len(line.x))
    at = np.unique(np.linspace(0, len(main.x) - 1, min(_BANDS, len(main.x))).astype(int))
    width = _SIDE / len(at)
    hovers = []
    for x, step in zip(frame.along(main.x[at]), main.x[at], strict=True):
        values = [f"{line.name} {show(float(line.y[_nearest(line.x, step)]))}" for line in series]
        hovers.append((place(x - width / 2), place(width), "\n".join([f"{main.along} {step:,.0f}", *values])))
    return hovers


def _nearest(x: Array, value: float) -> int:
    return int(np.abs(x - value).argmin()) if len(x) < 3000 else min(int(np.searchsorted(x, value)), len(x) - 1)


def _about(series: Sequence[Series], show: Show) -> str:
    """What someone who cannot see the chart is told."""
    ranges = [f"{line.name} from {show(float(line.y[0]))} to {show(float(line.y[-1]))}" for line in series]
    return f"{series[0].along}s {series[0].x[0]:,.0f} to {series[0].x[-1]:,.0f}; " + "; ".join(ranges)


def _path(x: Array, y: Array) -> str:
    return " ".join(f"{place(a)},{place(b)}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


# --- scatter of layouts ----------------------------------------------------------------------------------------------

MOST = 700
"""Marks drawn at most, beside the front and the plan: more are one cloud, and a heavy page."""
SLOWEST, LARGEST = 12.0, 8.0
"""Layouts so many times slower than the fastest that fits, or larger than the limit, are counted but not drawn."""

MARKS = {"data": "dot", "megatron": "box", "fsp": "kite", "isp": "tent"}
"""Shape of each algorithm's mark."""
_WHOLE = re.compile(r"\.0+(?= )| 00 s$")
_APART = 7.5
"""Percent of the height between two labels: a line of text on the smallest screen."""


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


def shape(algorithm: str) -> str:
    """The mark of an algorithm, as charts.html.j2 calls it."""
    return MARKS.get(algorithm, "dot")


def scatter(points: Sequence[Point], limit: float, limit_text: str, names: Mapping[str, str]) -> Markup:
    """The picture of `points` against `limit` bytes (not drawn when not finite). Empty without a point.

    `names`: algorithm -> how a label calls it. Layouts far from what matters are left out and counted in a remark.
    """
    good = [point for point in points if 0 < point.seconds < math.inf and 0 < point.peak_bytes < math.inf]
    if not good:
        return Markup("")
    shown = _near(good, limit)
    labels = _labelled(shown, names)
    frame = _frame(shown, limit, len(labels))
    drawn = thinned(shown, frame)
    front = sorted((point for point in shown if point.frontier), key=lambda point: point.peak_bytes)
    joined = [f"{10 * frame.along(point.peak_bytes):.0f},{10 * frame.up(point.seconds):.0f}" for point in front]
    far = len(points) - len(shown)
    left_out = f" Not drawn: {far:,} more than {SLOWEST:g} times slower or {LARGEST:g} times over the limit."
    return _markup(
        "scatter",
        about=_about_points(shown, limit_text),
        y=_scale(frame.seconds, frame.up, "top", show_seconds),
        x=_scale(frame.memory, frame.along, "left", show_size),
        grid=[place(frame.up(tick)) for tick in frame.seconds.ticks],
        limit={"at": frame.along(limit), "text": limit_text} if 0 < limit < math.inf else None,
        front=" ".join(joined) if len(front) > 1 else "",
        marks=[_marked(point, frame) for point in drawn],
        leaders=_leaders(labels, frame),
        note=" Hollow marks do not fit." * (not all(point.fits for point in drawn)) + left_out * (far > 0),
    )


class Span(NamedTuple):
    """One bar of a timetable: seconds from its beginning; `kind` decides the colour."""

    row: str
    start: float
    end: float
    kind: str
    text: str


def timetable(spans: Sequence[Span]) -> Markup:
    """What each row does when. Empty without a span."""
    if not spans:
        return Markup("")
    rows, kinds = (list(dict.fromkeys(getattr(span, name) for span in spans)) for name in ("row", "kind"))
    last = max(span.end for span in spans)
    x_ticks = [tick for tick in ticks(0.0, last, 6) if tick <= last]
    each = 100 / len(rows)
    return _markup(
        "timetable",
        about=f"{len(rows)} ranks, {show_seconds(last)}",
        rows=[(f"top:{place(each * (index + 0.5))}%", row) for index, row in enumerate(rows)],
        x=[(f"left:{place(100 * tick / last)}%", show_seconds(tick)) for tick in x_ticks],
        bars=[
            {
                "x": place(100 * span.start / last),
                "y": place(each * rows.index(span.row) + 0.15 * each),
                "width": f"{100 * (span.end - span.start) / last:.2f}",
                "height": place(0.7 * each),
                "colour": kinds.index(span.kind) % COLOURS + 1,
                "text": span.text,
            }
            for span in spans
        ],
        keys=[(index % COLOURS + 1, kind) for index, kind in enumerate(kinds)],
        tall=1.6 * len(rows),
    )


def _near(points: Sequence[Point], limit: float) -> list[Point]:
    fast = min((point.seconds for point in points if point.fits), default=min(point.seconds for point in points))
    most = limit if 0 < limit < math.inf else min(point.peak_bytes for point in points) * 1e3
    return [
        point
        for point in points
        if point.chosen or (point.seconds <= SLOWEST * fast and point.peak_bytes <= LARGEST * most)
    ]


_TIMES = [
    *(step * 10.0**power for power in range(-6, 1) for step in (1, 2, 5)),
    *(10.0, 20.0, 30.0),
    *(scale * step for scale in (60.0, 3600.0) for step in (1, 2, 5, 10, 20, 30)),
]
"""Seconds that people call round, a factor of about two apart."""


class LogAxis(NamedTuple):
    """From `low` to `high`, by factors; `base`: 1024 for bytes."""

    low: float
    high: float
    base: float

    def share(self, value: float) -> float:
        """Where a value stands, 0 to 100."""
        return 100 * math.log(value / self.low) / math.log(self.high / self.low)

    @property
    def ticks(self) -> list[float]:
        """About five round values within the axis."""
        span = math.log2(self.high / self.low)
        if span < 1.6:
            unit = self.base ** math.floor(math.log(self.low, self.base)) if self.base == 1024 else 1.0
            inside = [tick * unit for tick in ticks(self.low / unit, self.high / unit, 6)]
        elif self.base == 1024:
            every = max(1, math.ceil(span / 6))
            first = math.ceil(math.log2(self.low) / every)
            inside = [2.0 ** (every * k) for k in range(first, first + 12)]
        else:
            inside = [tick for index, tick in enumerate(_TIMES) if span < 11 or index % 3 == 0]
        return [tick for tick in inside if self.low <= tick <= self.high]


class LogFrame(NamedTuple):
    """Both axes; places are percent from the left and from the top."""

    memory: LogAxis
    seconds: LogAxis

    def along(self, value: float) -> float:
        """Percent from the left."""
        return self.memory.share(value)

    def up(self, value: float) -> float:
        """Percent from the top."""
        return 100 - self.seconds.share(value)


def _frame(points: Sequence[Point], limit: float, labels: int) -> LogFrame:
    """Round all `points`, with room below for `labels` lines of text."""
    peaks = [point.peak_bytes for point in points]
    peaks += [limit] if 0 < limit < math.inf else []
    took = [point.seconds for point in points]
    room = (_APART * labels + 4) / 100
    below = 1.1 * room / (1 - room)
    return LogFrame(_axis(min(peaks), max(peaks), 1024, 0.08, 0.10), _axis(min(took), max(took), 10, below, 0.10))


def _axis(low: float, high: float, base: float, below: float, above: float) -> LogAxis:
    """With room at both ends, as shares of what there is; labels need some below."""
    factor = max(high / low, 1.3)
    return LogAxis(low / factor**below, max(high, low * factor) * factor**above, base)


def thinned(points: Sequence[Point], frame: LogFrame) -> list[Point]:
    """The front, the plan, and of the others one for each place, algorithm and whether it fits: `MOST` at most.

    The plan and the front come last: they are drawn above the rest.
    """
    matter = [point for point in points if point.chosen or point.frontier]
    others = [point for point in points if not (point.chosen or point.frontier)]
    for cells in (160, 120, 90, 70, 50, 35, 25, 18, 12, 8, 5):
        places: dict[tuple[object, ...], Point] = {}
        for point in others:
            at = round(frame.along(point.peak_bytes) * cells / 100), round(frame.up(point.seconds) * cells / 200)
            places.setdefault((*at, point.algorithm, point.fits), point)
        if len(places) <= MOST:
            break
    if len(matter) > MOST:
        matter = [*matter[:: len(matter) // MOST + 1], *(point for point in matter if point.chosen)]
    return [*places.values(), *sorted(matter, key=lambda point: point.chosen)]


def _marked(point: Point, frame: LogFrame) -> dict[str, str]:
    kind = "best" if point.chosen else "edge" if point.frontier else "in" if point.fits else "out"
    text = f"{point.label}\n{show_seconds(point.seconds)} per step, {show_size(point.peak_bytes)} per rank"
    x, y = place(frame.along(point.peak_bytes)), place(frame.up(point.seconds))
    fits = "" if point.fits else ", does not fit"
    return {"shape": shape(point.algorithm), "kind": kind, "x": x, "y": y, "text": text + fits}


def _scale(axis: LogAxis, at: Callable[[float], float], side: str, show: Show) -> list[tuple[str, str]]:
    """The labels of an axis: where, and what."""
    labels = [(at(tick), _WHOLE.sub("", show(tick))) for tick in axis.ticks]
    return [(f"{side}:{place(share)}%", text) for share, text in labels if share < 96]


def _labelled(points: Sequence[Point], names: Mapping[str, str]) -> list[tuple[Point, str]]:
    """The plan, and the fastest that fits of each other algorithm, with their labels."""
    chosen = next((point for point in points if point.chosen), None)
    fastest: dict[str, Point] = {}
    for point in points:
        if point.fits and point.seconds < fastest.setdefault(point.algorithm, point).seconds:
            fastest[point.algorithm] = point
    labels = [
        (point, f"{names.get(name, name)} {show_seconds(point.seconds)}")
        for name, point in fastest.items()
        if chosen is None or name != chosen.algorithm
    ]
    if chosen is not None:
        labels.append((chosen, f"this plan {show_seconds(chosen.seconds)}"))
    return labels


def _leaders(labels: Sequence[tuple[Point, str]], frame: LogFrame) -> list[dict[str, Any]]:
    """Labels below all marks, all on one side of theirs and in an order in which no leader crosses a text."""
    left = sum(frame.along(point.peak_bytes) for point, _ in labels) > 45 * len(labels)
    ordered = sorted(labels, key=lambda item: (item[0].peak_bytes if left else -item[0].peak_bytes, item[1]))
    leaders = []
    for index, (point, text) in enumerate(ordered):
        x, down = frame.along(point.peak_bytes), 97 - _APART * (len(ordered) - 1 - index)
        aside = x - 1.5 if left else x + 1.5
        leaders.append(
            {"x": x, "y": frame.up(point.seconds), "aside": aside, "down": down, "left": left, "text": text}
            | {"chosen": point.chosen}
        )
    return leaders


def _about_points(points: Sequence[Point], limit_text: str) -> str:
    chosen = next((point for point in points if point.chosen), None)
    least, most = min(point.seconds for point in points), max(point.seconds for point in points)
    small, large = min(point.peak_bytes for point in points), max(point.peak_bytes for point in points)
    text = f"{len(points):,} layouts, {show_seconds(least)} to {show_seconds(most)} per step, "
    text += f"{show_size(small)} to {show_size(large)} per rank"
    text += f"; {limit_text}" if limit_text else ""
    if chosen is not None:
        text += f"; the plan: {show_seconds(chosen.seconds)}, {show_size(chosen.peak_bytes)}"
    return text
