"""`[sync]` by rounds: what a recipe may leave to the method. Imports no torch."""

from __future__ import annotations

from typing import Literal

from espalier.recipe.sections import Sync


class ByRounds(Sync, frozen=True):
    """Replicas take `steps` steps of their own in a round, then agree. What is left out is the method's own, the number
    of steps and the codec what the links ask for; see `optim.diloco_slowmo`.

    `replicas`: in how many parts the ranks are cut (as many as machines). `adapt`: rounds follow the measured waits;
    a run's folder: they are as long as they were there, and beyond its end as measured.
    """

    by_rounds = True
    replicas: int | None = None
    steps: int | None = None
    adapt: bool | str = True
    codec: str | None = None
    average: Literal["parameters", "differences"] | None = None
    delay: float | None = None
    fragments: int | None = None
    rate: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    clip: float | None = None
    scaled: bool | None = None
    penalty: Literal["none", "norm", "per_tensor", "constant", "gap"] | None = None
    constant: float | None = None
    mixing: float | None = None
    eager: bool | None = None
    offload: bool | None = None


class LocalSgd(ByRounds, frozen=True, tag="local_sgd"):
    """The mean of the replicas after each round (arXiv 1805.09767)."""


class SlowMo(ByRounds, frozen=True, tag="slowmo"):
    """With momentum between rounds (arXiv 1910.00643)."""


class DiLoCo(ByRounds, frozen=True, tag="diloco"):
    """With Nesterov momentum between rounds (arXiv 2311.08105)."""


class StreamingDiLoCo(ByRounds, frozen=True, tag="streaming_diloco"):
    """In fragments, behind the next steps, in four bits (arXiv 2501.18512)."""


class Co2(ByRounds, frozen=True, tag="co2"):
    """One round late, so that the exchange is hidden behind it (arXiv 2401.16265)."""


class Eager(ByRounds, frozen=True, tag="eager"):
    """As CO2, but a replica goes on from its own progress while that travels (arXiv 2502.12996)."""


OPTIONS = LocalSgd | SlowMo | DiLoCo | StreamingDiLoCo | Co2 | Eager
