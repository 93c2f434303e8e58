"""Prediction check: the first steps of an attempt beside the plan's prediction, said once."""

from __future__ import annotations

import statistics
from typing import Any

from espalier.plan.base import Predicted
from espalier.recipe.units import show_seconds
from espalier.track.events import Event

STEPS = 20
WARM = 2
"""Steps of which the median is compared, and those before them that are not: they make groups and buffers."""
SLOWER = 1.5
"""From this ratio on it is said what is slower, where the plan does not expect to be off by more."""
OFF = 1.5
"""From this ratio on, either way, trials on which the plan was based are measured anew."""
EXCHANGES = ("tensor", "sequence", "weights", "send", "all_reduce", "refresh")


class PredictionCheck:
    """Has state: the steps seen, until there are `STEPS` of them."""

    def __init__(self, predicted: Predicted) -> None:
        self._predicted = predicted
        self._seen: list[Event] = []

    def event(self, event: Event) -> dict[str, Any] | None:
        """Takes a step; what is to be said of the prediction, once there are enough."""
        if len(self._seen) == WARM + STEPS:
            return None
        self._seen.append(event)
        return self._comparison(event) if len(self._seen) == WARM + STEPS else None

    def _comparison(self, newest: Event) -> dict[str, Any]:
        planned = self._predicted.step_seconds
        seconds, exposed = (
            statistics.median(event[name] for event in self._seen[WARM:]) for name in ("seconds", "exposed")
        )
        ratio = seconds / planned
        sentence = f"steps take {show_seconds(seconds)}, planned were {show_seconds(planned)}"
        fields = {"step": newest["step"], "predicted": planned, "measured": seconds, "exposed": exposed}
        if ratio <= max(SLOWER, 1 + 2 * (self._predicted.spread or 0.0)):
            return {**fields, "part": "", "what": f"{sentence} ({ratio - 1:+.0%})"}
        waits = sum(self._predicted.terms.get(term, 0.0) for term in EXCHANGES)
        if exposed - waits > (seconds - planned) / 2:
            part = "exchanges"
            why = (
                f"waits for other ranks take {show_seconds(exposed)}, planned were {show_seconds(waits)}. Try: "
                "`espalier probe`, started as these ranks were, measures the links; then plan.cluster=cluster.toml"
            )
        else:
            part = "computation"
            why = (
                f"computation takes {show_seconds(seconds - exposed)}, planned were {show_seconds(planned - waits)}. "
                "Try: see what else runs here (`top`), or measure anew with `espalier probe`"
            )
        return {**fields, "part": part, "what": f"{sentence} ({ratio:.1f} times as long): {why}"}
