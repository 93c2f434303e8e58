"""How is a graph trained? Data, sampling, networks, and the workload that hands them to the one trainer."""

from espalier.graph.data import Graph
from espalier.graph.torchgt.attention import attention
from espalier.graph.torchgt.pattern import Additions, Pattern, pattern

__all__ = ["Additions", "Graph", "Pattern", "attention", "pattern"]
