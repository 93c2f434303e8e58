"""How is a graph trained? Data, sampling, networks, and the workload that hands them to the one trainer."""

from espalier.graph.data.graph import Graph
from espalier.recipe.lazy_names import lazy_names

__all__ = ["Additions", "Graph", "Pattern", "attention", "pattern"]

# What loads torch: costs of graphs are planned without.
__getattr__ = lazy_names(
    __name__,
    {
        "espalier.mechanisms.pattern_attention.attention": "attention",
        "espalier.mechanisms.pattern_attention.pattern": "Additions Pattern pattern",
    },
)
