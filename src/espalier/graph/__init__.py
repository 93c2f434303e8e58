"""How is a graph trained? Data, sampling, networks, and the workload that hands them to the one trainer."""

from espalier.graph.data.graph import Graph
from espalier.recipe.lazy_names import lazy_names

__all__ = ["Additions", "Graph", "Pattern", "attention", "pattern"]

_LAZY = {"attention": "attention", "Additions": "pattern", "Pattern": "pattern", "pattern": "pattern"}
"""What loads torch, and the module of `pattern_attention` that has it: costs of graphs are planned without."""


__getattr__ = lazy_names(
    __name__, {name: f"espalier.mechanisms.pattern_attention.{module}" for name, module in _LAZY.items()}
)
