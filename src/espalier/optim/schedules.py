"""How the learning rate moves over a run: warmup-stable-decay, cosine, constant. Pure functions of the step."""

from __future__ import annotations

import math

from espalier.recipe import Constant, Cosine, Stable


def factor(schedule: Stable | Cosine | Constant, step: int, steps: int) -> float:
    """What the base rate is multiplied with in step `step` (0-based) of `steps`. Between 0 and 1.

    Warmup-stable-decay: Hu et al., arXiv 2404.06395. Cosine: Loshchilov and Hutter, arXiv 1608.03983.
    """
    if isinstance(schedule, Constant):
        return 1.0
    assert schedule.warmup is not None, "config.defaults.resolve fills the warmup"
    warmup = math.ceil(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if isinstance(schedule, Cosine):
        share = (step - warmup) / max(1, steps - warmup)
        height = 0.5 * (1.0 + math.cos(math.pi * share))
    else:
        height = min(1.0, (steps - step) / max(1, math.ceil(schedule.decay * steps)))
    return schedule.floor * (1.0 - height) + height
