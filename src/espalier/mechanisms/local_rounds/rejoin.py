"""How a lost replica comes back: it asks in the store, the living agree before which exchange it joins, and the first
of them sends it the outer state, with a hash that is compared.

What it asks stands in the key space of the crew as it is: once that has changed, the question is void and asked again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from espalier.recipe import serialization
from espalier.recipe.errors import PeerLost

WAIT = 600.0
"""Seconds for which it asks: rounds over slow links take minutes."""
LOOK = 0.05
"""Seconds between a newcomer's looks into the store."""
_HEADER, _BODY = 2, 3  # tags beside those of encoded messages
_WORDS = 4  # int64 of a SHA-256


class RejoinPoint(NamedTuple):
    """Where a rank enters a crew: the crew's epoch, its members from then on, and the exchanges they had launched."""

    epoch: int
    members: tuple[int, ...]
    number: int = 0


def space_of(store: Any, epoch: int) -> Any:
    """The key space of a crew's epoch."""
    return PrefixStore(f"outer/{epoch}", store)


def announce(store: Any, epoch: int) -> None:
    """Says which epoch it is, to those who want to come in."""
    store.set("outer/epoch", str(epoch))


def ask(store: Any, member: int, shard: int = 0, wait: float = WAIT) -> RejoinPoint:
    """Asks to be a member again, and waits for the others' answer: until the end of a round of theirs.

    Raises PeerLost: nobody answered in `wait` seconds.
    """
    until, asked = time.monotonic() + wait, -1
    while time.monotonic() < until:
        if store.check(["outer/epoch"]):
            epoch = int(store.get("outer/epoch"))
            space = space_of(store, epoch)
            if epoch != asked:
                space.set(f"asks/{member}/{shard}", "")
                asked = epoch
            if space.check(["admitted"]):
                following, members, number = json.loads(space.get("admitted"))
                if member in members:
                    return RejoinPoint(following, tuple(members), number)
        time.sleep(LOOK)
    raise PeerLost(
        f"Replica {member} asked to rejoin and was not admitted within {wait:g} s.",
        why="the others have ended, have not detected the failure yet, or their round is longer",
        do="a longer wait, or run all of them again; they go on from the newest checkpoint, where there is one",
    )


def coming(space: Any, shards: int, absent: Sequence[int], number: int, every: int) -> int | None:
    """Who joins before exchange `number`, as all ranks of all members agree; None: nobody.

    Called before exchanges that lie `every` apart. The first that finds somebody asking names the next but one: by then
    every rank has seen the name, since none launches that exchange before all have launched this.
    """
    if not space.check(["joins"]):
        waiting = [
            member for member in absent if all(space.check([f"asks/{member}/{shard}"]) for shard in range(shards))
        ]
        if not waiting:
            return None
        space.compare_set("joins", "", json.dumps([waiting[0], number + every]))
    member, at = json.loads(space.get("joins"))
    return int(member) if at == number else None


def admit(space: Any, entry: RejoinPoint) -> None:
    """Says to the newcomer that it is in. All say the same."""
    space.compare_set("admitted", "", json.dumps([entry.epoch, list(entry.members), entry.number]))


def send(group: Any, peer: int, state: dict[str, Any], timeout: timedelta) -> None:
    """Sends `state` (tensors and plain values) to a rank of a Gloo group."""
    body = torch.frombuffer(bytearray(serialization.dumps(state, "state")), dtype=torch.uint8)
    header = torch.cat([torch.tensor([len(body)]), _hash(body)])
    going = [group.send([header], peer, _HEADER), group.send([body], peer, _BODY)]
    for work in going:
        work.wait(timeout)


def received(group: Any, peer: int, timeout: timedelta) -> dict[str, Any]:
    """What `peer` sent. Raises PeerLost when it is not what it sent."""
    header = torch.empty(1 + _WORDS, dtype=torch.int64)
    group.recv([header], peer, _HEADER).wait(timeout)
    body = torch.empty(int(header[0]), dtype=torch.uint8)
    group.recv([body], peer, _BODY).wait(timeout)
    if not torch.equal(_hash(body), header[1:]):
        raise PeerLost("The outer state arrived damaged.", why="its hash is another", do="rejoin again; check the link")
    return serialization.loads(body.numpy().data, "The outer state that arrived")


def _hash(body: Tensor) -> Tensor:
    digest = bytearray(hashlib.sha256(body.numpy().tobytes()).digest())
    return torch.frombuffer(digest, dtype=torch.int64)
