"""What a step of several tasks and towers is made of: operators contracted to MetaOps, their scalability, their levels.
Pure; no torch. See `mechanisms.task_waves.wave_search`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from espalier.recipe.errors import UserError

EPSILON = 1e-12


class TimeCurve:
    """Seconds of one operator on n devices, from those at some n: positive, and falling from each n to the next.

    A number of devices that is no faster than a smaller one is left out, as nobody would give that many. Between two
    of them the seconds are `a + b / n`; below the smallest, devices share their time: `n1 * T(n1) / n`.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.sizes: tuple[int, ...] = ()
        self.times: tuple[float, ...] = ()
        for size in sorted(seconds):
            if not self.times or seconds[size] < self.times[-1] * (1 - EPSILON):
                self.sizes, self.times = (*self.sizes, size), (*self.times, float(seconds[size]))

    def __call__(self, devices: float) -> float:
        """Seconds on so many devices, any positive number."""
        sizes, times = self.sizes, self.times
        if devices <= sizes[0]:
            return sizes[0] * times[0] / devices
        if devices >= sizes[-1]:
            return times[-1]
        a, b = self._segment(bisect.bisect_left(sizes, devices))
        return a + b / devices

    def _segment(self, above: int) -> tuple[float, float]:
        """`a` and `b` between size number `above` and the one below it."""
        (n, m), (t, u) = self.sizes[above - 1 : above + 1], self.times[above - 1 : above + 1]
        b = (t - u) / (1 / n - 1 / m)
        return t - b / n, b

    def inverse(self, seconds: float) -> float:
        """The fewest devices, any positive number, that are as fast; infinite where none are."""
        sizes, times = self.sizes, self.times
        if seconds >= times[0]:
            return sizes[0] * times[0] / seconds
        for above in range(1, len(sizes)):
            if seconds >= times[above]:
                a, b = self._segment(above)
                return b / (seconds - a)
        return math.inf

    def within(self, devices: int) -> tuple[int, float]:
        """(size, seconds) of the largest size that so many devices can form; an infinite time where there is none."""
        reachable = [pair for pair in zip(self.sizes, self.times, strict=True) if pair[0] <= devices]
        return reachable[-1] if reachable else (0, math.inf)


def fit(seconds: Mapping[float, float]) -> tuple[float, float]:
    """`a` and `b` of `T(n) = a + b / n`, neither negative, by least squares of relative errors over measured n."""
    from scipy.optimize import nnls

    sizes, times = np.array(list(seconds), float), np.array(list(seconds.values()), float)
    (a, b), _ = nnls(np.stack([1 / times, 1 / (sizes * times)], 1), np.ones(len(times)))
    return float(a), float(b)


@dataclass(frozen=True)
class MetaOp:
    """Equal operators that run one after the other: the blocks of a tower on the batch of one task.

    Attributes:
        name: what `needs` of others call it.
        operators: how many.
        seconds: devices -> seconds of one operator, forward and backward, with the whole batch over so many devices.
            Only these numbers of devices are used.
        needs: MetaOps whose outputs it takes.
        tower: whose parameters it uses: those of one tower share them, operator by operator; empty: nobody shares.
        states: bytes of one operator's parameters, gradients and optimizer states.
        activations: bytes that one operator keeps for its backward pass, of the whole batch.
        output: bytes that an operator hands on, of the whole batch; as many come back as gradients.
        gradients: bytes of one operator's gradients, which the devices that hold it sum at the end of a step.
        forward: share of `seconds` that the forward pass takes. 1: there is no other, or nobody knows.
    """

    name: str
    operators: int
    seconds: Mapping[int, float]
    needs: tuple[str, ...] = ()
    tower: str = ""
    states: float = 0.0
    activations: float = 0.0
    output: float = 0.0
    gradients: float = 0.0
    forward: float = 1.0

    @cached_property
    def curve(self) -> TimeCurve:
        """Its scalability."""
        return TimeCurve(self.seconds)

    @property
    def parameters(self) -> str:
        """Whose parameters it uses."""
        return self.tower or self.name


class LevelRange(NamedTuple):
    """The levels `[first, last]` in which a MetaOp may run: after all it needs, before all that need it."""

    first: int
    last: int


def spans(metaops: Sequence[MetaOp]) -> dict[str, LevelRange]:
    """MetaLevels: the longest distance from a source. What nobody waits for may run as late as the last level.

    Raises:
        UserError: a name appears twice, is unknown, or MetaOps need one another in a circle.
    """
    names = [metaop.name for metaop in metaops]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"There are two MetaOps {twice!r}.", do="a name of its own for each")
    unknown = [(metaop.name, need) for metaop in metaops for need in metaop.needs if need not in names]
    if unknown:
        raise UserError(f"{unknown[0][0]!r} needs {unknown[0][1]!r}, which there is not.", do=f"one of {sorted(names)}")
    first: dict[str, int] = {}
    waiting = list(metaops)
    while waiting:
        ready = [metaop for metaop in waiting if all(need in first for need in metaop.needs)]
        if not ready:
            circle = " and ".join(repr(metaop.name) for metaop in waiting)
            raise UserError(f"{circle} need one another in a circle.", do="let one of them need nothing of the others")
        for metaop in ready:
            first[metaop.name] = 1 + max((first[need] for need in metaop.needs), default=-1)
        waiting = [metaop for metaop in waiting if metaop.name not in first]
    last = dict.fromkeys(names, max(first.values(), default=0))
    for metaop in metaops:
        for need in metaop.needs:
            last[need] = min(last[need], first[metaop.name] - 1)
    return {name: LevelRange(first[name], last[name]) for name in names}


def components(metaops: Sequence[MetaOp]) -> list[list[MetaOp]]:
    """MetaOps that hang together by what they need, mostly those of one task, in topological order each."""
    of = {metaop.name: {metaop.name} for metaop in metaops}
    for metaop in metaops:
        for need in metaop.needs:
            joined = of[metaop.name] | of[need]
            for name in joined:
                of[name] = joined
    level = spans(metaops)
    groups = {min(names): names for names in of.values()}
    ordered = [
        sorted((metaop for metaop in metaops if metaop.name in names), key=lambda m: level[m.name])
        for names in groups.values()
    ]
    return sorted(ordered, key=lambda component: min(metaops.index(name) for name in component))
