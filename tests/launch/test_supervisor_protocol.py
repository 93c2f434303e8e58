"""What supervisors say reaches the others; who says nothing is known to be silent, and nobody waits for the store."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.launch.hosts import message_auth
from espalier.launch.hosts.supervisor_protocol import (
    Command,
    ControlLink,
    End,
    MeetingPoint,
    Report,
    aged,
    dated,
    opened,
)
from espalier.launch.resilience.hang_detector import Vital
from espalier.train.heartbeat import Sign

SECONDS = st.floats(0.001, 1e5)


@given(SECONDS, SECONDS, st.booleans())
def test_times_travel_as_ages_and_never_stays_never(now, there, ever) -> None:
    sign = Sign(now / 2, now / 3, "stepping", 0.1, 7, 3, now / 4 if ever else 0.0, 0.0, True, 0.01)
    back = dated(aged(sign, now), there + now)
    assert back.beat == pytest.approx(sign.beat + there)
    assert back.moved == pytest.approx(sign.moved + there)
    assert back.first == (pytest.approx(sign.first + there) if ever else 0.0)
    assert back.asked == 0.0
    kept = ("doing", "usual", "step", "resumed", "memory", "waited")
    assert [getattr(back, name) for name in kept] == [getattr(sign, name) for name in kept]


def test_a_report_is_the_same_on_the_other_side() -> None:
    sign = Sign(1.0, 2.0, "storing", 0.1, 7, 3, 0.0, 0.0)
    error = ("UserError", "what", "why", "do")
    report = Report(
        2, True, (sign,), (Vital(1.5, "D"),), (End(4, -9, False, error, "x"),), ((4, 7, "started"),), {4: "stack"}, True
    )
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_an_order_is_for_the_supervisors_that_were_there_when_it_was_given() -> None:
    order = Command(3, run=True, replaced=(1,), lives=(0, 1))
    assert order.to(1, 1) is order
    assert order.to(1, 2) == Command(3, lives=(0, 1)), "its ranks ended with the one before it"
    assert [order.supersedes(1, life) for life in (0, 1, 2)] == [True, False, False]
    anyone = Command(3, run=True)
    assert anyone.to(1, 4) is anyone
    assert not anyone.supersedes(1, 4)


def until(holds, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


def test_both_sides_hear_what_is_new_and_how_old_it_is(port: int) -> None:
    line = MeetingPoint(0, 2, "127.0.0.1", port, "topic", 0.2)
    heard: list[tuple[int, Report]] = []
    first = ControlLink(line, Report, lambda host, said: heard.append((host, said))).begin(Command())
    assert first.said(1) is None
    second = ControlLink(dataclasses.replace(line, host=1), Command).begin(Report(5))
    assert until(lambda: first.said(1) == Report(5) and second.said(0) == Command())
    first.tell(Command(6, run=True))
    assert until(lambda: second.said(0) == Command(6, run=True))
    time.sleep(0.5)
    assert first.age(1) < 0.4, "it lives although it says nothing new"
    assert heard == [(1, Report(5))]
    second.close()
    assert until(lambda: first.age(1) > 0.5)
    first.excuse()
    assert first.age(1) < 0.5
    first.close()


def test_what_strangers_write_is_neither_read_nor_obeyed(port: int, monkeypatch) -> None:
    """Bytes of any kind, a forged order, an order of another run, older orders of this one: none of them is parsed."""
    line = MeetingPoint(0, 2, "127.0.0.1", port, "topic", 0.2, token="of this run")
    key, stranger = "espalier/topic/supervisor/0", opened("127.0.0.1", line.port)
    first = ControlLink(line, Report).begin(Command(1))
    second = ControlLink(dataclasses.replace(line, host=1), Command).begin(Report())
    assert until(lambda: second.said(0) == Command(1))
    old = stranger.get(key)
    first.tell(Command(2))
    assert until(lambda: second.said(0) == Command(2))
    evil = ControlLink(dataclasses.replace(line, topic="aside", token="guessed"), Report).begin(Command(7, over=True))
    assert until(lambda: stranger.check(["espalier/aside/supervisor/0"]))
    forged = stranger.get("espalier/aside/supervisor/0")
    monkeypatch.setattr(second, "_decoder", None)  # whatever is parsed from now on ends the thread
    for data in (b"x" * 200, b"", msgspec.json.encode(Command(8)), forged, old, old[:40]):
        for _ in range(20):
            stranger.set(key, data)
            time.sleep(0.01)
        assert second.said(0) == Command(2)
    assert until(lambda: second.age(0) < 0.1), "it still hears the first one"
    for one in (first, second, evil):
        one.close()


def test_a_supervisor_that_is_started_anew_is_heard_and_the_words_of_the_one_before_are_not(port: int) -> None:
    line = MeetingPoint(0, 2, "127.0.0.1", port, "topic", 0.2, token="of this run")
    key, stranger = "espalier/topic/supervisor/1", opened("127.0.0.1", line.port)
    first = ControlLink(line, Report).begin(Command())
    second = ControlLink(dataclasses.replace(line, host=1), Command).begin(Report(1))
    assert until(lambda: first.said(1) == Report(1))
    old = stranger.get(key)
    second.close()
    again = ControlLink(dataclasses.replace(line, host=1, life=1), Command).begin(Report(2, life=1))
    assert until(lambda: first.said(1) == Report(2, life=1))
    for _ in range(20):
        stranger.set(key, old)
        time.sleep(0.01)
    assert first.said(1) == Report(2, life=1)
    again.tell(Report(3, life=1))
    assert until(lambda: first.said(1) == Report(3, life=1)), "words of the one before do not shut it out"
    first.close()
    again.close()


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(MeetingPoint(0, 2, "127.0.0.1", 1, "topic", token="secret"))


@given(st.binary(), st.text(max_size=9), st.text(max_size=9), st.binary(max_size=80))
def test_only_the_same_token_and_key_open_what_was_sealed(message, token, key, noise) -> None:
    data = message_auth.seal(token, key, message)
    assert message_auth.unseal(token, key, data) == message
    assert message_auth.unseal(token + "x", key, data) is None
    assert message_auth.unseal(token, key + "x", data) is None
    assert message_auth.unseal(token, key, data + b"x") is None
    assert message_auth.unseal(token, key, noise) is None


def test_a_store_that_is_gone_refuses_and_nobody_waits() -> None:
    alone = ControlLink(MeetingPoint(1, 2, "127.0.0.1", _closed_port(), "topic", 0.2), Command).begin(Report())
    assert until(lambda: alone.refused_since is not None)
    begun = time.monotonic()
    alone.tell(Report(1))
    assert alone.said(0) is None
    alone.close(0.1)
    assert time.monotonic() - begun < 20


def _closed_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
