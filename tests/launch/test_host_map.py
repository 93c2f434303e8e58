"""Ranks, their hosts, and keys that no other part of the run has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.hosts.host_map import HostMap
from espalier.launch.hosts.supervisor_protocol import MeetingPoint


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 3))
def test_every_rank_has_one_place_and_numbers_on_a_host_follow_one_another(hosts, own) -> None:
    team = HostMap(MeetingPoint(own, 4, "address", 7, "topic"), ("a", "b", "c", "d"), tuple(hosts))
    places = [team.place(rank, threads=2) for rank in range(len(hosts))]
    assert {(place.world, place.host, place.port, place.serves) for place in places} == {
        (len(hosts), "address", 7, False)
    }
    for host in set(hosts):
        found = [place.local_rank for place, its in zip(places, hosts, strict=True) if its == host]
        assert found == list(range(len(found)))
    assert [hosts[rank] for rank in team.own] == [own] * hosts.count(own)
