"""What the first of several processes decides is heard by all, and nobody else's word is."""

import time

import pytest

from espalier.errors import PeerLost, UserError
from espalier.launch import supervisor_protocol
from espalier.launch.announcement import Announcement


def on(port: int, token: str = "") -> Announcement:
    return Announcement(supervisor_protocol.opened("127.0.0.1", port), "key", "Host a", token)


def test_what_the_first_decides_is_heard_once_and_its_mistake_is_told(port: int) -> None:
    said, begun = on(port), time.monotonic()
    with pytest.raises(PeerLost, match="Host a did not decide on a plan within 0 s"):
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
