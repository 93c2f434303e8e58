"""Leaving a group whose members wait for one another: this rank's connections are cut, so that no wait of theirs lasts.

Gloo tells a rank that a peer is gone when a connection to it closes. Of a ring, only the neighbours of a dead rank
learn that; the others wait for these, and taking the group apart waits for what is under way. A rank that gives up
therefore cuts all its connections first, as its death would (RFC 9293, section 3.6: both directions are closed).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The TCP connections of this rank's groups: those made since, to the hosts that it met. Has state. Elsewhere than
    on Linux there are none.

    Args:
        port: of the store where ranks meet, whose connections stay.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._before = set(_connected())
        self._hosts: set[str] = set()

    def met(self) -> None:
        """The ranks have met: connections to other hosts than theirs (of a tracker, say) do not count."""
        self._hosts = {host for one, (host, _) in _connected().items() if one not in self._before}

    def cut(self, whole: bool = True) -> None:
        """Ends them, also under whoever waits for them now; if not the `whole`, those that were made `apart` stay."""
        spared = self._before if whole else self._before | _APART
        for (descriptor, inode), (host, ports) in _connected().items():
            if (descriptor, inode) in spared or host not in self._hosts or self._port in ports:
                continue
            with contextlib.suppress(OSError):  # closed meanwhile, by the group itself
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as one:
                        one.shutdown(socket.SHUT_RDWR)


_APART: set[tuple[int, int]] = set()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """What is connected inside belongs to a group whose members know how to go on without one of them."""
    before = set(_connected())
    yield
    _APART.update(set(_connected()) - before)


def _connected() -> dict[tuple[int, int], tuple[str, tuple[int, int]]]:
    """Descriptor and inode of each connected TCP socket of this process; the host at its other end, and both ports."""
    found = {}
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.exists() else ():
        with contextlib.suppress(OSError):  # closed since it was listed, or not connected
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        host, port = one.getpeername()[:2]
                        found[int(name), status.st_ino] = host, (port, one.getsockname()[1])
    return found
