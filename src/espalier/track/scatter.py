"""Layouts as marks: memory along, seconds up, both by factors. HTML and inline SVG whose text keeps its size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from markupsafe import Markup

from espalier.track import draw
from espalier.units import show_seconds, show_size

MOST = 700
"""Marks drawn at most, beside the front and the plan: more are one cloud, and a heavy page."""
SLOWEST, LARGEST = 12.0, 8.0
"""Layouts so many times slower than the fastest that fits, or larger than the limit, are counted but not drawn."""

MARKS = {"data": "dot", "megatron": "box", "fsp": "kite", "isp": "tent"}
"""Shape of each algorithm's mark."""
_SHAPES = {
    "dot": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "box": "M-3.6-3.6h7.2v7.2h-7.2Z",
    "kite": "M0-5L5 0L0 5L-5 0Z",
    "tent": "M0-4.8L4.8 3.8H-4.8Z",
}
_WHOLE = re.compile(r"\.0+(?= )| 00 s$")
_APART = 7.5
"""Percent of the height between two labels: a line of text on the smallest screen."""


class Point(Protocol):
    """One layout that was priced: seconds of its step, bytes at its peak on the fullest rank."""

    @property
    def seconds(self) -> float:
        """Of a step."""

    @property
    def peak_bytes(self) -> float:
        """On the fullest rank."""

    @property
    def fits(self) -> bool:
        """Within the limit of every device."""

    @property
    def label(self) -> str:
        """What the layout is, for who points at it."""

    @property
    def algorithm(self) -> str:
        """What decides its mark: a key of `MARKS`."""

    @property
    def chosen(self) -> bool:
        """The plan."""

    @property
    def frontier(self) -> bool:
        """No other is both faster and smaller."""


def mark(algorithm: str) -> Markup:
    """An algorithm's mark, to stand in a line of text."""
    return Markup('<svg class="key m-{}" viewBox="-6 -6 12 12" aria-hidden="true"><path d="{}"/></svg>').format(
        _shape(algorithm), _SHAPES[_shape(algorithm)]
    )


def chart(points: Sequence[Point], limit: float, limit_text: str, names: Mapping[str, str]) -> Markup:
    """The picture of `points` against `limit` bytes (not drawn when not finite). Empty without a point.

    `names`: algorithm -> how a label calls it. Layouts far from what matters are left out and counted in a remark.
    """
    good = [one for one in points if 0 < one.seconds < math.inf and 0 < one.peak_bytes < math.inf]
    if not good:
        return Markup("")
    shown = _near(good, limit)
    said = _labelled(shown, names)
    frame = _frame(shown, limit, len(said))
    kept = thinned(shown, frame)
    front = sorted((one for one in shown if one.frontier), key=lambda one: one.peak_bytes)
    far = len(points) - len(shown)
    return _PLOT.format(
        about=_about(shown, limit_text),
        ys=_ticks(frame.seconds, frame.up, "top", show_seconds),
        xs=_ticks(frame.memory, frame.along, "left", show_size),
        shapes=_defined(),
        grid=_grid(frame),
        limit=_limit(frame, limit, limit_text),
        front=_front(front, frame),
        marks=Markup("").join(_marked(one, frame) for one in kept),
        labels=_labels(said, frame),
        hollow="" if all(one.fits for one in kept) else " Hollow marks do not fit.",
        far=f" Not drawn: {far:,} more than {SLOWEST:g} times slower or {LARGEST:g} times over the limit."
        if far
        else "",
    )


def _near(points: Sequence[Point], limit: float) -> list[Point]:
    fast = min((one.seconds for one in points if one.fits), default=min(one.seconds for one in points))
    most = limit if 0 < limit < math.inf else min(one.peak_bytes for one in points) * 1e3
    return [one for one in points if one.chosen or (one.seconds <= SLOWEST * fast and one.peak_bytes <= LARGEST * most)]


# --- where things stand ------------------------------------------------------------------------------------------


_ROUND = [
    *(step * 10.0**power for power in range(-6, 1) for step in (1, 2, 5)),
    *(10.0, 20.0, 30.0),
    *(scale * step for scale in (60.0, 3600.0) for step in (1, 2, 5, 10, 20, 30)),
]
"""Seconds that people call round, a factor of about two apart."""


@dataclass(frozen=True)
class Axis:
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
            inside = [tick * unit for tick in draw.ticks(self.low / unit, self.high / unit, 6)]
        elif self.base == 1024:
            every = max(1, math.ceil(span / 6))
            first = math.ceil(math.log2(self.low) / every)
            inside = [2.0 ** (every * k) for k in range(first, first + 12)]
        else:
            inside = [tick for index, tick in enumerate(_ROUND) if span < 11 or index % 3 == 0]
        return [tick for tick in inside if self.low <= tick <= self.high]


@dataclass(frozen=True)
class Frame:
    """Both axes; places are percent from the left and from the top."""

    memory: Axis
    seconds: Axis

    def along(self, value: float) -> float:
        """Percent from the left."""
        return self.memory.share(value)

    def up(self, value: float) -> float:
        """Percent from the top."""
        return 100 - self.seconds.share(value)


def _frame(points: Sequence[Point], limit: float, labels: int) -> Frame:
    """Round all `points`, with room below for `labels` lines of text."""
    held = [one.peak_bytes for one in points]
    held += [limit] if 0 < limit < math.inf else []
    took = [one.seconds for one in points]
    room = (_APART * labels + 4) / 100
    below = 1.1 * room / (1 - room)
    return Frame(_axis(min(held), max(held), 1024, 0.08, 0.10), _axis(min(took), max(took), 10, below, 0.10))


def _axis(low: float, high: float, base: float, below: float, above: float) -> Axis:
    """With room at both ends, as shares of what there is; labels need some below."""
    factor = max(high / low, 1.3)
    return Axis(low / factor**below, max(high, low * factor) * factor**above, base)


def thinned(points: Sequence[Point], frame: Frame) -> list[Point]:
    """The front, the plan, and of the others one for each place, algorithm and whether it fits: `MOST` at most.

    The plan and the front come last: they are drawn above the rest.
    """
    matter = [one for one in points if one.chosen or one.frontier]
    others = [one for one in points if not (one.chosen or one.frontier)]
    for cells in (160, 120, 90, 70, 50, 35, 25, 18, 12, 8, 5):
        places: dict[tuple[object, ...], Point] = {}
        for one in others:
            at = round(frame.along(one.peak_bytes) * cells / 100), round(frame.up(one.seconds) * cells / 200)
            places.setdefault((*at, one.algorithm, one.fits), one)
        if len(places) <= MOST:
            break
    if len(matter) > MOST:
        matter = [*matter[:: len(matter) // MOST + 1], *(one for one in matter if one.chosen)]
    return [*places.values(), *sorted(matter, key=lambda one: one.chosen)]


# --- what is drawn -----------------------------------------------------------------------------------------------

_PLOT = Markup(
    '<div class="scatter"><div class="ys" aria-hidden="true">{ys}</div>'
    '<svg role="img" aria-label="{about}">{shapes}{limit}{grid}{front}{marks}{labels}</svg>'
    '<div class="xs" aria-hidden="true">{xs}</div></div>'
    '<p class="axes"><span>↑ seconds per step</span> <span>memory per rank →</span></p><p class="note">'
    "Both axes go by factors: lower is faster, left is smaller. The line joins the layouts of which no other is both "
    "faster and smaller.{hollow}{far}</p>"
)


def _shape(algorithm: str) -> str:
    return MARKS.get(algorithm, "dot")


def _defined() -> Markup:
    shapes = Markup("").join(Markup('<path id="{}" d="{}"/>').format(*item) for item in _SHAPES.items())
    return Markup("<defs>{}</defs>").format(shapes)


def _marked(one: Point, frame: Frame) -> Markup:
    shape = _shape(one.algorithm)
    kind = "best" if one.chosen else "edge" if one.frontier else "in" if one.fits else "out"
    said = f"{one.label}\n{show_seconds(one.seconds)} per step, {show_size(one.peak_bytes)} per rank"
    said += "" if one.fits else ", does not fit"
    x, y = _n(frame.along(one.peak_bytes)), _n(frame.up(one.seconds))
    ring = Markup('<circle class="ring" cx="{}%" cy="{}%" r="9"/>').format(x, y) if one.chosen else Markup("")
    return ring + Markup('<use href="#{0}" class="m-{0} {1}" x="{2}%" y="{3}%"><title>{4}</title></use>').format(
        shape, kind, x, y, said
    )


def _front(front: Sequence[Point], frame: Frame) -> Markup:
    if len(front) < 2:
        return Markup("")
    places = " ".join(f"{10 * frame.along(one.peak_bytes):.0f},{10 * frame.up(one.seconds):.0f}" for one in front)
    return Markup(
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">'
        '<polyline class="front" points="{}"/></svg>'
    ).format(places)


def _limit(frame: Frame, limit: float, text: str) -> Markup:
    if not 0 < limit < math.inf:
        return Markup("")
    at = frame.along(limit)
    side = Markup('text-anchor="end" dx="-6"') if at > 50 else Markup('dx="6"')
    return Markup(
        '<rect class="beyond" x="{0}%" y="0" width="{1}%" height="100%"/>'
        '<line class="limit" x1="{0}%" x2="{0}%" y1="0" y2="100%"/><text class="limit" x="{0}%" y="15" {2}>{3}</text>'
    ).format(_n(at), _n(max(0.0, 100 - at)), side, text)


def _grid(frame: Frame) -> Markup:
    return Markup("").join(
        Markup('<line class="grid" x1="0" x2="100%" y1="{0}%" y2="{0}%"/>').format(_n(frame.up(tick)))
        for tick in frame.seconds.ticks
    )


def _ticks(axis: Axis, place: Callable[[float], float], side: str, show: Callable[[float], str]) -> Markup:
    said = [(place(tick), _WHOLE.sub("", show(tick))) for tick in axis.ticks]
    return Markup("").join(
        Markup('<span style="{}:{}%">{}</span>').format(side, _n(at), text) for at, text in said if at < 96
    )


def _labelled(points: Sequence[Point], names: Mapping[str, str]) -> list[tuple[Point, str]]:
    """The plan, and the fastest that fits of each other algorithm, with their labels."""
    chosen = next((one for one in points if one.chosen), None)
    fastest: dict[str, Point] = {}
    for one in points:
        if one.fits and one.seconds < fastest.setdefault(one.algorithm, one).seconds:
            fastest[one.algorithm] = one
    said = [
        (one, f"{names.get(name, name)} {show_seconds(one.seconds)}")
        for name, one in fastest.items()
        if chosen is None or name != chosen.algorithm
    ]
    if chosen is not None:
        said.append((chosen, f"this plan {show_seconds(chosen.seconds)}"))
    return said


def _labels(said: Sequence[tuple[Point, str]], frame: Frame) -> Markup:
    """Below all marks, all on one side of theirs and in an order in which no leader crosses a text."""
    if not said:
        return Markup("")
    left = sum(frame.along(one.peak_bytes) for one, _ in said) / len(said) > 45
    ordered = sorted(said, key=lambda item: (item[0].peak_bytes if left else -item[0].peak_bytes, item[1]))
    first = 97 - _APART * (len(ordered) - 1)
    return Markup("").join(
        _label(one, text, frame, first + _APART * index, left) for index, (one, text) in enumerate(ordered)
    )


def _label(one: Point, text: str, frame: Frame, down: float, left: bool) -> Markup:
    x, y = frame.along(one.peak_bytes), frame.up(one.seconds)
    return Markup(
        '<line class="leader" x1="{x}%" y1="{y}%" x2="{aside}%" y2="{down}%"/>'
        '<text class="label{best}" x="{aside}%" y="{down}%" dx="{gap}" dy="4" text-anchor="{side}">{text}</text>'
    ).format(
        x=_n(x),
        y=_n(y),
        aside=_n(x - 1.5 if left else x + 1.5),
        down=_n(down),
        gap=-4 if left else 4,
        side="end" if left else "start",
        text=text,
        best=" plan" if one.chosen else "",
    )


def _about(points: Sequence[Point], limit_text: str) -> str:
    chosen = next((one for one in points if one.chosen), None)
    least, most = min(one.seconds for one in points), max(one.seconds for one in points)
    small, large = min(one.peak_bytes for one in points), max(one.peak_bytes for one in points)
    said = f"{len(points):,} layouts, {show_seconds(least)} to {show_seconds(most)} per step, "
    said += f"{show_size(small)} to {show_size(large)} per rank"
    said += f"; {limit_text}" if limit_text else ""
    if chosen is not None:
        said += f"; the plan: {show_seconds(chosen.seconds)}, {show_size(chosen.peak_bytes)}"
    return said


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
