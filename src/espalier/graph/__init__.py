"""How is a graph trained? Data, sampling, networks, and the workload that hands them to the one trainer."""

from espalier.graph.data import Graph

__all__ = ["Graph"]
