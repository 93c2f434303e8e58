"""How does a token reach its expert?"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from espalier.mechanisms.expert_parallel.routed_experts import RoutedExperts, route

__all__ = ["RoutedExperts", "route"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'espalier.mechanisms.expert_parallel' has no attribute {name!r}")
    return getattr(import_module("espalier.mechanisms.expert_parallel.routed_experts"), name)
