"""Announcement: one process decides, and all others hear of it over the store. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from espalier.errors import EspalierError, PeerLost
from espalier.launch.message_auth import seal, unseal

_POLL = 0.02  # seconds
_DECIDED, _REFUSED = b"+", b"!"


@dataclass(frozen=True)
class Announcement:
    """What the first of several processes decides, under one key of a store.

    Attributes:
        store: a torch Store that all of them reach.
        key: where it stands; each attempt has its own.
        first: who decides, for messages: `Rank 0`.
        token: the run's, where strangers may reach the store (`message_auth`).
    """

    store: Any
    key: str
    first: str
    token: str = ""

    def tell(self, decided: bytes) -> None:
        """Says what was decided. What was said before stays."""
        self._say(_DECIDED + decided)

    def refuse(self, error: EspalierError) -> None:
        """Says that nothing is decided, and why. What was said before stays."""
        self._say(_REFUSED + error.what.encode())

    def hear(self, seconds: float) -> bytes:
        """What was decided, waiting for it at most so long. Raises PeerLost where nothing was, or is by then."""
        deadline = time.monotonic() + seconds
        while (said := self._read()) is None:
            if time.monotonic() > deadline:
                raise PeerLost(f"{self.first} did not decide on a plan within {seconds:.0f} s.")
            time.sleep(_POLL)
        if said.startswith(_REFUSED):
            raise PeerLost(f"{self.first} could not start: {said[1:].decode()}")
        return said[1:]

    def _say(self, message: bytes) -> None:
        if self._read() is None:
            self.store.set(self.key, seal(self.token, self.key, message))

    def _read(self) -> bytes | None:
        """The message; None where nobody who knows the token has written one."""
        return unseal(self.token, self.key, self.store.get(self.key)) if self.store.check([self.key]) else None
