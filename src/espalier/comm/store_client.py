"""TCPStore client connections that do not wait for a name server.

c10d asks for the name of every peer that it connects to or accepts, only to be able to print it (`formatSockAddr` in
torch/csrc/distributed/c10d/socket.cpp), and by IPv6-mapped addresses, which no line of /etc/hosts matches. Where no
name server answers (no network, a closed cluster, a lost packet) that takes 5 s or more for each connection, longer
than some of our deadlines. So a process of ours (`own_process`) looks into its hosts file alone while it connects to an
address that needs no name server. A program that uses Espalier is left as it is: there, and with another C library than
glibc, torch asks as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

_SWITCH = Path("/etc/nsswitch.conf")
_DEFAULT = "files dns"  # glibc's own, where nsswitch.conf says nothing
_FORK_SECONDS = 3.0


def own_process() -> None:
    """Says that this process is Espalier's: its command line, a supervisor or a rank. Those forked from it are too."""
    if not _connecting.ours:
        _connecting.ours = True
        os.register_at_fork(
            before=_connecting.forks, after_in_parent=_connecting.forked, after_in_child=_connecting.born
        )


def connect(host: str, port: int, timeout: float, **options: Any) -> TCPStore:
    """A connection to the store at that address, or the store itself where `options` (TCPStore's) say so.

    `timeout`: seconds, for connecting and for what is asked of it later. Raises what torch raises.
    """
    from torch._C._distributed_c10d import TCPStore

    with _connecting.to(host):
        return TCPStore(host, port, timeout=timedelta(seconds=timeout), wait_for_workers=False, **options)


def clone(store: Store) -> Any:
    """Another connection to the same store, where it is one that has connections."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    with _connecting.to(getattr(inner, "host", "")):
        return store.clone() if hasattr(store, "clone") else store


def ask_nobody() -> None:
    """From now on this process finds hosts in its hosts file alone: for one that only serves a store, which asks for
    the name of each peer as it comes."""
    _look_up("files")


def serve() -> TCPStore:
    """A store on this machine, at a free port, by a thread of this process, which then must not fork: the thread looks
    up the names of those that come (of IPv4, so that the hosts file has them).
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        return connect("127.0.0.1", port, 300.0, is_master=True, master_listen_fd=listener.detach())


class _Connecting:
    """The connections that threads of this process are making, and whether it looks into its hosts file alone: the
    first one switches, the last one switches back. Has state: how many there are, how many of those switched, and
    whether the process is ours to switch.

    A fork waits for them: a look-up takes a lock of the C library's, which a new process would never see freed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._count = self._alone = 0
        self.ours = False

    @contextlib.contextmanager
    def to(self, host: str) -> Iterator[None]:
        """Inside, a connection is made, and hosts are looked up in that file alone, if `host` is found so."""
        if not self.ours:
            yield
            return
        self._add(1, alone=1)
        alone = 1
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            alone = 0
        self._add(0, alone=alone - 1)
        try:
            yield
        finally:
            self._add(-1, alone=-alone)

    def forks(self) -> None:
        """Before a fork: waits for connections, for so long as that is likely to help, and lets none begin."""
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._count, _FORK_SECONDS)

    def forked(self) -> None:
        """After it, where the threads are."""
        self._changed.release()

    def born(self) -> None:
        """After it, in the new process, which has none of them."""
        alone = self._alone
        self.__init__()  # type: ignore[misc]
        self.ours = True
        if alone:
            _look_up(_configured())

    def _add(self, count: int, alone: int) -> None:
        with self._changed:
            self._count += count
            before = self._alone
            self._alone = self._alone + alone
            if bool(before) != bool(self._alone):
                _look_up("files" if self._alone else _configured())
            self._changed.notify_all()


def _configured() -> str:
    """How this machine finds hosts, as its nsswitch.conf says it."""
    try:
        match = re.search(r"^\s*hosts:\s*([^#\n]*[^#\s])", _SWITCH.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return _DEFAULT
    return match[1] if match else _DEFAULT


def _look_up(how: str) -> None:
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", how.encode())


_connecting = _Connecting()
