"""Who does what? Decides; touches no tensor and no process group.

`decide.decide` answers every question, `search.search` prices every layout; a `Plan` (plan/base.py) is data and can be
edited. `estimate` and `calibrate` are for whoever plans by hand; `place` puts a model on unequal
devices, `waves` several tasks on groups of them.
"""

from espalier.plan.calibrate import Calibration, Measurement, calibrate
from espalier.plan.flashflex import place
from espalier.plan.library_request import Estimate, estimate
from espalier.plan.spindle import waves

__all__ = ["Calibration", "Estimate", "Measurement", "calibrate", "estimate", "place", "waves"]
