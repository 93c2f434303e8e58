"""`espalier plan RECIPE [--cluster FILE]`: how the recipe would run, what it would cost, and why."""

from __future__ import annotations

import argparse
import sys

import torch

from espalier.hardware import probe
from espalier.plan import base as plans
from espalier.plan import reasons, uniform
from espalier.verbs import choose, ready, show


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; allocates no model and starts no rank. When none fits: the closest one, and exit code 2."""
    torch.set_num_threads(1)
    resolved = ready.resolve(arguments.recipe, arguments.overrides)
    cluster = ready.machines(resolved.recipe, arguments.cluster)
    here = cluster.machine == probe.identity()
    request = ready.request(resolved, resident=ready.resident() if here else 0)
    try:
        plan, refusal = uniform.plan(request, cluster, choose.tried_before(request, resolved, cluster)), None
    except reasons.DoesNotFit as error:
        plan, refusal = uniform.closest(request, cluster), error
    if arguments.json:
        print(plans.dumps(plan), end="", flush=True)
    else:
        show.plan(plan, resolved.derivations, resolved.recipe.train.steps)
        show.sources(plan)
    if refusal is None:
        return 0
    if not arguments.json:
        raise refusal
    print(f"espalier: {refusal}", file=sys.stderr)  # standard output holds one object, the plan
    return refusal.exit_code
