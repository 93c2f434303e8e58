"""Who does what? Decides; touches no tensor and no process group.

`decide.decide` answers every question, `search.search` prices every layout; a `Plan` (plan/base.py) is data and can be
edited. `estimate` and `calibrate` are for whoever plans by hand; `place` puts a model on unequal
devices, `waves` several tasks on groups of them.
"""

from espalier.recipe.lazy_names import lazy_names

_HOME = {
    ".calibration": "Calibration Measurement calibrate",
    "espalier.train.library_request": "Estimate estimate",
    "espalier.mechanisms.unequal_pipelines.pipeline_search": "place",
    "espalier.mechanisms.task_waves.wave_search": "waves",
}

__all__ = list(" ".join(_HOME.values()).split())

__getattr__ = lazy_names(__name__, _HOME)
