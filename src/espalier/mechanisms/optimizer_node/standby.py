"""Hot standby of an optimizer node: it is sent the summed gradients, takes the same steps, and goes on where the node
does not.

To the standby the node is its only worker, with an fp32 wire, so both hold the same bits. No step is committed by the
node before the standby has all that it needs for it. Workers come to the standby when the node was silent for too long;
from then on the node, should it wake up, is refused and ends.
"""

from __future__ import annotations

import time
from typing import Self

import torch

from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.reduction import Member
from espalier.mechanisms.optimizer_node.replica import PRIMARY
from espalier.mechanisms.optimizer_node.wire import Frame, FrameKind, Greeting
from espalier.recipe.errors import RunFailed


class Standby(OptimizerNode):
    """A node that lets workers in only when its primary is gone. Arguments as of `OptimizerNode`. Has state.

    Attributes:
        promoted: workers have come; the primary is refused.
    """

    promoted = False
    _heard = 0.0

    def start(self) -> Self:
        """See ReductionServer."""
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
            name = list(self._entries.sizes())[frame.layer]
            self.state.write(name, torch.frombuffer(frame.payload, dtype=torch.uint8))
        else:
            with self.lock:
                self.state.commit(frame.step)
                self._step.number = frame.step
