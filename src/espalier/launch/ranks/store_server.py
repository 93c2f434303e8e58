"""Store server: serves the rendezvous TCPStore from a process of its own. It outlives every rank, and the process that
forks ranks has none of its threads, whose locks a fork would copy and never release. The gate for other hosts
(`store_gate`) runs there too."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from espalier.comm import store_client
from espalier.launch.hosts import store_gate
from espalier.launch.ranks.child_process import fork
from espalier.train.rank_spec import RankSpec

_NAME = b"espalier-store"
"""Of the process, as `ps -o comm` shows it."""


class ServerProcess(NamedTuple):
    """A process that lives beside this one, listening at `port` of loopback, to the end of who asked for it at the
    latest."""

    port: int
    pid: int


def serve(door: int = -1, token: str = "") -> ServerProcess:
    """A store on loopback.

    Args:
        door: descriptor of a socket where other hosts come, which is taken; -1: none do.
        token: what they have to know (`store_gate`).
    """
    process = _started(lambda listener: _serve(listener, door, token))
    if door >= 0:
        os.close(door)
    return process


def relay(host: str, port: int, token: str) -> ServerProcess:
    """The way on loopback to the store that another host serves behind its gate at that address."""
    return _started(lambda listener: store_gate.forward(listener, (host, port), token))


def _started(live: Callable[[socket.socket], None]) -> ServerProcess:
    """Of what `live` does with a socket that listens."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        return ServerProcess(int(listener.getsockname()[1]), fork(lambda: live(listener), _NAME))


def near(place: RankSpec, token: str) -> RankSpec:
    """`place` of a host among others, with its store on loopback: served from now on if this host is to, else relayed.

    `token`: the run's.
    """
    relayed = place.port and not place.serves
    port = (relay(place.host, place.port, token) if relayed else serve(place.listen_fd, token)).port
    return replace(place, host="127.0.0.1", port=port, serves=False, listen_fd=-1)


def _serve(listener: socket.socket, door: int, token: str) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection of another host takes three
    host, port = listener.getsockname()
    store = store_client.connect(host, port, 60.0, is_master=True, master_listen_fd=listener.detach())
    store_client.ask_nobody()
    if door >= 0:
        store_gate.guard(socket.socket(fileno=door), port, token)
    while store:
        signal.pause()
