"""Espalier trains large models on the hardware you actually have; language models and foreign modules so far.

The public names load on first use, so `import espalier` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # not from `typing`: Ctrl-C is heard from `__main__` on, and that import takes a while
if TYPE_CHECKING:
    from typing import Any

    from espalier.apply_plan import apply
    from espalier.cluster import Cluster
    from espalier.config import Recipe
    from espalier.config.recipe_file import load
    from espalier.cost import Cost
    from espalier.errors import EspalierError
    from espalier.plan.base import Plan
    from espalier.verbs.make_plan import make_plan
    from espalier.verbs.open_run import open_run as open

_HOME = {
    "Cluster": ("espalier.cluster", "Cluster"),
    "Cost": ("espalier.cost", "Cost"),
    "EspalierError": ("espalier.errors", "EspalierError"),
    "Plan": ("espalier.plan.base", "Plan"),
    "Recipe": ("espalier.config", "Recipe"),
    "apply": ("espalier.apply_plan", "apply"),
    "load": ("espalier.config.recipe_file", "load"),
    "make_plan": ("espalier.verbs.make_plan", "make_plan"),
    "open": ("espalier.verbs.open_run", "open_run"),
}

__all__ = ["Cluster", "Cost", "EspalierError", "Plan", "Recipe", "apply", "load", "make_plan", "open"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'espalier' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
