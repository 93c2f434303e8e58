"""The order of machines in a ring: beside all orders there are, on small cases."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Pair, machine_order
from espalier.plan import explain
from espalier.plan.collective_time import seats

SLOW, FAST, FASTEST = 1e7, 1e8, 1e10


def sites(names: str) -> list[list[float]]:
    """Links of machines whose site, and rack in it, are given by letters: `Ab` is rack b of site A."""
    places = names.split()

    def link(a: str, b: str) -> float:
        return FASTEST if a == b else FAST if a[0] == b[0] else SLOW

    return [[link(a, b) for b in places] for a in places]


def apart(table: list[list[float]], found: Any, least: float) -> int:
    """How often a ring goes from one set of machines to another, where links of `least` or more hold sets together."""
    group = list(range(len(table)))
    for a, b in itertools.combinations(range(len(table)), 2):
        if table[a][b] >= least:
            group = [group[a] if one == group[b] else one for one in group]
    ring = [group[machine] for machine in found]
    return sum(one != other for one, other in zip(ring, ring[1:] + ring[:1], strict=True))


@given(st.lists(st.sampled_from(["Aa", "Ab", "Ba", "Bb", "Ca"]), min_size=1, max_size=7))
def test_no_order_crosses_any_level_less(names: list[str]) -> None:
    table = sites(" ".join(names))
    found = machine_order.ring(table)
    assert sorted(found) == list(range(len(names)))
    assert found[0] == 0
    every = [(0, *rest) for rest in itertools.permutations(range(1, len(names)))]
    for least in (FAST, FASTEST):
        assert apart(table, found, least) == min(apart(table, one, least) for one in every)
    slow = any(SLOW in row for row in table)
    if slow:
        assert machine_order.crossings(table, found) == min(machine_order.crossings(table, one) for one in every)


@given(st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_links_at_all_are_ordered_so(machines: int, chance: random.Random) -> None:
    table = [[0.0] * machines for _ in range(machines)]
    for a, b in itertools.combinations(range(machines), 2):
        table[a][b] = table[b][a] = 10.0 ** chance.randint(6, 9)
    found = machine_order.ring(table)
    every = list(itertools.permutations(range(machines)))
    for least in (1e7, 1e8, 1e9):
        assert apart(table, found, least) == min(apart(table, one, least) for one in every)


def test_links_that_differ_by_chance_change_nothing() -> None:
    chance = random.Random(3)
    table = [[FAST * chance.uniform(0.85, 1.2) for _ in range(6)] for _ in range(6)]
    assert machine_order.ring(table) == tuple(range(6))
    assert machine_order.crossings(table, range(6)) == 0


def test_sites_in_turn_are_put_together() -> None:
    table = sites("Aa Bb Aa Bb Aa Bb")
    assert machine_order.ring(table) == (0, 2, 4, 1, 3, 5)
    assert (machine_order.crossings(table, machine_order.ring(table)), machine_order.crossings(table, range(6))) == (
        2,
        6,
    )
    assert machine_order.ring([]) == ()
    assert machine_order.ring([[0.0]]) == (0,)


@pytest.fixture
def cluster() -> clusters.Cluster:
    """Four machines of two devices each, at two sites in turn, all their links measured."""
    found = clusters.loads('[[nodes]]\ncount = 4\ndevice = "A100-80GB"\ndevices = 2\n[links]\nbetween = "1Gbit/s"')
    table = sites("Aa Ba Aa Ba")
    pairs = [
        Pair(a, b, table[a // 2][b // 2], 1e-3) for a, b in itertools.combinations(range(8), 2) if a // 2 != b // 2
    ]
    return msgspec.structs.replace(found, pairs=tuple(pairs))


def test_ranks_sit_on_machines_in_the_order_of_the_ring(cluster: clusters.Cluster) -> None:
    assert cluster.ring == (0, 2, 1, 3)
    assert [place.node for place in seats(cluster, 8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert [place.rank for place in seats(cluster, 5)] == [0, 1, 4, 2, 3], "the first five devices, site by site"
    assert explain.seating(cluster) == [
        "Ranks follow machines 0, 2, 1, 3: a ring crosses the slowest links 2 times, in their order 4."
    ]


def test_without_measured_pairs_machines_keep_their_order(cluster: clusters.Cluster) -> None:
    plain = msgspec.structs.replace(cluster, pairs=())
    assert [place.node for place in seats(plain, 8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert explain.seating(plain) == []
