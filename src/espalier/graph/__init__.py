"""How is a graph trained? Data, sampling, networks, and the workload that hands them to the one trainer."""

from __future__ import annotations

from typing import Any

from espalier.graph.data import Graph

__all__ = ["Additions", "Graph", "Pattern", "attention", "pattern"]

_LAZY = {"attention": "attention", "Additions": "pattern", "Pattern": "pattern", "pattern": "pattern"}
"""What loads torch, and the module of `pattern_attention` that has it: costs of graphs are planned without."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from espalier.graph.lookup import named

    return named(f"mechanisms.pattern_attention.{_LAZY[name]}:{name}")
