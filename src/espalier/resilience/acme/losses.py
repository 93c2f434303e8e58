"""A loss that left its course and did not come back, or is no number, among the losses a log tells.

After arXiv 2403.07648, section on recovery, whose monitor alarms at a loss 1.5 times the one before. Here the level is
the lowest median of 16 losses, a step must leave it by half and by 8 median deviations, and a loss that comes back by
itself is none: one odd batch needs no rollback.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from espalier.resilience.acme.scan import Loss

WINDOW = 16
LEAST = 10
"""Losses below which nothing is said."""
RATIO = 1.5
DEVIATIONS = 8.0
LASTING = 3
"""Losses out of course in a row that are a departure."""


def departure(losses: Sequence[Loss]) -> Loss | None:
    """The first loss of a departure that lasts to the end of the log, None where the losses stay on course.

    Losses that are not numbers are told by the scan (`Scanned.not_finite`), and left out here; so are series that
    touch zero, whose ratios say nothing.
    """
    known = [loss for loss in losses if np.isfinite(loss.value)]
    values = np.array([loss.value for loss in known])
    if len(values) < LEAST or values.min() <= 0:
        return None
    window = min(WINDOW, len(values) // 2)
    edges = np.arange(0, len(values) - window + 1, max(1, window // 2))
    medians = np.array([np.median(values[at : at + window]) for at in edges])
    low = int(medians.argmin())
    course = values[edges[low] : edges[low] + window]
    level = float(medians[low])
    spread = float(np.median(np.abs(course - level)))
    limit = max(RATIO * level, level + DEVIATIONS * spread)
    if float(np.median(values[-LASTING:])) <= limit or int(edges[low]) + LASTING >= len(values):
        return None
    out = values > limit
    last_good = next((at for at in range(len(out) - 1, 0, -1) if not out[at] and not out[at - 1]), -1)
    first = last_good + 1
    if len(values) - first < LASTING or first <= int(edges[low]):
        return None
    while first < len(values) and not out[first]:
        first += 1
    return known[first]
