"""Session with an optimizer node or aggregator: how its two links begin, one for pushes and one for
all else.

The node knows a session by a random name. A link that was cut goes on in its session; a node that
has started again does not know the session, and what it had not committed is lost.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from espalier.mechanisms.optimizer_node import wire
from espalier.mechanisms.optimizer_node.reduction import summary
from espalier.mechanisms.optimizer_node.wire import Address, Frame, FrameKind, FrameLink, Greeting, Peer, Times
from espalier.parallel.layer_client import step_lost
from espalier.plan.axes.node_layout import NodeJob
from espalier.recipe.errors import EspalierError, RunFailed


class Session(Peer):
    """A node, as one of its members sees it. Has state; safe among threads.

    Args:
        name: of this side, in messages.
        times: seconds of the protocol.
        node: its address, and the token of the run.
        job: what this side pushes.
        greeting: rank, workers, and the cluster and step that all nodes agree on (`resume`).

    Attributes:
        first: the first round of this member, and `joins` the step of it.
    """

    def __init__(
        self,
        name: str,
        times: Times,
        node: tuple[Address, str],
        job: NodeJob,
        greeting: Greeting,
    ) -> None:
        super().__init__()
        self.name = name
        self.times = times
        self.address, self._token = node
        self.peer = f"the optimizer node at {self.address[0]}:{self.address[1]}"
        self.first = self.joins = 0
        link = {"ask": "link", "session": secrets.token_hex(16), "job": summary(job)}
        self._greeting = greeting | link
        self._leaving = False

    def start(self) -> None:
        """Connects. Raises OSError where nobody answers, UserError where it is refused."""
        for stream in ("control", "push"):
            connection, reply = self._greet(stream, 0, new=stream == "control")
            self.first = reply["first"]
            self.joins = reply["joins"]
            names = (self.name, self.peer)
            expected = reply["expected"]
            link = FrameLink(names, self, self.times, partial(self._again, stream), first=(expected, 0))
            self.links[stream] = link
            link.attach(connection, expected)
            link.start()

    def _greet(self, stream: str, expected: int, new: bool = False) -> tuple[socket.socket, Greeting]:
        greeting = self._greeting | {"stream": stream, "expected": expected, "new": new}
        connection, reply = wire.dial(self.address, self._token, greeting, self.times.silence)
        if not reply["known"]:
            connection.close()
            raise step_lost(reply["step"])
        return connection, reply

    def _again(self, stream: str, link: FrameLink) -> tuple[socket.socket, int]:
        if self._leaving:
            raise RunFailed(f"{self.name} has left {self.peer}.")
        connection, reply = self._greet(stream, link.receiving.expected)
        return connection, reply["expected"]

    def ask(self, frame: Frame) -> None:
        """Sends a request."""
        self.links["control"].post(frame)

    def leave(self) -> None:
        """Ends it after all that was pushed has arrived."""
        self.links["push"].drained()
        self._leaving = True
        with suppress(EspalierError):  # the node hangs up when it has read that
            self.links["control"].post(Frame(FrameKind.LEAVE))
            self.links["control"].drained()
        self.close()


def reach(
    addresses: Sequence[Address],
    token: str,
    name: str,
    times: Times,
    peer: tuple[str, Greeting] = ("the optimizer node", {}),
) -> tuple[Address, dict[str, Any]]:
    """The first of the addresses where a node answers, and its status; they are asked again until
    one does. `peer`: what it is in messages, and what it is told."""
    until = time.monotonic() + times.patience
    what, greeting = peer
    while True:
        times.unheard()
        for address in addresses:
            try:
                asked = {"ask": "status"} | greeting
                connection, reply = wire.dial(address, token, asked, times.silence)
            except OSError:
                continue
            connection.close()
            return address, reply
        if time.monotonic() > until:
            shown = " or ".join(f"{host}:{port}" for host, port in addresses)
            raise wire.unreachable(name, f"{what} at {shown}", times.patience)
        time.sleep(min(times.heartbeat * 4, 1.0))
