"""Announcement: one process decides, and all others hear of it over the store. Ranks that another launcher restarted
agree on the name of their attempt (`agree`). No torch.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.comm import rendezvous_wait
from espalier.comm.rendezvous_wait import Deadline
from espalier.launch.hosts.message_auth import seal, unseal
from espalier.recipe.errors import EspalierError, PeerLost
from espalier.recipe.units import show_seconds
from espalier.train import rank_spec as launch
from espalier.train.rank_spec import RankSpec

_DECIDED, _REFUSED = b"+", b"!"
_ATTEMPT = "espalier/attempt"
"""Where the first rank says whose words it has seen."""


@dataclass(frozen=True)
class Announcement:
    """What the first of several processes decides, under one key of a store.

    Attributes:
        store: a torch Store that all of them reach.
        key: where it stands; each attempt has its own.
        first: who decides, for messages: `Rank 0`.
        token: the run's, where strangers may reach the store (`message_auth`).
        waiter: who hears of it, for messages.
    """

    store: Any
    key: str
    first: str
    token: str = ""
    waiter: str = "This process"

    def tell(self, decided: bytes) -> None:
        """Says what was decided. What was said before stays."""
        self._say(_DECIDED + decided)

    def refuse(self, error: EspalierError) -> None:
        """Says that nothing is decided, and why. What was said before stays."""
        self._say(_REFUSED + error.what.encode())

    def hear(self, seconds: float) -> bytes:
        """What was decided, waiting for it at most so long. Raises PeerLost where nothing was, or is by then."""
        content = Deadline(seconds, self.waiter).poll(
            self._read,
            lambda: f"the plan of {self.first[:1].lower()}{self.first[1:]}",
            lambda: PeerLost(
                f"{self.first} did not decide on a plan within {show_seconds(seconds)}.", do="look at its log"
            ),
        )
        if content.startswith(_REFUSED):
            raise PeerLost(f"{self.first} could not start: {content[1:].decode()}")
        return content[1:]

    def _say(self, message: bytes) -> None:
        if self._read() is None:
            self.store.set(self.key, seal(self.token, self.key, message))

    def _read(self) -> bytes | None:
        """The message; None where nobody who knows the token has written one."""
        return unseal(self.token, self.key, self.store.get(self.key)) if self.store.check([self.key]) else None


# --- the name of an attempt ------------------------------------------------------------------------------------------


def named(place: RankSpec, seconds: float) -> RankSpec:
    """`place` with keys that are this attempt's own. Raises as `agree` does."""
    name = agree(launch.store(place, seconds), place, seconds)
    return replace(place, attempt=0, job=f"-{name}")


def agree(store: Any, place: RankSpec, seconds: float) -> str:
    """The name of this attempt, the same on all ranks and new each time they are started.

    torchrun's agents share one store among all attempts, and each counts only the restarts that it made itself, so over
    several machines TORCHELASTIC_RESTART_COUNT differs. Here every rank brings a word of its own; an attempt is the set
    of words that the first rank saw and every rank has confirmed.

    Args:
        store: a torch Store that all ranks reach.
        place: this process.
        seconds: how long to wait for the others.

    Raises:
        PeerLost: some did not come.
    """
    word = secrets.token_hex(8)
    rank = place.rank
    world = place.world
    store.set(_join(rank), word)
    keys = [_join(other) for other in range(world)]
    deadline = Deadline(seconds, f"Rank {rank}")
    rendezvous_wait.present(store, keys, place.where, deadline)
    return deadline.poll(
        lambda: _confirmed(store, rank, world, word),
        lambda: f"the other ranks of its attempt at {place.where}",
        lambda: PeerLost(
            "The ranks of this attempt did not all come.",
            why=f"{deadline.waited} at {place.where}; some have not been started again",
            do="look at the logs of the other ranks",
        ),
    )


def _confirmed(store: Any, rank: int, world: int, word: str) -> str | None:
    """The name, once every rank has confirmed the words that the first one saw, this rank's `word` among them."""
    words = _seen(store, world) if rank == 0 else _told(store)
    if len(words) != world or words[rank] != word:
        return None
    name = hashlib.sha256("".join(words).encode()).hexdigest()[:12]
    store.set(f"espalier/{name}/{rank}", "")
    if rank == 0:
        store.set(_ATTEMPT, json.dumps(words))
        if store.check([f"espalier/{name}/{other}" for other in range(world)]):
            store.set(f"espalier/{name}/complete", "")
    return name if store.check([f"espalier/{name}/complete"]) else None


def _join(rank: int) -> str:
    return f"espalier/join/{rank}"


def _seen(store: Any, world: int) -> Sequence[str]:
    """The words that ranks brought last, also of those that have died since: they will not confirm."""
    keys = [_join(rank) for rank in range(world)]
    return [store.get(key).decode() for key in keys] if store.check(keys) else []


def _told(store: Any) -> Sequence[str]:
    words: list[str] = json.loads(store.get(_ATTEMPT)) if store.check([_ATTEMPT]) else []
    return words
