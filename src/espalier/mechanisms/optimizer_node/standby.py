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
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.reduction import Member
from espalier.mechanisms.optimizer_node.session import Session, reach
from espalier.mechanisms.optimizer_node.state_file import entry_sizes
from espalier.mechanisms.optimizer_node.wire import RAW, Address, Frame, FrameKind, Greeting, Times
from espalier.parallel.layer_client import StepLost
from espalier.plan.axes.node_layout import LayerChunk, NodeJob
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
        self._heard = time.monotonic() + self.times.patience  # the first one has so long to come
        return super().start()

    def status(self, greeting: Greeting) -> Greeting:
        """See ReductionServer. Workers are sent away (and come again) while the primary is there."""
        if greeting.get("rank") != PRIMARY:
            primary = self.members.get(PRIMARY)
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
        """See ReductionServer. The primary also sends whole states."""
        self._heard = time.monotonic()
        if frame.kind != FrameKind.STATE:
            super().request(member, frame)
        elif frame.width:
            name = list(entry_sizes(self.job))[frame.layer]
            self.state.write(name, torch.frombuffer(frame.payload, dtype=torch.uint8))
        else:
            with self.lock:
                self.state.commit(frame.step)
                self._step.number = frame.step


@dataclass(eq=False)
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

    job: NodeJob
    address: tuple[Address, str]
    name: str
    times: Times
    finished: bool = False
    error: EspalierError | None = None
    refused: Callable[[EspalierError], object] = bool
    _session: _ReplicaSession | None = None
    _shift: int = 0

    def begin(self, state: Generations, round: int) -> None:
        """From that round on the standby gets all; before, it is brought to where `state` stands.

        Raises:
            RunFailed: it has taken over.
            PeerLost: nobody answers.
        """
        self.close()
        address, token = self.address
        peer = "its standby", {"rank": PRIMARY}
        status = reach([address], token, self.name, self.times, peer)[1]
        run = {"cluster": secrets.token_hex(8), "resume": int(status["step"])}
        greeting = run | {"rank": PRIMARY, "workers": self.job.workers}
        session = _ReplicaSession(self.name, self.times, self.address, self.job, greeting)
        session.replica = self
        session.start()
        if run["resume"] != state.step:
            self._copy(state, session)
        self._session = session
        self._shift = session.first - round
        self.error = None

    def _copy(self, state: Generations, session: Session) -> None:
        control = session.links["control"]
        for number, (name, size) in enumerate(entry_sizes(self.job).items()):
            buffer = torch.empty(size, dtype=torch.uint8)
            state.read(name, buffer)
            payload = buffer.numpy().data
            control.send(Frame(FrameKind.STATE, number, state.step, width=1, payload=payload))
            control.drained()
        session.ask(Frame(FrameKind.STATE, step=state.step))
        control.drained()

    def gradient(self, round: int, chunk: LayerChunk, values: Tensor) -> None:
        """Sends the sum of a chunk in that round."""
        payload = values.clone().numpy().data.cast("B")
        frame = Frame(FrameKind.GRADIENT, chunk.layer, round, chunk.index, RAW, payload=payload)
        self._send("push", frame)

    def end(self, round: int, decision: memoryview) -> None:
        """Tells how the round ends; returns when the standby has all of it."""
        self._send("control", Frame(FrameKind.MOVE, step=round, payload=decision))
        if self._session is not None and self.error is None:
            with suppress(EspalierError):
                for link in self._session.links.values():
                    link.drained()

    def _send(self, stream: str, frame: Frame) -> None:
        session = self._session
        step = frame.step + self._shift
        if session is not None and self.error is None and step >= session.first:
            with suppress(EspalierError):  # `lost` is called with it
                session.links[stream].send(replace(frame, step=step))

    def close(self) -> None:
        """At once; where nothing has failed the standby hears that it is not needed any more."""
        session = self._session
        self._session = None
        if session is not None:
            if self.error is None and self.finished:
                session.leave()
            session.close()

    def lost(self, error: EspalierError) -> None:
        """The standby is gone, or has taken over."""
        self.error = error
        if not isinstance(error, (PeerLost, StepLost)):
            self.refused(error)


class _ReplicaSession(Session):
    """One session with the standby, which has nothing to say."""

    replica: Replica

    def lost(self, error: EspalierError) -> None:
        self.replica.lost(error)
