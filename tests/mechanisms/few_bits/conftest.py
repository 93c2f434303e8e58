"""Small graphs, as the tests of graphs have them."""

from tests.graph.conftest import make_graph as make_graph
