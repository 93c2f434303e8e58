"""Pacing of links: as fast as the plan says, unless a link shows that it is faster."""

from __future__ import annotations

import socket
import struct
import time
from types import SimpleNamespace

import pytest

from espalier.plan.axes import flow_control
from espalier.plan.axes.flow_control import PROBE, SHARE, SO_MAX_PACING_RATE, Pacing

FREE = (1 << 64) - 1


def rate_of(connection: socket.socket) -> int:
    return int(struct.unpack("Q", connection.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0])


@pytest.mark.parametrize("faster", [False, True])
def test_a_link_is_paced_unless_a_frame_now_and_then_shows_that_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(flow_control, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.socket() as connection:
        paced, free = Pacing(1e8), 0
        for number in range(4 * PROBE):
            paced.sends(connection, number)
            probes = rate_of(connection) == FREE
            free += probes
            assert probes or rate_of(connection) == int(SHARE * 1e8)
            now[0] += 0.001 if probes and faster else 0.01
            paced.arrived(number, 1_000_000)
        assert free == (4 * PROBE - PROBE + 1 if faster else 4)
        assert bool(paced.rate) != faster


def test_nothing_is_paced_where_nothing_is_known_of_the_link() -> None:
    with socket.socket() as connection:
        Pacing(0.0).sends(connection, 0)
        assert rate_of(connection) == FREE


def test_a_paced_connection_sends_at_that_rate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as one:
        other, _ = door.accept()
        with other:
            Pacing(4e6).sends(one, 0)
            data, left = bytes(1 << 16), 1 << 20
            begun = time.monotonic()
            while left:
                one.sendall(data)
                got = 0
                while got < len(data):
                    got += len(other.recv(1 << 16))
                left -= len(data)
            assert time.monotonic() - begun > 0.5 * (1 << 20) / (SHARE * 4e6)
