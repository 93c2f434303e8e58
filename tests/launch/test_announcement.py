"""What the first of several processes decides is heard by all, and nobody else's word is; restarted ranks agree on a
name."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from espalier.comm import store_client
from espalier.launch.hosts import supervisor_protocol
from espalier.launch.hosts.announcement import Announcement, agree
from espalier.recipe.errors import PeerLost, UserError
from espalier.train.rank_spec import RankSpec


def on(port: int, token: str = "") -> Announcement:
    return Announcement(supervisor_protocol.opened("127.0.0.1", port), "key", "Host a", token)


def test_what_the_first_decides_is_heard_once_and_its_mistake_is_told(port: int) -> None:
    said, begun = on(port), time.monotonic()
    with pytest.raises(PeerLost, match="Host a did not decide on a plan within "):
        said.hear(0.3)
    assert 0.3 <= time.monotonic() - begun < 60
    said.tell(b"!plan")
    said.refuse(UserError("too late"))
    assert on(port).hear(0.3) == b"!plan"


def test_a_refusal_is_heard_with_its_reason(port: int) -> None:
    on(port).refuse(UserError("data.path names no file."))
    with pytest.raises(PeerLost, match=r"Host a could not start: data.path names no file"):
        on(port).hear(0.3)


def test_a_strangers_word_is_not_heard_and_gives_way(port: int) -> None:
    on(port, "a stranger's").tell(b"nonsense")
    with pytest.raises(PeerLost):
        on(port, "the run's").hear(0.1)
    on(port, "the run's").tell(b"plan")
    assert on(port, "the run's").hear(0.3) == b"plan"


# --- the name of an attempt ------------------------------------------------------------------------------------------


@pytest.fixture
def store():
    return store_client.serve()


def start(store, ranks, world, seconds=20.0):
    """What each of `ranks` gets, started together."""
    own = [store_client.connect("127.0.0.1", store.port, 60.0) for _ in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        places = [RankSpec(rank=rank, world=world) for rank in ranks]
        return list(pool.map(lambda pair: agree(*pair, seconds), zip(own, places, strict=True)))


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
    with pytest.raises(PeerLost, match="Rank 1 did not come"):
        start(store, [0], 2, seconds=0.2)
