"""How long a round must be to hide its exchange, and what rounds cost. Formulas; no torch."""

from __future__ import annotations

import math

from espalier.cost import Cost, Number, Wire

MARGIN = 1.1
"""Rounds are planned this much longer than a flight."""
COPIES = 4
"""Copies of what a rank moves that an outer engine holds: the outer parameters, momentum, what was sent, its sum."""


def flight_seconds(size: Number, replicas: Number, link: Wire, ratio: Number = 1.0) -> Number:
    """Seconds of one exchange of `size` bytes of parameters among `replicas`, encoded `ratio` times smaller: a direct
    exchange, two phases of (G-1)/G of the bytes from each."""
    sent = 2 * size * (replicas - 1) / replicas / ratio
    return link.launch + 2 * link.latency + sent / link.bandwidth


def least_steps(flight: float, step: float) -> int:
    """Local steps of a round that hide a flight: ceil(1.1 * flight / step)."""
    return max(1, math.ceil(MARGIN * flight / step))


def cost(size: Number, replicas: Number, link: Wire, steps: Number, ratio: Number = 1.0) -> Cost:
    """What outer rounds add to each step of a rank that moves `size` bytes.

    `seconds`: `outer`, the flight's share of a step, hidden or not; `sent`: `outer_step`, likewise; `held`: `outer`.
    """
    return Cost(
        seconds={"outer": flight_seconds(size, replicas, link, ratio) / steps},
        sent={"outer_step": 2 * size * (replicas - 1) / replicas / ratio / steps},
        held={"outer": COPIES * size},
        sources={"outer": "2(G-1)/G bytes / bandwidth, once in a round (sync.hiding)"},
    )
