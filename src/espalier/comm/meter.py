"""What a rank has sent since the last look: the fields of a step's event that tell of communication."""

from __future__ import annotations

from typing import Any

from espalier.comm.base import Spent
from espalier.comm.channel import Channel


class Meter:
    """Reads the ledger of a Channel. Has state: what was there at the last look."""

    def __init__(self, channel: Any) -> None:
        self._ledger = channel.ledger if isinstance(channel, Channel) else None
        self._bytes: dict[str, float] = {}
        self._encoded: dict[str, Spent] = {}

    def read(self) -> dict[str, dict[str, float]]:
        """By traffic class: `bytes` sent, and where a codec is at work bytes `saved`, seconds of `coding`, and the
        share `lost` (of the 2-norm, kept for the next step)."""
        if self._ledger is None:
            return {"bytes": {}}
        totals = self._ledger.by_class()
        fresh = {kind: count - self._bytes.get(kind, 0.0) for kind, count in totals.items()}
        self._bytes = totals
        found = {"bytes": {kind: count for kind, count in fresh.items() if count}}
        encoded = dict(self._ledger.encoded)
        spent = {kind: one.plus(self._encoded.get(kind, Spent()), -1) for kind, one in encoded.items()}
        self._encoded = encoded
        if spent:
            found["saved"] = {kind: one.raw - one.sent for kind, one in spent.items()}
            found["coding"] = {kind: one.seconds for kind, one in spent.items()}
            found["lost"] = {kind: (one.lost / one.given) ** 0.5 for kind, one in spent.items() if one.given}
        return found
