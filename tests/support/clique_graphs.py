"""A graph of cliques, and runs over it."""

from __future__ import annotations

import numpy as np

from espalier.graph.data.graph import DataSplit, Graph
from espalier.graph.workload import GraphWorkload
from espalier.recipe import defaults, recipe_file


def cliques(count=30, size=12) -> Graph:
    nodes = count * size
    pairs = np.array(np.triu_indices(size, 1))
    ends = np.concatenate([pairs + at * size for at in range(count)], 1)
    order = np.random.default_rng(0).permutation(nodes)
    parts = DataSplit(*np.array_split(np.arange(nodes), 3))
    labels = np.arange(nodes) % 3
    features = np.random.default_rng(1).normal(size=(nodes, 16))
    return Graph.from_edges(*order[ends], features=features, undirected=True, labels=labels, parts=parts)


def workload_of(graph, kind="gcn", quant=None, **options):
    table = {"model": {"kind": kind, "dropout": 0.0}, "data": {"path": "x"}, "graph": options}
    table |= {"quant": quant} if quant else {}
    return GraphWorkload(defaults.resolve(recipe_file.from_table(table))[0], graph)
