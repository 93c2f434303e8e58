"""A rank that is called begins its task anew where it is; one that is not ends as before."""

import os
import threading
import time

import pytest

from espalier.launch.ranks import rank_process
from espalier.recipe.errors import HostLost, PeerLost, RunFailed, UserError
from espalier.train import rejoin_signal
from espalier.train.rank_spec import RankSpec
from espalier.train.rejoin_signal import Call, Recall


@pytest.fixture
def line():
    """A place that listens, and where it is called."""
    heard, calls = os.pipe()
    one = Recall(heard)
    one.listen()
    yield RankSpec(rank=1, world=2, serves=True, listen_fd=3, recall=one), calls
    os.close(calls)
    time.sleep(0.05)  # the thread sees the end before its descriptor is another's
    os.close(heard)


def test_the_task_begins_anew_where_all_meet_next(line):
    place, calls = line
    seen = []

    def task(place):
        seen.append(place)
        if len(seen) < 3:
            rejoin_signal.tell(calls, Call(len(seen), "127.0.0.1", 4000 + len(seen)))
            raise PeerLost("another is gone")
        return "done"

    assert rank_process.staying(task, place) == "done"
    assert [(one.attempt, one.port, one.serves, one.rank) for one in seen] == [
        (0, 0, True, 1),
        (1, 4001, False, 1),
        (2, 4002, False, 1),
    ]


def test_a_call_releases_what_the_rank_waits_for(line):
    place, calls = line
    released = threading.Event()
    place.recall.released_by(lambda whole: released.set())
    rejoin_signal.tell(calls, Call(1, "127.0.0.1", 1))
    assert released.wait(5)
    assert place.recall.answer(0) == Call(1, "127.0.0.1", 1)
    assert place.recall.answer(0) is None


def test_who_answers_is_no_longer_released(line):
    """Else the connections of the next attempt would be cut with those of this one."""
    place, calls = line
    done = []
    place.recall.released_by(lambda whole: (time.sleep(0.2), done.append(whole)))
    rejoin_signal.tell(calls, Call(1, "127.0.0.1", 1))
    place.recall.answer(5)
    assert done == [True]


@pytest.mark.parametrize("error", [UserError("no"), HostLost("gone"), RunFailed("own"), ValueError("own"), OSError(5)])
def test_an_error_of_its_own_ends_the_rank_at_once(monkeypatch, line, error):
    monkeypatch.setattr(rejoin_signal.Recall.answer, "__defaults__", (60.0,))

    def task(place):
        raise error

    began = time.monotonic()
    with pytest.raises(type(error)):
        rank_process.staying(task, line[0])
    assert time.monotonic() - began < 30


def test_who_is_not_called_ends(monkeypatch, line):
    monkeypatch.setattr(rejoin_signal.Recall.answer, "__defaults__", (0.1,))
    place = line[0]

    def task(place):
        raise PeerLost("another is gone")

    with pytest.raises(PeerLost):
        rank_process.staying(task, place)
    with pytest.raises(PeerLost):
        rank_process.staying(task, RankSpec())  # nobody would call it


def test_a_rank_that_is_gone_is_not_missed():
    heard, calls = os.pipe()
    os.close(heard)
    rejoin_signal.tell(calls, Call(1, "127.0.0.1", 1))
    os.close(calls)


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (PeerLost("x"), True),
        (HostLost("x"), False),
        (ConnectionResetError(), True),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("out of range"), False),
    ],
)
def test_which_errors_say_only_that_others_are_gone(error, loss):
    assert rejoin_signal.is_loss(error) is loss
