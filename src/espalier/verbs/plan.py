"""`espalier plan RECIPE [--cluster FILE]`: how the recipe would run, what it would cost, and why."""

from __future__ import annotations

import argparse

import torch

from espalier.plan import base as plans
from espalier.plan import uniform
from espalier.verbs import ready, show


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; allocates no model and starts no rank."""
    torch.set_num_threads(1)
    resolved = ready.resolve(arguments.recipe, arguments.overrides)
    cluster = ready.machines(resolved.recipe, arguments.cluster)
    plan = uniform.plan(ready.request(resolved.recipe), cluster)
    if arguments.json:
        print(plans.dumps(plan), end="")
    else:
        show.plan(plan, resolved.derivations)
        show.sources(plan)
    return 0
