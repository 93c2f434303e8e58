"""Abort: closes this rank's Gloo connections, so that peers blocked in a collective fail at once.

Gloo tells a rank that a peer is gone when a connection to it closes. Of a ring, only the neighbours of a dead rank
learn that; the others wait for these, and taking the group apart waits for what is under way. A rank that gives up
therefore cuts all its connections first, as its death would (RFC 9293, section 3.6: both directions are closed).

Which descriptors those are is told by the store: each rank of each Gloo group writes there the address at which it
listens (`rank 3 of the group: <sockaddr>`), and every connection of a group has such an address at one of its ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from espalier.comm import store_client

_DESCRIPTORS = Path("/proc/self/fd")
_ADDRESS = re.compile(r"(.*/)?\d+/\d+")  # of Gloo: a context's number and a rank
_APART = "apart"


def apart(store: Store) -> PrefixStore:
    """The key space, in `store`, of a group whose members know how to go on without one of them."""
    return PrefixStore(_APART, store)


class Connections:
    """The connections of the Gloo groups that were made in one key space, now and later. Has state: a connection to the
    store, and the addresses last read. Elsewhere than on Linux there are none.

    Args:
        store: of the ranks; all groups of theirs have their keys in it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store_client.clone(store)
        self._addresses: dict[str, bytes] = {}
        self._keys = -1

    def cut(self, whole: bool = True) -> None:
        """Ends them, also under whoever waits for them now; if not the `whole`, those of groups `apart` stay."""
        self.look()
        known = b"\0".join(blob for key, blob in self._addresses.items() if whole or _APART not in key.split("/"))
        for (descriptor, inode), ends in _connected().items():
            if any(end in known for end in ends):
                with contextlib.suppress(OSError):  # closed meanwhile, by the group itself
                    if os.fstat(descriptor).st_ino == inode:
                        with socket.socket(fileno=os.dup(descriptor)) as connection:
                            connection.shutdown(socket.SHUT_RDWR)

    def look(self) -> None:
        """Reads the addresses of the groups that there are. To be called again when others were made: the store goes
        with the rank that serves it, and then what was read before has to do.

        A `PrefixStore` also lists the keys of longer prefixes (`attempt1` those of `attempt10`), which it cannot read.
        """
        with contextlib.suppress(RuntimeError):
            if (keys := self._store.num_keys()) == self._keys:
                return
            for key in self._store.list_keys():
                if _ADDRESS.fullmatch(key) and key not in self._addresses and self._store.check([key]):
                    self._addresses[key] = self._store.get(key)
            self._keys = keys


def _connected() -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Descriptor and inode of each connected TCP socket of this process; its own end and the other as a sockaddr."""
    connections = {}
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.exists() else ():
        with contextlib.suppress(OSError):  # closed since it was listed, or not connected
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        ends = (
                            _sockaddr(connection.family, *address[:2])
                            for address in (connection.getsockname(), connection.getpeername())
                        )
                        connections[int(name), status.st_ino] = (next(ends), next(ends))
    return connections


def _sockaddr(family: int, host: str, port: int) -> bytes:
    """The address as it stands in memory, as far as it says where: family, port, (flow,) address."""
    middle = struct.pack("!I", 0) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + middle + socket.inet_pton(family, host)
