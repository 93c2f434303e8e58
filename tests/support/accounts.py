"""Where the time of a run with given events went, read as from its log."""

from __future__ import annotations

import json
from collections.abc import Iterable

from espalier.track.events import Event
from espalier.track.goodput import Account, GoodputMeter
from espalier.track.log_reader import LogReader


def account(log: Iterable[Event]) -> Account:
    reader = LogReader([[json.dumps(event).encode() for event in log]])
    for _ in reader.spans():
        pass
    return GoodputMeter(reader.segments[::-1]).account()
