"""Proxy for a rank on another host: its status comes from that host's supervisor, and `kill` does nothing here."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from espalier.errors import EspalierError
from espalier.launch.base import RankSpec
from espalier.launch.rank_process import Child
from espalier.launch.supervisor_protocol import End


@dataclass
class Distant(Child):
    """One rank on another host. Has state: how it ended, as told by the thread that hears of it."""

    told: End | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def hear(self, end: End) -> None:
        """It ended; whoever polls for it wakes. Called in the thread that hears of it."""
        with self.lock:
            if self.told is None and not self.closed:
                self.told = end
                os.eventfd_write(self.pidfd, 1)

    @property
    def failed(self) -> bool:
        """Whether it ended without having done its part."""
        return self.status is not None and self.told is not None and not self.told.well

    @property
    def returned(self) -> Any:
        """Nothing: what it returned stays on its host."""
        return None

    @property
    def error(self) -> EspalierError | None:
        """What it raised, if it could tell."""
        return self.told.rebuilt() if self.told is not None else None

    @property
    def raised(self) -> str:
        """The type's name where it raised what is not an EspalierError."""
        return self.told.raised if self.told is not None else ""

    def reap(self, block: bool = True) -> None:
        """Learns how it ended, if that was told."""
        if self.told is not None:
            self.status = self.told.status

    def kill(self) -> None:
        """Its own supervisor does that."""

    def close(self) -> None:
        """Gives back what it took here."""
        with self.lock:
            self.closed = True
            os.close(self.pidfd)
            os.close(self.pipe)


def expected(place: RankSpec) -> Distant:
    """The rank at `place`, of which nothing was heard yet."""
    reader, writer = os.pipe()
    os.close(writer)
    os.set_blocking(reader, False)
    return Distant(place, -1, os.eventfd(0), reader)
