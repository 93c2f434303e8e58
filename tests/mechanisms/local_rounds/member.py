"""One member of a crew, as a forked process: what it says after each round, and at the end."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from crews import RATE, Replica

from espalier.comm import store_client
from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds.membership import MemberGroup, Members
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.optim.diloco_slowmo import METHODS
from espalier.recipe.errors import PeerLost


def life(port: int, place: tuple[int, int], method: str, rounds: int, pause: float, say: Callable[[str], None]) -> None:
    """Trains `place` = (member, members) for some rounds; says `round N`, and at last the hash of its parameters and
    who was lost. Ends the process: 0, or 7 when the others gave it up."""
    torch.set_num_threads(1)
    store = store_client.connect("127.0.0.1", port, 30.0)
    member, members = place
    crew = MemberGroup(store, member, tuple(range(members)), timeout=6.0, grace=2.0)
    replica, choices = Replica(member), METHODS[method]
    team = Members(crew, codec(choices.codec))
    crews = [team.members]
    engine = OuterSync(replica.live, choices, team, Rounds(4))
    try:
        while engine.rounds < rounds:
            replica.step()
            time.sleep(pause)
            if engine.after_step(RATE):
                say(f"round {engine.rounds}")
            crews.append(team.members)
        engine.finish(RATE)
        crews.append(team.members)
    except PeerLost as error:
        say(error.what)
        os._exit(7)
    lost = [f"lost {tuple(sorted({*a} - {*b}))} left {b}" for a, b in pairwise(crews) if a != b]
    say(" ".join([hashlib.sha256(replica.flat().numpy().tobytes()).hexdigest(), *lost]))
    os._exit(0)
