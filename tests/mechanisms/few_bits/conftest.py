"""Small graphs, as the tests of graphs have them."""

from tests.graph.conftest import make_graph  # noqa: F401 (a fixture)
