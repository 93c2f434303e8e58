"""How is a graph trained? Data, sampling, networks, and the workload that hands them to the one trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from espalier.graph.data import Graph

if TYPE_CHECKING:
    from espalier.mechanisms.pattern_attention.attention import attention
    from espalier.mechanisms.pattern_attention.pattern import Additions, Pattern, pattern

__all__ = ["Additions", "Graph", "Pattern", "attention", "pattern"]

_LAZY = {"attention": "attention", "Additions": "pattern", "Pattern": "pattern", "pattern": "pattern"}
"""What loads torch, and the module of `torchgt` that has it: costs of graphs are planned without."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"espalier.mechanisms.pattern_attention.{_LAZY[name]}"), name)
