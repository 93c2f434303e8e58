"""One member of a crew, as a forked process: what it says after each round, and at the end."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable

import torch
from crews import RATE, Replica

from espalier.comm import store_client
from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds.membership import MemberGroup, Members
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.optim.diloco_slowmo import METHODS
from espalier.recipe.errors import PeerLost


def life(
    port: int, place: tuple[int, int], method: str, rounds: int, pause: float, returns: bool, say: Callable[[str], None]
) -> None:
    """Trains `place` = (member, members) for some rounds, or comes back to those that do; says `round N`, and at last
    the hash of its parameters and who was lost. Ends the process: 0, or 7 when the others gave it up."""
    torch.set_num_threads(1)
    store = store_client.connect("127.0.0.1", port, 30.0)
    member, members = place
    crew = MemberGroup(store, member, tuple(range(members)), timeout=6.0, grace=2.0, returns=returns)
    replica, choices = Replica(member), METHODS[method]
    lost: list[str] = []
    team = Members(crew, codec(choices.codec), lambda gone, left: lost.append(f"lost {gone} left {left}"))
    engine = OuterSync(replica.live, choices, team, Rounds(4))
    try:
        if returns:
            engine.come_in(RATE)
            say(f"back in round {engine.rounds}")
        while engine.rounds < rounds:
            replica.step()
            time.sleep(pause)
            if engine.after_step(RATE):
                say(f"round {engine.rounds}")
        engine.finish(RATE)
    except PeerLost as error:
        say(error.what)
        os._exit(7)
    say(" ".join([hashlib.sha256(replica.flat().numpy().tobytes()).hexdigest(), *lost]))
    os._exit(0)
