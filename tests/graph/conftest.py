"""Small graphs for the tests of this folder."""

from __future__ import annotations

import numpy as np
import pytest

from espalier import recipe as config
from espalier.graph.data import sources
from espalier.graph.data.graph import DataSplit, Graph
from espalier.recipe import Data


def load(path, **options) -> Graph:
    """The graph at `path`, with settings of `[graph]`."""
    return sources.load(Data(path=str(path)), config.GraphOptions(**options))


def made(nodes: int = 60, edges: int = 240, seed: int = 0, **known) -> Graph:
    """A random undirected graph with three classes that the features tell."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, nodes)
    features = random.normal(size=(nodes, 5)) + 2 * np.eye(3, 5)[labels]
    order = random.permutation(nodes)
    thirds = np.sort(order[: nodes // 2]), np.sort(order[nodes // 2 : 3 * nodes // 4]), np.sort(order[3 * nodes // 4 :])
    known = {"labels": labels, "parts": DataSplit(*thirds), "undirected": True, **known}
    return Graph.from_edges(*random.integers(0, nodes, (2, edges)), features=features, **known)


@pytest.fixture
def make_graph():
    return made
