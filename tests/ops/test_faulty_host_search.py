import math
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from espalier.comm import store_client
from espalier.ops import faulty_host_search
from espalier.ops.faulty_host_search import Located, follow, gathers, lead, locate
from many_ranks.forks import outcomes
from store_process import served


@given(st.integers(2, 64), st.data())
def test_any_set_of_faults_with_one_good_node_is_found_exactly(count, data):
    nodes = data.draw(st.permutations(range(count)))
    faulty = data.draw(st.sets(st.sampled_from(nodes), max_size=count - 1))
    asked = []

    def test(worlds):
        asked.append(worlds)
        assert len({node for world in worlds for node in world}) == sum(map(len, worlds)), "a node is in one world"
        return [not faulty & set(world) for world in worlds]

    found = locate(nodes, test)
    assert set(found.faulty) == faulty
    assert found.links == ()
    first = {node for world in asked[0] if faulty & set(world) for node in world}
    good = (count - len(first)) or (count - len(faulty))
    suspects = len(first) if len(first) < count else len(faulty)
    assert found.waves == len(asked) <= 2 + math.ceil(suspects / good)
    assert all(len(world) <= 3 for worlds in asked for world in worlds)


def test_a_link_between_two_good_nodes_is_no_nodes_fault():
    cut = {2, 3}
    found = locate(range(6), lambda worlds: [set(world) != cut for world in worlds])
    assert (found.faulty, found.links) == ((), ((2, 3),))


def test_without_any_good_node_all_are_named():
    assert locate(range(5), lambda worlds: [False] * len(worlds)).faulty == (0, 1, 2, 3, 4)


SECONDS = 4.0


def corrupting(gathers, plain, *given):
    """What is sent, the first pattern that is asked for, is not what must have been sent."""
    sent = []

    def corrupt(one):
        sent.append(one)
        return plain(one) + (len(sent) == 1)

    faulty_host_search.pattern = corrupt
    return gathers(*given)


def part(channel, port, how):
    """Rank 0 leads on a store of its own; of nodes 1 to 6 (ranks 1 to 6) some misbehave."""
    rank = channel.rank()
    store = store_client.connect("127.0.0.1", port, 60.0)
    if rank == 0:
        return lead(store, range(1, channel.size()), 20.0 if "late" in how.values() else SECONDS + 1.0)
    if how.get(rank) == "sleeps":
        faulty_host_search.gathers = lambda *_: time.sleep(60)
    elif how.get(rank) == "refuses":
        return None
    elif how.get(rank) == "late":
        time.sleep(SECONDS + 1.0)
    elif how.get(rank) == "corrupts":
        faulty_host_search.gathers = partial(corrupting, gathers, faulty_host_search.pattern)
    follow(store, rank, SECONDS, patience=20.0)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param({}, marks=pytest.mark.slow), {2: "corrupts", 5: "refuses"}])
def test_real_groups_find_who_corrupts_and_who_refuses(how):
    with served() as port:
        found = outcomes(7, part, port, how, timeout=60.0)[0]
    assert found.faulty == tuple(sorted(how)), found


@pytest.mark.soak
def test_real_groups_find_who_sleeps():
    with served() as port:
        found = outcomes(5, part, port, {3: "sleeps"}, timeout=100.0)[0]
    assert found.faulty == (3,), found


@pytest.mark.slow
def test_who_is_slow_to_start_is_waited_for_and_spoils_no_others_test():
    with served() as port:
        found = outcomes(3, part, port, {2: "late"}, timeout=60.0)[0]
    assert (found.faulty, found.waves) == ((), 1), found


def test_who_was_held_up_in_one_wave_takes_part_in_the_next(monkeypatch):
    monkeypatch.setattr(faulty_host_search, "gathers", lambda store, key, *_: key != "wave1/of1" or time.sleep(30))
    store = store_client.serve()
    client = store_client.connect("127.0.0.1", store.port, 60.0)
    thread = threading.Thread(target=follow, args=(client, 1, 0.2), daemon=True)
    thread.start()
    store.set("wave1", "[[1]]")
    store.wait(["wave1/1"], timedelta(seconds=20.0))
    assert store.get("wave1/1") == b"failed"
    store.set("wave3", "[[1]]")  # before it hears of the second, which is over
    store.set("wave2", "[[1]]")
    store.wait(["wave3/1"], timedelta(seconds=20.0))
    assert store.get("wave3/1") == b"passed"
    assert not store.check(["wave2/1"])
    store.set("wave4", "[]")
    thread.join(20.0)
    assert not thread.is_alive()


def test_nobody_who_reports_is_a_fault_of_all():
    assert lead(HashStore(), (3, 1), 0.05) == Located((1, 3), (), 0)


def test_what_ranks_send_differs():
    assert not torch.equal(faulty_host_search.pattern(0), faulty_host_search.pattern(1))
    assert faulty_host_search.pattern(3).dtype == torch.float32
