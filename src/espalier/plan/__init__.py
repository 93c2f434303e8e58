"""Who does what? Decides; touches no tensor and no process group.

`decide.decide` answers every question, `search.search` prices every layout; a `Plan` (plan/base.py) is data and can be
edited. `estimate` and `calibrate` are for whoever plans by hand; `place` puts a model on unequal
devices, `waves` several tasks on groups of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Calibration": "espalier.plan.calibration",
    "Estimate": "espalier.train.library_request",
    "Measurement": "espalier.plan.calibration",
    "calibrate": "espalier.plan.calibration",
    "estimate": "espalier.train.library_request",
    "place": "espalier.mechanisms.unequal_pipelines.pipeline_search",
    "waves": "espalier.mechanisms.task_waves.wave_search",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'espalier.plan' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
