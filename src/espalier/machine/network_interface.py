"""Network interface selection: the first host listens on all its addresses, the other hosts try them in turn.

A name such as `b` may mean one thing to ssh and another to the host itself (an alias, 127.0.1.1 in /etc/hosts), and
several hosts may have the same address of a private bridge; so an address counts once the first host has answered on
it with a word that only it knows. IPv4 only. No torch.
"""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from espalier.recipe.errors import UserError

TRY_SECONDS = 3.0
"""How long one address may take to answer."""
_BUSY = (errno.EADDRINUSE, errno.EACCES)


@dataclass(frozen=True)
class Address:
    """An IPv4 address of this host, its interface and the length of its network's prefix."""

    interface: str
    address: str
    prefix: int = 32

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The network it is in."""
        return ipaddress.IPv4Network(f"{self.address}/{self.prefix}", strict=False)


def addresses() -> list[Address]:
    """Those of this host's interfaces that are up, loopback last."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    listed = [
        Address(name, entry.address, ipaddress.IPv4Network(f"0.0.0.0/{entry.netmask or '255.255.255.255'}").prefixlen)
        for name, several in psutil.net_if_addrs().items()
        for entry in several
        if entry.family == socket.AF_INET and name in up
    ]
    return sorted(listed, key=lambda address: address.address.startswith("127."))


def chosen(interface: str | None, addresses_here: Sequence[Address], host: str) -> list[Address]:
    """The addresses among `addresses_here` that `launch.interface` allows: an interface's, one, or those in a network.

    Raises UserError naming `host` and what it has when there is none.
    """
    if interface is None:
        return list(addresses_here)
    matching = [address for address in addresses_here if address.interface == interface]
    if not matching:
        try:
            network = ipaddress.IPv4Network(interface, strict=False)
        except ValueError:
            network = None
        matching = [
            address
            for address in addresses_here
            if network is not None and ipaddress.IPv4Address(address.address) in network
        ]
    if not matching:
        known = [f"{address.interface} ({address.address})" for address in addresses_here]
        raise UserError(
            f"launch.interface = {interface!r} is not an interface or network of host {host}.",
            why=f"it has {', '.join(known) or 'no network'}",
            do='an interface, or where their names differ a network: launch.interface = "192.168.1.0/24"',
        )
    return matching


@dataclass
class MeetingSocket:
    """The socket at which the first host waits for the others. Has state: the socket, until the store takes it."""

    socket: socket.socket
    word: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.socket.getsockname()[1])

    def answer(self, done: Callable[[], bool]) -> None:
        """Says its word to everyone who comes, until `done`; then nobody is left in the queue."""
        self.socket.settimeout(0.05)
        finished = False
        while True:
            try:
                visitor, _ = self.socket.accept()
            except TimeoutError:
                if finished:
                    break
                finished = done()
                continue
            with visitor:
                try:
                    visitor.sendall(self.word.encode())
                except OSError:
                    continue  # it went away
        self.socket.settimeout(None)


def meeting(interface: str | None, port: int, host: str) -> tuple[MeetingSocket, list[Address]]:
    """Listens at `port` (0: any) on every address, or on that of `interface` alone; and the addresses to try.

    Raises UserError when the port is taken, or `host` has no such interface.
    """
    bound = chosen(interface, addresses(), host)
    try:
        listener = socket.create_server((bound[0].address if interface is not None else "", port), backlog=1024)
    except OSError as error:
        if error.errno not in _BUSY:
            raise
        why = "another program listens there" if error.errno == errno.EADDRINUSE else "ports below 1024 are root's"
        raise UserError(
            f"launch.port = {port} cannot be used on host {host}.", why=why, do="another port, or 0 for any free one"
        ) from None
    return MeetingSocket(listener), bound[:1] if interface is not None else bound


def reach(targets: Sequence[str], port: int, word: str, source: Address | None) -> tuple[str, str] | None:
    """The first of the `targets` at which the first host answers, and the own address on the way there.

    `word`: what it answers; empty: it is enough that somebody is there. `source`: the address to set out
    from (None: as the route says). None when no target answers.
    """
    for target in targets:
        answer = _tried(target, port, word, source)
        if answer is not None:
            return target, answer
    return None


def _tried(target: str, port: int, word: str, source_address: Address | None) -> str | None:
    source = (source_address.address, 0) if source_address is not None else None
    deadline = time.monotonic() + TRY_SECONDS
    heard = b""
    try:
        with socket.create_connection((target, port), timeout=TRY_SECONDS, source_address=source) as line:
            while len(heard) < len(word) and time.monotonic() < deadline:
                part = line.recv(len(word) - len(heard))
                if not part:
                    break
                heard += part
            return str(line.getsockname()[0]) if heard == word.encode() else None
    except OSError:
        return None


def interface_of(address: str, addresses_here: Sequence[Address]) -> str:
    """The interface that has `address`."""
    return next((candidate.interface for candidate in addresses_here if candidate.address == address), "lo")


def in_order(first: Sequence[Address], names: Sequence[str], local: Sequence[Address]) -> list[str]:
    """The first host's addresses in the order in which a host that has `local` is to try them: what its name means to
    the user, then those in a network of its own, then the rest, loopback last."""

    def distance(address: Address) -> tuple[bool, bool, bool]:
        loopback = address.address.startswith("127.")
        near = any(ipaddress.IPv4Address(address.address) in mine.network for mine in local)
        return loopback, address.address not in names, not near

    return [address.address for address in sorted(first, key=distance)]
