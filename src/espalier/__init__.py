"""Espalier trains large models on the hardware you actually have; language models and foreign modules so far.

The public names load on first use, so `import espalier` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # not from `typing`: Ctrl-C is heard from `__main__` on, and that import takes a while
if TYPE_CHECKING:
    from typing import Any

    from espalier.cli.open_run import open_run as open
    from espalier.cli.run_plan import make_plan
    from espalier.cli.split_runs import open_splits
    from espalier.launch.apply_plan import apply
    from espalier.machine.cluster import Cluster
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe
    from espalier.recipe.cost import Cost
    from espalier.recipe.errors import EspalierError
    from espalier.recipe.recipe_file import load

_HOME = {
    "Cluster": ("espalier.machine.cluster", "Cluster"),
    "Cost": ("espalier.recipe.cost", "Cost"),
    "EspalierError": ("espalier.recipe.errors", "EspalierError"),
    "Plan": ("espalier.plan.base", "Plan"),
    "Recipe": ("espalier.recipe", "Recipe"),
    "apply": ("espalier.launch.apply_plan", "apply"),
    "load": ("espalier.recipe.recipe_file", "load"),
    "make_plan": ("espalier.cli.run_plan", "make_plan"),
    "open": ("espalier.cli.open_run", "open_run"),
    "open_splits": ("espalier.cli.split_runs", "open_splits"),
}

__all__ = ["Cluster", "Cost", "EspalierError", "Plan", "Recipe", "apply", "load", "make_plan", "open", "open_splits"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'espalier' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
