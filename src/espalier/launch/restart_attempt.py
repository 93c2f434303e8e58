"""Restart attempt: ranks that another launcher restarted agree on a name for the attempt, in a store that outlives
them.

torchrun's agents share one store among all attempts, and each counts only the restarts that it made itself, so over
several machines TORCHELASTIC_RESTART_COUNT differs. Here every process brings a word of its own; an attempt is the set
of words that its first rank saw and every rank has confirmed. No torch.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from espalier.errors import PeerLost
from espalier.launch import base as launch
from espalier.launch.base import RankSpec

_POLL = 0.02  # seconds


def agree(store: Any, rank: int, world: int, seconds: float) -> str:
    """The name of this attempt, the same on all `world` ranks and new each time they are started.

    Args:
        store: a torch Store that all ranks reach.
        rank, world: this process, and how many there are.
        seconds: how long to wait for the others.

    Raises:
        PeerLost: some did not come.
    """
    word, deadline = secrets.token_hex(8), time.monotonic() + seconds
    store.set(_join(rank), word)
    while time.monotonic() < deadline:
        words = _seen(store, world) if rank == 0 else _told(store)
        if len(words) == world and words[rank] == word:
            name = hashlib.sha256("".join(words).encode()).hexdigest()[:12]
            store.set(f"espalier/{name}/{rank}", "")
            if rank == 0:
                store.set("espalier/attempt", json.dumps(words))
                if store.check([f"espalier/{name}/{one}" for one in range(world)]):
                    store.set(f"espalier/{name}/complete", "")
            if store.check([f"espalier/{name}/complete"]):
                return name
        time.sleep(_POLL)
    missing = [str(one) for one in range(world) if not store.check([_join(one)])]
    who = f"ranks {', '.join(missing)} never came" if missing else "they have not all been started again"
    raise PeerLost(f"Rank {rank} waited {seconds:.0f} s for the other ranks of its attempt.", why=who)


def named(place: RankSpec, seconds: float) -> RankSpec:
    """`place` with keys that are this attempt's own. Raises as `agree` does."""
    name = agree(launch.store(place, seconds), place.rank, place.world, seconds)
    return replace(place, attempt=0, job=f"-{name}")


def _join(rank: int) -> str:
    return f"espalier/join/{rank}"


def _seen(store: Any, world: int) -> Sequence[str]:
    """The words that ranks brought last, also of those that have died since: they will not confirm."""
    keys = [_join(one) for one in range(world)]
    return [store.get(key).decode() for key in keys] if store.check(keys) else []


def _told(store: Any) -> Sequence[str]:
    if not store.check(["espalier/attempt"]):
        return []
    words: list[str] = json.loads(store.get("espalier/attempt"))
    return words
