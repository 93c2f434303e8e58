"""DiLoCo, SlowMo, CO2, Local SGD, Streaming DiLoCo: points of five choices that define an outer method. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from espalier.recipe.errors import UserError

Penalty = Literal["none", "norm", "per_tensor", "constant", "gap"]


@dataclass(frozen=True)
class OuterMethod:
    """How replicas that take steps of their own become one again, round by round.

    Attributes:
        average: what travels: the `parameters`, or their `differences` to the round's beginning (lossy codecs take only
            these).
        delay: rounds between a fragment's departure and its use: 0, its link waits; 1, it travels while the next round
            computes and that round's own progress comes a round later; between, the rest of the round is computed with
            what is there, and `mixing` says how much of that progress stays.
        fragments: parts of the model that depart at different steps of a round.
        rate, momentum, nesterov: the outer optimizer: m <- momentum m + D, x <- x - rate m.
        clip: bound on every element of m as it is applied; 0: none. In units of D.
        scaled: D is divided by the inner learning rate and the step multiplied by it (SlowMo's and CO2's form).
        penalty: what divides a late D: `norm`, `per_tensor`, `constant` or nothing; with `gap` a share of what x moved
            since D departed is taken back instead. See `outer_optimizer.OuterUpdate`.
        constant: that constant, at least 1.
        mixing: share of its own progress that a replica keeps when the outer parameters come; delay below 1 only.
        eager: with a delay of one round, a replica goes on from its own progress while that travels, and the others'
            comes a round later, instead of going back to the outer parameters each time (arXiv 2502.12996).
        offload: the outer parameters and all else that is kept are in host memory, whatever the device.
        codec: of what travels, as `comm.codec` reads it, with error feedback.
        warm: rounds at the run's beginning that are used at once, as with a delay of 0 (post-local SGD, arXiv
            1808.07217).
    """

    average: Literal["parameters", "differences"] = "differences"
    delay: float = 1.0
    fragments: int = 1
    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    clip: float = 0.0
    scaled: bool = False
    penalty: Penalty = "none"
    constant: float = 1.0
    mixing: float = 0.0
    eager: bool = False
    offload: bool = False
    codec: str = "exact"
    warm: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("delay", 0.0, 1.0), ("momentum", 0.0, 1.0), ("mixing", 0.0, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high or (name == "momentum" and value == high):
                raise UserError(f"sync.{name} = {value}.", why="it lies between 0 and 1", do=f"sync.{name}=0")
        if self.fragments < 1:
            raise UserError(f"sync.fragments = {self.fragments}.", do="sync.fragments=1")
        if self.rate <= 0:
            raise UserError(f"sync.rate = {self.rate} moves nothing.", do="sync.rate=1")
        if self.clip < 0:
            raise UserError(f"sync.clip = {self.clip}.", do="sync.clip=0 for none")
        if self.constant < 1:
            raise UserError(f"sync.constant = {self.constant}.", why="late steps are divided by it")
        if self.mixing and self.delay == 1:
            raise UserError(
                f"sync.mixing = {self.mixing} with sync.delay = 1.",
                why="with a delay of a whole round, a replica's own progress is still in transit and would count twice",
                do="sync.mixing=0, or sync.delay below 1",
            )
        if self.eager and (self.delay != 1 or self.average != "differences"):
            raise UserError(
                f"sync.eager = true with sync.delay = {self.delay} and sync.average = {self.average!r}.",
                why="a replica keeps its own difference for the round in which the mean of all travels",
                do="sync.delay=1 and sync.average='differences', or sync.eager=false",
            )
        self._check_gap()
        if self.average == "parameters" and self.codec not in ("exact", "split", "mpc"):
            raise UserError(
                f"sync.codec = {self.codec!r} with sync.average = 'parameters'.",
                why="rounding errors of parameters are as large as a round's progress",
                do="sync.average='differences'",
            )

    def _check_gap(self) -> None:
        if self.penalty == "gap" and (self.delay != 1 or self.eager or self.nesterov):
            raise UserError(
                "sync.penalty = 'gap' with another sync.delay than 1, sync.eager or sync.nesterov.",
                why="it takes back what x moved while a difference travelled; its momentum is a mean of differences",
                do="sync.penalty='none'",
            )


METHODS = {
    "local_sgd": OuterMethod(delay=0.0),
    "slowmo": OuterMethod(delay=0.0, momentum=0.5, scaled=True),
    "diloco": OuterMethod(delay=0.0, rate=0.7, momentum=0.9, nesterov=True),
    "streaming_diloco": OuterMethod(
        delay=0.25, fragments=4, rate=0.7, momentum=0.9, nesterov=True, mixing=0.5, codec="int4"
    ),
    "co2": OuterMethod(delay=1.0, momentum=0.8, scaled=True, penalty="gap"),
    "eager": OuterMethod(delay=1.0, eager=True),
}
"""Local SGD (Stich, arXiv 1805.09767), SlowMo (1910.00643), DiLoCo (2311.08105), Streaming DiLoCo (2501.18512; it too
keeps half of a replica's progress and rounds what travels to 4 bits) and CO2 (2401.16265). `eager` is CO2 whose
replicas keep their own progress until its mean is there, an idea of Kale et al. (2502.12996), with the outer optimizer
of Local SGD. Why: where a round goes the share c of the way to where it leads, CO2's x_(t+1) = x_t - c x_(t-1) has
roots of size sqrt(c), so it swings for c near 1, and momentum makes that grow; replicas that keep their own progress
contract by 1 - c. So CO2 has a penalty of the gap here."""


def defaults_of(method: str, penalty: object) -> OuterMethod:
    """A method's choices; for CO2 with another penalty than its own its authors', of small clusters."""
    if method == "co2" and penalty not in (None, "gap"):
        return OuterMethod(momentum=0.2, scaled=True)
    return METHODS[method]


WARM = 4
"""In the first of so many parts of a run CO2's rounds are used at once: there each changes the model much."""
