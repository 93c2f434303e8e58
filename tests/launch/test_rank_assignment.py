"""Started processes become the ranks of a plan: those of a machine follow one another, in the plan's order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.ranks.rank_assignment import numbered


@pytest.mark.parametrize(
    ("hosts", "nodes", "expected"),
    [
        ("aabb", [0, 0, 1, 1], [0, 1, 2, 3]),
        ("abab", [0, 0, 1, 1], [0, 2, 1, 3]),  # dealt out in turn, as by mpiexec -ppn 1
        ("abcd", [0, 2, 1, 3], [0, 2, 1, 3]),  # the plan's ring
        ("abab", [0, 0, 0, 0], [0, 2, 1, 3]),  # the plan knows one machine
        ("aaaa", [0, 0, 1, 1], [0, 1, 2, 3]),
        ("abb", [0, 0, 1], [0, 1, 2]),  # other numbers of ranks than the plan's machines have
        ("ab", [1, 0], [0, 1]),  # process 0 keeps the log
        ("a", [0], [0]),
    ],
)
def test_who_becomes_which_rank(hosts: str, nodes: list[int], expected: list[int]) -> None:
    assert numbered(hosts, nodes) == expected


@given(st.data())
def test_everybody_becomes_one_rank_and_hosts_stay_together(data: Any) -> None:
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=len(hosts), max_size=len(hosts)))
    found = numbered(hosts, nodes)
    assert sorted(found) == list(range(len(hosts)))
    assert found[0] == 0
