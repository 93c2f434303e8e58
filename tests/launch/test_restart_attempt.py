import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from espalier import store_client
from espalier.errors import PeerLost
from espalier.launch.restart_attempt import agree


@pytest.fixture
def store():
    return store_client.serve()


def start(store, ranks, world, seconds=20.0):
    """What each of `ranks` gets, started together."""
    own = [store_client.connect("127.0.0.1", store.port, 60.0) for _ in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda pair: agree(pair[1], pair[0], world, seconds), zip(ranks, own, strict=True)))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_ranks_get_one_name_and_another_each_time(store, world):
    names = [set(start(store, range(world), world)) for _ in range(3)]
    assert [len(one) for one in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_words_of_a_dead_attempt_do_not_count(store):
    with pytest.raises(PeerLost, match="waited"):
        start(store, [0, 1], 3, seconds=0.5)  # rank 2 died before it came
    assert len(set(start(store, [0, 1, 2], 3))) == 1


def test_ranks_that_come_late_are_waited_for(store):
    before = start(store, [0, 1, 2], 3)
    late: list[str] = []
    other = threading.Timer(0.5, lambda: late.extend(start(store, [1], 3)))
    other.start()
    names = start(store, [0, 2], 3)
    other.join()
    assert {*names, *late} == {names[0]}
    assert names[0] not in before


def test_who_never_came_is_named(store):
    with pytest.raises(PeerLost, match="ranks 1 never came"):
        start(store, [0], 2, seconds=0.2)
