"""Connections to a torch TCPStore that wait for no name server.

c10d asks for the name of every peer that it connects to or accepts, only to be able to print it (`formatSockAddr` in
torch/csrc/distributed/c10d/socket.cpp), and by IPv6-mapped addresses, which no line of /etc/hosts matches. Where no
name server answers (no network, a closed cluster, a lost packet) that takes 5 s or more for each connection, longer
than some of our deadlines. So a process looks into its hosts file alone while it connects to an address that needs no
name server. With another C library than glibc it asks as ever.
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


def connect(host: str, port: int, timeout: float, **options: Any) -> TCPStore:
    """A connection to the store at that address, or the store itself where `options` (TCPStore's) say so.

    `timeout`: seconds, for connecting and for what is asked of it later. Raises what torch raises.
    """
    from torch._C._distributed_c10d import TCPStore

    with _hosts_file.alone(host):
        return TCPStore(host, port, timeout=timedelta(seconds=timeout), wait_for_workers=False, **options)


def clone(store: Store) -> Any:
    """Another connection to the same store, where it is one that has connections."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    with _hosts_file.alone(getattr(inner, "host", "")):
        return store.clone() if hasattr(store, "clone") else store


def ask_nobody() -> None:
    """From now on this process finds hosts in its hosts file alone: for one that only serves a store, which asks for
    the name of each peer as it comes."""
    _look_up("files")


def serve() -> TCPStore:
    """A store on this machine, at a free port, by a thread of this process.

    Of IPv4, so that the hosts file has the names of those that come.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        return connect("127.0.0.1", port, 300.0, is_master=True, master_listen_fd=listener.detach())


class _HostsFile:
    """Whether this process looks into its hosts file alone. Has state: how many connections are being made, as
    threads may do so at the same time; the first one switches, the last one switches back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connecting = 0

    @contextlib.contextmanager
    def alone(self, host: str) -> Iterator[None]:
        """Inside, hosts are looked up there alone, if `host` is found so."""
        self._count(1)
        found = _is_found(host)
        if not found:
            self._count(-1)
        try:
            yield
        finally:
            if found:
                self._count(-1)

    def forked(self) -> None:
        """In a new process, which has none of the threads that were connecting."""
        connecting = self._connecting
        self.__init__()  # type: ignore[misc]  # a lock may have been held
        if connecting:
            _look_up(_configured())

    def _count(self, by: int) -> None:
        with self._lock:
            before, self._connecting = self._connecting, self._connecting + by
            if not before:
                _look_up("files")
            elif not self._connecting:
                _look_up(_configured())


def _is_found(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _configured() -> str:
    """How this machine finds hosts, as its nsswitch.conf says it."""
    try:
        found = re.search(r"^\s*hosts:\s*([^#\n]*[^#\s])", _SWITCH.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return _DEFAULT
    return found[1] if found else _DEFAULT


def _look_up(how: str) -> None:
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", how.encode())


_hosts_file = _HostsFile()
os.register_at_fork(after_in_child=_hosts_file.forked)
