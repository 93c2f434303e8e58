"""Store server: serves the rendezvous TCPStore from a process of its own. It outlives every rank, and the process that
forks ranks has none of its threads, whose locks a fork would copy and never release. The gate for other hosts
(`store_gate`) runs there too."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

from espalier.comm import store_client
from espalier.launch.hosts import store_gate
from espalier.launch.ranks.child_process import fork
from espalier.train.rank_spec import RankSpec

_NAME = b"espalier-store"
"""Of the process, as `ps -o comm` shows it."""


class _Beside:
    """A process that lives beside this one, listening on loopback, to the end of who asked for it at the latest. Has
    state: the process.

    Args:
        live: what it does, with a socket that listens.
    """

    def __init__(self, live: Callable[[socket.socket], None]) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            self.port = int(listener.getsockname()[1])
            self.pid = fork(lambda: live(listener), _NAME)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class Served(_Beside):
    """A store on loopback.

    Args:
        door: descriptor of a socket where other hosts come, which is taken; -1: none do.
        token: what they have to know (`store_gate`).
    """

    def __init__(self, door: int = -1, token: str = "") -> None:
        super().__init__(lambda listener: _serve(listener, door, token))
        if door >= 0:
            os.close(door)


class Relayed(_Beside):
    """The way on loopback to the store that another host serves behind its gate at that address."""

    def __init__(self, host: str, port: int, token: str) -> None:
        super().__init__(lambda listener: store_gate.forward(listener, (host, port), token))


def near(place: RankSpec, token: str) -> RankSpec:
    """`place` of a host among others, with its store on loopback: served from now on if this host is to, else relayed.

    `token`: the run's.
    """
    relayed = place.port and not place.serves
    port = (Relayed(place.host, place.port, token) if relayed else Served(place.listen_fd, token)).port
    return replace(place, host="127.0.0.1", port=port, serves=False, listen_fd=-1)


@contextlib.contextmanager
def served() -> Iterator[int]:
    """The port on this machine where a store is served inside."""
    served_store = Served()
    try:
        yield served_store.port
    finally:
        served_store.close()


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
