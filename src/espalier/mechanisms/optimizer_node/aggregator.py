"""Aggregator: adds the gradients of some workers, sends one stream to the node, and fans parameters out.

It stands where the switch of LuWu (arXiv 2409.00918, section 3) would. It is a node without an optimizer: workers see a
node in it, and the node one worker. Sums are of integers, which it does not have to understand. What one worker pulls
is kept until all have pulled it, so that it crosses the link to the node once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from espalier.kernels import fixed_point
from espalier.mechanisms.optimizer_node.reduction import Member, ReductionServer, RoundEnd, SharedExponents, SumSlot
from espalier.mechanisms.optimizer_node.session import Session, reach
from espalier.mechanisms.optimizer_node.wire import RAW, Address, Frame, FrameKind, Greeting, Times, packed
from espalier.parallel.layer_client import StepLost
from espalier.plan.axes.node_layout import BITS, NodeJob
from espalier.recipe.errors import EspalierError

COPIES = 4
"""Layers of parameters that are kept for workers that have not pulled them yet."""


@dataclass(eq=False)
class _LayerCopy:
    """A layer of one step on its way to the workers. Has state.

    Attributes:
        layer: and its step.
        count: its chunks.
        readers: who gets each chunk as it comes; `served`: their ranks.
        chunks: those that have come.
    """

    layer: tuple[int, int]
    count: int
    readers: list[Member] = field(default_factory=list)
    served: set[int] = field(default_factory=set)
    chunks: list[Frame] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return len(self.chunks) == self.count


@dataclass
class _SiteRound(RoundEnd):
    """Whether the node was told what the workers have: `totals`, and how the round ends."""

    totals: bool = False
    decided: bool = False


class Aggregator(ReductionServer):
    """Serves the workers of a machine, or some of several machines, for one node. Has state: threads, from `start` to
    `close`.

    Args:
        job: of the node; `workers` are those of this aggregator.
        node: its addresses (its own and those of its standbys), and the token of the run.
        door: a listening socket.
        site: the number of this aggregator among those of the run.
        times: seconds of the protocol.
    """

    kind = "aggregator"
    end_type = _SiteRound

    def __init__(
        self,
        job: NodeJob,
        node: tuple[list[Address], str],
        door: socket.socket,
        site: int,
        times: Times,
    ) -> None:
        self.addresses, token = node
        super().__init__(job, door, token, times)
        self.site = site
        self.session: _SiteSession | None = None
        self._pushing: SimpleQueue[tuple[SumSlot, int, _SiteSession | None] | None] = SimpleQueue()
        self._copies: list[_LayerCopy] = []
        self._decided = 0

    def leave(self) -> None:
        """Ends it when all of its workers have left: the node waits for it no more."""
        if self.session is not None:
            self.session.leave()

    # What the server calls

    def stages(self) -> tuple[Callable[[], None]]:
        return (self._push,)

    def release(self) -> None:
        self._pushing.put(None)
        if self.session is not None:
            self.session.close()

    def status(self, greeting: Greeting) -> Greeting:
        """That of the node: workers follow its starts, not those of this process."""
        return reach(self.addresses, self.token, self.name, self.times)[1]

    def reset(self, step: int, cluster: str) -> int:
        """Begins a session with the node."""
        if self.session is not None:
            self.session.close()
        address, _ = reach(self.addresses, self.token, self.name, self.times)
        with self.lock:
            self._copies.clear()
            self.ends.clear()
        site = {"rank": -1 - self.site, "workers": self.job.workers}
        greeting = site | {"cluster": cluster, "resume": step}
        node = (address, self.token)
        times = self.times.to(self.addresses)
        session = _SiteSession(self.name, times, node, self.job, greeting)
        session.aggregator = self
        try:
            session.start()
        except StepLost as error:  # others came first, with a newer start of some node
            raise ConnectionError from error
        self.session = session
        if session.ended:
            raise ConnectionError
        self._decided = session.first
        return session.first

    def forget(self) -> None:
        """See ReductionServer. The node has the round without this site then, and it begins anew there too."""
        super().forget()
        session = self.session
        self.session = None
        if session is not None:
            session.close()

    def took_part(self, member: Member) -> bool:
        """See ReductionServer. A round whose sums were sent on is open until it is decided."""
        return self.round > self._decided or super().took_part(member)

    def exponents(self, round: int, layer: int, shared: SharedExponents) -> None:
        """The node has to be asked for those of all sites."""
        self._ask(shared.frame(layer, round))

    def opened(self, slot: SumSlot) -> None:
        self._pushing.put((slot, slot.number, self.session))

    def decide(self, end: _SiteRound, frame: Frame) -> None:
        """See ReductionServer. All workers decide the same."""
        if not end.decided:
            end.decided = True
            self._decided = frame.step + 1
            self._ask(frame)

    def progress(self) -> None:
        with self.lock:
            for end in self.ends.values():
                if not end.totals and self.reported(end):
                    end.totals = True
                    payload = packed(end.vectors)
                    self._ask(Frame(FrameKind.TOTALS, step=end.round, payload=payload))

    def _ask(self, frame: Frame) -> None:
        if self.session is not None:
            with suppress(EspalierError):  # `lost` is called with it
                self.session.ask(frame)

    # Gradients

    def _push(self) -> None:
        while work := self._pushing.get():
            slot, number, session = work
            while not slot.complete.wait(0.2) and session is self.session and not self.closed:
                pass
            if session is None or session is not self.session or slot.number != number:
                continue
            try:
                self._send(slot, session)
            except EspalierError:
                continue
            self.free(number)
            if (number + 1) % self.each == 0:  # all chunks of the round were sent
                with self.lock:
                    ends = self.ends.items()
                    self.ends = {round: end for round, end in ends if round >= slot.round}
                    self.end_round()

    def _send(self, slot: SumSlot, session: Session) -> None:
        total = slot.total[: slot.chunk.elements]
        width = RAW if slot.raw else 4 if BITS[self.job.push] == 32 else 2
        dtype = total.dtype if slot.raw else fixed_point.WIDTHS[width * 8]
        payload = total.to(dtype, copy=True).numpy().data.cast("B")
        place = slot.chunk.layer, slot.round, slot.chunk.index, width
        frame = Frame(FrameKind.GRADIENT, *place, payload=payload)
        session.links["push"].send(frame, wait=self.times.answer)

    # Parameters

    def pull(self, member: Member, frame: Frame) -> None:
        """Each worker gets the oldest copy that it has not had yet; where there is none, one is
        asked for."""
        with self.lock:
            copy = next((each for each in self._of(frame) if member.rank not in each.served), None)
            if copy is None:
                self._forget()
                copy = _LayerCopy((frame.layer, frame.step), len(self.chunks[frame.layer]))
                self._copies.append(copy)
                self._ask(frame)
            copy.readers.append(member)
            copy.served.add(member.rank)
            for chunk in copy.chunks:
                member.send(chunk)

    def _of(self, frame: Frame) -> list[_LayerCopy]:
        """Copies of the layer and step of a frame, the oldest first."""
        return [copy for copy in self._copies if copy.layer == (frame.layer, frame.step)]

    def _forget(self) -> None:
        """Layers that all have got, and the oldest beyond those that are kept."""
        ranks = set(self.members)
        if self.gathered:
            self._copies = [copy for copy in self._copies if not (copy.whole and copy.served >= ranks)]
        whole = [copy for copy in self._copies if copy.whole]
        for copy in whole[: max(0, len(whole) - COPIES + 1)]:
            self._copies.remove(copy)

    def _fan_out(self, frame: Frame) -> None:
        with self.lock:
            copy = next((each for each in self._of(frame) if not each.whole), None)
            if copy is not None:
                copy.chunks.append(frame)
                for member in copy.readers:
                    member.send(frame)
            self._forget()

    # What arrives from the node

    def answered(self, frame: Frame) -> None:
        """An answer of the node."""
        if frame.kind == FrameKind.EXPONENTS:
            super().exponents(frame.step, frame.layer, SharedExponents.of(frame))
        elif frame.kind == FrameKind.PARAMETERS:
            self._fan_out(frame)
        else:
            self.tell_all(frame)

    def lost(self, session: _SiteSession, error: EspalierError) -> None:
        """The node is gone for good, or has started again: the workers have to come again."""
        if not isinstance(error, StepLost) and len(self.addresses) == 1 and not self.closed:
            for member in list(self.members.values()):
                member.fail(error)
        with self.lock:
            if session is self.session:
                self.forget()


class _SiteSession(Session):
    """One session with the node. Has state: whether it has ended."""

    aggregator: Aggregator
    ended = False

    def deliver(self, frame: Frame) -> None:
        self.aggregator.answered(frame)

    def lost(self, error: EspalierError) -> None:
        self.ended = True
        self.aggregator.lost(self, error)
