"""Decision cache: a plan is kept under a hash of everything that it was decided from, and read where all of it is the
same again.

The hash covers what the planner is asked, the cluster, the calibration, the trials and the code that decides. Whatever
could change the answer changes the name, so no entry is ever out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import base as plans
from espalier.plan.base import Plan
from espalier.plan.calibration import Calibration
from espalier.plan.request import AUTO, Request
from espalier.recipe.cache_dir import cache_folder, hashed, write_atomic
from espalier.recipe.cost import WHOLE
from espalier.recipe.errors import UserError

KEPT = 64
"""Plans; the oldest make room for new ones."""


def key(
    request: Request,
    cluster: Cluster,
    calibration: Calibration,
    code: str,
    trials: Mapping[str, float] | None,
) -> str:
    """The name of a decision.

    Args:
        code: says which code decides.
        trials: what was measured of candidates of this request; None: nothing is to be measured.
    """
    recipe = request.recipe
    train = request.recipe.train
    options = (
        recipe.model,
        recipe.plan,
        recipe.sync,
        recipe.comm,
        recipe.checkpoint,
        recipe.faults,
        recipe.mechanisms,
        recipe.graph,
        [source.packing for source in recipe.data],
        train.precision,
        train.recompute,
        train.compile,
        type(train.optimizer).__name__,
    )
    profile = vars(request.profile) | {"anatomy": None}
    asked = repr((options, vars(request) | dict.fromkeys(("recipe", "refuses", "request_of")) | {"profile": profile}))
    # Code of the user's own may say what a sample costs: its answers count, not its name.
    precision = "fp32" if train.precision == AUTO else train.precision
    costs = [
        repr(request.profile.anatomy(size, "none", precision, WHOLE)) for size in (1, request.profile.global_batch)
    ]
    return hashed([asked, costs, clusters.dumps(cluster), repr(calibration), trials, code])


def read(name: str) -> Plan | None:
    """The plan kept under `name`; None where there is none that can be read."""
    with suppress(OSError, UserError):
        return plans.loads((cache_folder() / "plans" / f"{name}.json").read_bytes())
    return None


def keep(name: str, plan: Plan) -> None:
    """Keeps `plan` under `name`, if the cache can be written."""
    folder = cache_folder() / "plans"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{name}.json", plans.dumps(plan))
        by_age = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in by_age[:-KEPT]:
            file.unlink(missing_ok=True)
