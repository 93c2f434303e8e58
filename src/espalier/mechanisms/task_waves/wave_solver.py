"""How many devices each MetaOp gets, and for how many of its operators: the continuous optimum, the greedy wavefront,
and the linear program over configurations with its repair. Pure; no torch. See `mechanisms.task_waves.wave_search`.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.mechanisms.task_waves.metaops import EPSILON, LevelRange, MetaOp

BISECTIONS = 60
COLUMNS = 400
"""Configurations that are priced at most; a number, as a clock would make plans differ from run to run."""


class MetaOpSlice(NamedTuple):
    """`operators` of a MetaOp, from number `first`, on a group of `size` devices; `devices`: which ones."""

    metaop: str
    first: int
    operators: int
    size: int
    devices: tuple[int, ...] = ()


Wave = tuple[MetaOpSlice, ...]
Share = tuple[str, int, int]
"""(MetaOp, devices, operators)."""


class Allocation(NamedTuple):
    """The continuous optimum of one level: all MetaOps begin and end together after `seconds`, with `devices` each; and
    the whole numbers of devices and operators that come nearest."""

    seconds: float
    devices: dict[str, float]
    shares: list[Share]


def allocate(level: Sequence[MetaOp], devices: int) -> Allocation:
    """Of MetaOps that do not need one another.

    `T_m(n_m) * L_m = C` for all m and `sum n_m = N` (Spindle, section 3.3), by bisection of C. Then each MetaOp's
    operators are divided between the two sizes next to n_m so that they take C together (bi-point).
    """

    def wanted(seconds: float) -> float:
        return sum(metaop.curve.inverse(seconds / metaop.operators) for metaop in level)

    high = sum(metaop.operators * metaop.curve.times[0] * metaop.curve.sizes[0] for metaop in level)
    low = max(metaop.operators * metaop.curve.times[-1] for metaop in level)
    high = max(high, low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if wanted(middle) > devices else (low, middle)
    devices_of = {metaop.name: metaop.curve.inverse(high / metaop.operators) for metaop in level}
    shares = [share for metaop in level for share in _bi_point(metaop, devices_of[metaop.name], high)]
    return Allocation(high, devices_of, shares)


def _bi_point(metaop: MetaOp, devices: float, seconds: float) -> list[Share]:
    """Operators at the size below `devices` and at that above it. Below the smallest size there is none."""
    curve = metaop.curve
    at = bisect.bisect(curve.sizes, devices * (1 + 1e-9)) - 1
    if at in (-1, len(curve.sizes) - 1):
        return [(metaop.name, curve.sizes[max(0, at)], metaop.operators)]
    slow, fast = curve.times[at], curve.times[at + 1]
    more = min(metaop.operators, max(0, round((slow * metaop.operators - seconds) / (slow - fast))))
    shares = [(metaop.name, curve.sizes[at], metaop.operators - more), (metaop.name, curve.sizes[at + 1], more)]
    return [share for share in shares if share[2]]


# --- the greedy wavefront ------------------------------------------------------------------------------------------


def greedy(level: Sequence[MetaOp], devices: int, shares: Sequence[Share]) -> list[list[Share]]:
    """Waves of one level: the longest remaining MetaOps first, as large as their `shares` of the allocation say; groups
    that end last grow while devices are free; a wave ends with the first of its groups."""
    by_name = {metaop.name: metaop for metaop in level}
    rest: dict[str, list[list[int]]] = {metaop.name: [] for metaop in level}  # [devices, operators]
    for name, size, count in shares:
        rest[name].append([size, count])
    waves = []
    while any(rest.values()):
        remaining = {
            name: sum(by_name[name].curve.within(size)[1] * count for size, count in shares)
            for name, shares in rest.items()
            if shares
        }
        chosen: dict[str, list[int]] = {}
        free = devices
        for name in sorted(remaining, key=lambda candidate: (-remaining[candidate], candidate)):
            fitting = [share for share in rest[name] if share[0] <= free]
            if fitting:
                chosen[name] = max(fitting)
                free -= chosen[name][0]
        if not chosen:  # nothing allocated fits: the longest one takes what there is
            name = max(remaining, key=lambda candidate: (remaining[candidate], candidate))
            chosen[name] = rest[name][0]
            chosen[name][0], free = by_name[name].curve.within(devices)[0], 0
        sizes = _grown({name: share[0] for name, share in chosen.items()}, chosen, by_name, free)
        times = {name: by_name[name].curve.within(size)[1] for name, size in sizes.items()}
        ends = min(times[name] * chosen[name][1] for name in chosen)
        wave = []
        for name, share in chosen.items():
            count = min(share[1], max(1, int(ends / times[name] * (1 + EPSILON))))
            wave.append((name, sizes[name], count))
            share[1] -= count
            rest[name] = [share for share in rest[name] if share[1]]
        waves.append(wave)
    return waves


def _grown(
    sizes: dict[str, int], chosen: Mapping[str, list[int]], by_name: Mapping[str, MetaOp], free: int
) -> dict[str, int]:
    """Groups with the free devices given to those that end last."""
    while True:
        lasting = sorted(
            sizes,
            key=lambda candidate: (
                -by_name[candidate].curve.within(sizes[candidate])[1] * chosen[candidate][1],
                candidate,
            ),
        )
        for name in lasting:
            larger = [size for size in by_name[name].curve.sizes if sizes[name] < size <= sizes[name] + free]
            if larger:
                free -= larger[0] - sizes[name]
                sizes = {**sizes, name: larger[0]}
                break
        else:
            return sizes


# --- the linear program over configurations -----------------------------------------------------------------------


class Program(NamedTuple):
    """`seconds` of the best fractional schedule of levels, and the configurations it uses: (level, MetaOp -> devices,
    seconds)."""

    seconds: float
    used: list[tuple[int, dict[str, int], float]]


def solve_program(
    metaops: Sequence[MetaOp],
    span: Mapping[str, LevelRange],
    devices: int,
    seeds: Sequence[tuple[int, Mapping[str, int]]] = (),
) -> Program:
    """Minimises the sum of the seconds of configurations, in which every MetaOp has a group or none, so that each gets
    through its operators. Columns are made by dynamic programming over (MetaOp, devices used). `seeds`: to begin with.
    """
    from scipy.optimize import linprog

    levels = 1 + max(range_.last for range_ in span.values())
    columns = [(span[metaop.name].first, {metaop.name: metaop.curve.within(devices)[0]}) for metaop in metaops]
    columns += [(level, dict(sizes)) for level, sizes in seeds]
    needed, rates = np.array([metaop.operators for metaop in metaops], float), np.empty((len(metaops), 0))
    seen = {(level, tuple(sorted(sizes.items()))) for level, sizes in columns}
    while True:
        fresh = [sizes for _, sizes in columns[rates.shape[1] :]]
        rates = np.concatenate([rates, 1 / _times(metaops, fresh)], 1)
        solved: Any = linprog(np.ones(len(columns)), A_ub=-rates, b_ub=-needed, method="highs")
        prices = -solved.ineqlin.marginals
        before = len(columns)
        for level in range(levels):
            priced = zip(metaops, prices.tolist(), strict=True)
            inside = [pair for pair in priced if span[pair[0].name].first <= level <= span[pair[0].name].last]
            value, sizes = _best_configuration(inside, devices)
            key = (level, tuple(sorted(sizes.items())))
            if value > 1 + 1e-9 and key not in seen:
                seen.add(key)
                columns.append((level, sizes))
        if len(columns) == before or len(columns) >= COLUMNS:
            used = [(*columns[k], float(tau)) for k, tau in enumerate(solved.x[:before]) if tau > 1e-9 * solved.fun]
            return Program(float(solved.fun), sorted(used, key=lambda column: column[0]))


def _best_configuration(priced: Sequence[tuple[MetaOp, float]], devices: int) -> tuple[float, dict[str, int]]:
    """The groups worth most per second at these prices of operators, by dynamic programming."""
    worth = np.zeros(devices + 1)
    taken = []
    for metaop, price in priced:
        best, size_of = worth.copy(), np.zeros(devices + 1, int)
        if price > 0:
            for size, time in zip(metaop.curve.sizes, metaop.curve.times, strict=True):
                if size <= devices:
                    other = worth[: devices + 1 - size] + price / time
                    better = other > best[size:] + 1e-15
                    best[size:][better], size_of[size:][better] = other[better], size
        worth = best
        taken.append(size_of)
    sizes, at = {}, devices
    for (metaop, _), size_of in zip(reversed(priced), reversed(taken), strict=True):
        if size := int(size_of[at]):
            sizes[metaop.name] = size
            at -= size
    return float(worth[devices]), sizes


# --- whole numbers of operators ------------------------------------------------------------------------------------


class _Rounding:
    """Operators of each MetaOp in each wave, as whole numbers. Has state: what was moved where."""

    def __init__(self, times: NDArray[Any], fractional: NDArray[Any], needed: NDArray[Any]) -> None:
        self.times, self.needed = times, needed  # [MetaOp, wave], infinite where it has no group
        self.allowed = np.isfinite(times)
        self.each = np.where(self.allowed, times, 0.0)
        self.counts = np.floor(np.where(self.allowed, fractional, 0.0) + 1e-9).astype(int)
        self._fill()

    @property
    def seconds(self) -> float:
        """Of all waves."""
        return float((self.counts * self.each).max(0).sum())

    def _fill(self) -> None:
        """What rounding left out goes where waves grow least; what is too much comes off where they shrink most."""
        for m, needed in enumerate(self.needed):
            while self.counts[m].sum() > needed:
                self._change(m, -1)
        missing = [m for m, needed in enumerate(self.needed) for _ in range(int(needed - self.counts[m].sum()))]
        for m in sorted(missing, key=lambda row: -self.each[row][self.allowed[row]].min()):
            self._change(m, 1)

    def _change(self, m: int, by: int) -> None:
        ends = (self.counts * self.each).max(0)
        options = []
        for c in np.flatnonzero(self.allowed[m] if by > 0 else self.counts[m] > 0):
            self.counts[m, c] += by
            options.append((float((self.counts[:, c] * self.each[:, c]).max() - ends[c]), int(c)))
            self.counts[m, c] -= by
        self.counts[m, min(options)[1]] += by

    def improve(self) -> None:
        """Moves operators from wave to wave while the sum falls: first all that end a wave last give one up, then each
        gives it to where it costs least."""
        for _ in range(4 * self.counts.size):
            before, counts = self.seconds, self.counts.copy()
            best = (before * (1 - 1e-12), counts)
            for c in range(self.counts.shape[1]):
                for shrunk in (1, 2):
                    self.counts = counts.copy()
                    for _ in range(shrunk):
                        busy = self.counts[:, c] * self.each[:, c]
                        if busy.max() > 0:
                            self.counts[busy >= busy.max() * (1 - 1e-9), c] -= 1
                    self._fill_elsewhere(c)
                    if self.seconds < best[0]:
                        best = (self.seconds, self.counts.copy())
            self.counts = best[1]
            if best[0] >= before * (1 - 1e-12):
                return

    def _fill_elsewhere(self, wave: int) -> None:
        before = self.allowed[:, wave].copy()
        for m in np.flatnonzero(self.counts.sum(1) < self.needed):
            self.allowed[m, wave] = False
            if not self.allowed[m].any():
                self.allowed[m, wave] = before[m]
        self._fill()
        self.allowed[:, wave] = before


def repair(
    metaops: Sequence[MetaOp], span: Mapping[str, LevelRange], devices: int, program: Program
) -> list[list[Share]]:
    """Waves of whole operators from a fractional schedule. Devices that a configuration leaves free are given to
    MetaOps without a group, and to those whose groups can grow, so that rounding has more places to choose from."""
    waves = [_filled(metaops, span, devices, level, sizes) for level, sizes, _ in program.used]
    times = _times(metaops, waves)
    needed = np.array([metaop.operators for metaop in metaops])
    taus = np.array([tau for *_, tau in program.used])
    fractional = np.zeros_like(times)
    for c, (_, sizes, tau) in enumerate(program.used):
        for m, metaop in enumerate(metaops):
            if metaop.name in sizes:
                fractional[m, c] = tau / times[m, c]
    scale = needed / np.maximum(fractional.sum(1), EPSILON)
    candidates: list[tuple[float, int, NDArray[Any]]] = []
    for start in (fractional * np.minimum(scale, 1.0)[:, None], _stretched(times, needed, taus)):
        rounding = _Rounding(times, start, needed)
        rounding.improve()
        candidates.append((rounding.seconds, len(candidates), rounding.counts))
    counts = min(candidates)[2]
    return [
        [(metaop.name, sizes[metaop.name], int(counts[m, c])) for m, metaop in enumerate(metaops) if counts[m, c]]
        for c, sizes in enumerate(waves)
        if counts[:, c].any()
    ]


def _times(metaops: Sequence[MetaOp], configurations: Sequence[Mapping[str, int]]) -> NDArray[Any]:
    """[MetaOp, configuration]: seconds of an operator on its group; infinite where it has none."""
    return np.array(
        [[metaop.curve.within(sizes.get(metaop.name, 0))[1] for sizes in configurations] for metaop in metaops]
    )


def _stretched(times: NDArray[Any], needed: NDArray[Any], taus: NDArray[Any]) -> NDArray[Any]:
    """Whole operators that fit into all waves when these are longer by one common factor, the least that will do."""
    low, high = 1.0, 1.0
    while (np.floor(high * taus / times + 1e-9).sum(1) < needed).any() and high < 1e6:
        high *= 1.25
    for _ in range(40):
        middle = (low + high) / 2
        enough = (np.floor(middle * taus / times + 1e-9).sum(1) >= needed).all()
        low, high = (low, middle) if enough else (middle, high)
    return np.floor(high * taus / times + 1e-9)


def _filled(
    metaops: Sequence[MetaOp], span: Mapping[str, LevelRange], devices: int, level: int, sizes: Mapping[str, int]
) -> dict[str, int]:
    """A configuration with its free devices in use."""
    grown = dict(sizes)
    inside = [metaop for metaop in metaops if span[metaop.name].first <= level <= span[metaop.name].last]
    for metaop in sorted(inside, key=lambda m: (-m.operators * m.curve.times[0], m.name)):
        free = devices - sum(grown.values())
        size = metaop.curve.within(grown.get(metaop.name, 0) + free)[0]
        if size > grown.get(metaop.name, 0):
            grown[metaop.name] = size
    return grown
