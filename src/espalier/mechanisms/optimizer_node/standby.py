"""Hot standby of an optimizer node: it is sent the summed gradients, takes the same steps, and goes on where the node
does not.

To the standby the node is its only worker, with an fp32 wire, so both hold the same bits. No step is committed by the
node before the standby has all that it needs for it. Workers come to the standby when the node was silent for too long;
from then on the node, should it wake up, is refused and ends.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from espalier.mechanisms.optimizer_node import wire
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.reduction import Member, summary
from espalier.mechanisms.optimizer_node.session import Session
from espalier.mechanisms.optimizer_node.state_file import Entries
from espalier.mechanisms.optimizer_node.wire import RAW, Address, Frame, Kind, Times
from espalier.parallel.layer_client import StepLost
from espalier.plan.axes.node_layout import Chunk, Job, chunks_of
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError, PeerLost, RunFailed
from espalier.store.generations import Generations

PRIMARY = -1_000_000
"""Rank of a node at its standby."""


class Standby(OptimizerNode):
    """A node that lets workers in only when its primary is gone. Arguments as of `OptimizerNode`. Has state.

    Attributes:
        promoted: workers have come; the primary is refused.
    """

    promoted = False
    _heard = 0.0

    def start(self) -> Self:
        """See OptimizerNode."""
        self._heard = time.monotonic() + self.times.patience  # the first one has so long to come
        return super().start()

    def status(self, greeting: dict[str, Any]) -> dict[str, Any]:
        """See Above. Workers are sent away (and come again) while the primary is there."""
        if greeting.get("rank") != PRIMARY:
            primary = self.reduction.members.get(PRIMARY)
            if primary is not None and primary.links["control"].connected:
                self._heard = time.monotonic()
            if not self.promoted and time.monotonic() < self._heard + self.times.silence:
                raise ConnectionError("the primary is there")
            self.promoted = True
        elif self.promoted:
            raise RunFailed(
                f"{self.name} has taken over at step {self.state.step}.",
                why="this node was silent for too long, and the workers went on with its standby",
                do="start this one again as the standby of that one, with an empty folder",
            )
        return super().status(greeting)

    def request(self, member: Member, frame: Frame) -> None:
        """See Above. The primary also sends whole states."""
        self._heard = time.monotonic()
        if frame.kind != Kind.STATE:
            super().request(member, frame)
        elif frame.width:
            name = f"{frame.layer}/{frame.chunk}/" + ("parameters" if frame.width == 1 else "moments")
            self.state.write(name, torch.frombuffer(frame.payload, dtype=torch.uint8))
        else:
            with self._changed:
                self.state.commit(frame.step)
                self._step.number = frame.step


class Replica:
    """What a node does for its standby. Has state.

    Args:
        job: of the node.
        address: of the standby; and the token of the run.
        name: of the node, in messages.
        times: seconds of the protocol.

    Attributes:
        error: why there is no standby any more; None while there is one.
        refused: is called where the standby has taken over.
        finished: the run is over, and the standby is to hear that.
    """

    finished = False

    def __init__(self, job: Job, address: tuple[Address, str], name: str, times: Times) -> None:
        self.job, self.name, self.times = job, name, times
        self._address, self._token = address
        self.error: EspalierError | None = None
        self.refused: Callable[[EspalierError], None] = lambda _: None
        self._open: tuple[Session, int] | None = None

    def begin(self, state: Generations, turn: int) -> None:
        """From round `turn` on the standby gets all; before, it is brought to where `state` stands.

        Raises:
            RunFailed: it has taken over.
            PeerLost: nobody answers.
        """
        self.close()
        greeting = {"rank": PRIMARY, "job": summary(self.job), "workers": 1}
        run = {"cluster": secrets.token_hex(8), "resume": self._step()}
        session = Session(self.name, self.times, (self._address, self._token), greeting | run, self)
        session.start()
        if run["resume"] != state.step:
            self._copy(state, session)
        self._open = (session, session.first - turn)
        self.error = None

    def _step(self) -> int:
        until, at = time.monotonic() + self.times.patience, (self._address, self._token)
        while True:
            self.times.unheard()
            try:
                connection, reply = wire.dial(*at, {"ask": "status", "rank": PRIMARY}, self.times.silence)
            except OSError:
                if time.monotonic() > until:
                    peer = f"its standby at {self._address[0]}:{self._address[1]}"
                    raise wire.unreachable(self.name, peer, self.times.patience) from None
                time.sleep(self.times.heartbeat)
            else:
                connection.close()
                return int(reply["step"])

    def _copy(self, state: Generations, session: Session) -> None:
        entries = Entries(self.job)
        for number in range(len(self.job.layers)):
            for chunk in chunks_of(self.job, number):
                for place, (kind, width) in enumerate(
                    (("parameters", entries.width), ("moments", entries.moments)), start=1
                ):
                    buffer = torch.empty(chunk.elements * width, dtype=torch.uint8)
                    state.read(f"{chunk.name}/{kind}", buffer)
                    frame = Frame(Kind.STATE, number, state.step, chunk.index, place, payload=buffer.numpy().data)
                    session.links["control"].send(frame)
                    session.links["control"].drained()
        session.ask(Frame(Kind.STATE, step=state.step))
        session.links["control"].drained()

    def gradient(self, turn: int, chunk: Chunk, values: Tensor) -> None:
        """Sends the sum of a chunk in that round."""
        payload = values.clone().numpy().data.cast("B")
        self._send("push", Frame(Kind.GRADIENT, chunk.layer, turn, chunk.index, RAW, payload=payload))

    def end(self, turn: int, decision: dict[str, Any]) -> None:
        """Tells how the round ends; returns when the standby has all of it."""
        self._send("control", Frame(Kind.MOVE, step=turn, payload=memoryview(serialization.dumps(decision))))
        if self._open is not None and self.error is None:
            with suppress(EspalierError):
                for link in self._open[0].links.values():
                    link.drained()

    def _send(self, stream: str, frame: Frame) -> None:
        if self._open is not None and self.error is None:
            session, shift = self._open
            if frame.step + shift >= session.first:
                with suppress(EspalierError):  # `lost` is called with it
                    session.links[stream].send(replace(frame, step=frame.step + shift))

    def close(self) -> None:
        """At once; where nothing has failed the standby hears that it is not needed any more."""
        if self._open is not None:
            session, self._open = self._open[0], None
            if self.error is None and self.finished:
                session.leave()
            session.close()

    # What arrives

    def buffer(self, frame: Frame, size: int) -> memoryview:
        """See Receiver."""
        return memoryview(bytearray(size))

    def deliver(self, frame: Frame) -> None:
        """The standby has nothing to say."""

    def lost(self, error: EspalierError) -> None:
        """The standby is gone, or has taken over."""
        self.error = error
        if not isinstance(error, (PeerLost, StepLost)):
            self.refused(error)
