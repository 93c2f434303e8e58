"""A network between a worker and a node that loses frames, damages them, or is cut, by the seed's will."""

from __future__ import annotations

import random
import socket
import struct
import threading
from contextlib import suppress

from espalier.mechanisms.optimizer_node import wire
from espalier.mechanisms.optimizer_node.wire import HEADER, Address, FrameKind


class LossyProxy:
    """Passes connections on to `target`. Has state: whether the network is cut.

    Args:
        loss: the share of frames that vanish.
        damage: the share whose payload arrives with a bit flipped.
    """

    def __init__(self, target: Address, loss: float = 0.0, damage: float = 0.0, seed: int = 0) -> None:
        self.target, self.loss, self.damage = target, loss, damage
        self.lost = self.damaged = self.connections = 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self._draw = random.Random(seed)
        self._open: list[socket.socket] = []
        self._cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> Address:
        return self._door.getsockname()

    def cut(self) -> None:
        """From now on nothing passes; open connections go silent or are reset, by turns."""
        self._cut = True
        for place, one in enumerate(self._open):
            if place % 2:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """New connections pass; those of before stay dead."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._cut = False

    def close(self) -> None:
        self._door.close()
        self.mend()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                if self._cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self.target, 5.0)
                except OSError:
                    near.close()
                    continue
                self.connections += 1
                self._open += [near, far]
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(near, far, 1), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(far, near, 2), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, said: int) -> None:
        """The opening as it is (`said` messages of it), then frame by frame."""
        with suppress(OSError):
            source.settimeout(None)
            sink.sendall(_take(source, wire._CHALLENGE.size))
            length = _take(source, 4)
            sink.sendall(length + _take(source, struct.unpack("<I", length)[0]))
            while True:
                head = _take(source, HEADER)
                size = wire._HEADER.unpack(head[:-8])[6]
                payload = bytearray(_take(source, size))
                if self._cut:
                    continue
                if self._draw.random() < self.loss:
                    self.lost += 1
                    continue
                if size and head[0] != FrameKind.HEARTBEAT and self._draw.random() < self.damage:
                    payload[self._draw.randrange(size)] ^= 1 << self._draw.randrange(8)
                    self.damaged += 1
                sink.sendall(head + payload)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _take(source: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = source.recv(size - len(found))
        if not more:
            raise ConnectionResetError
        found += more
    return found
