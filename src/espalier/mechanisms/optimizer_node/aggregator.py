"""Aggregator of a site: adds the gradients of its workers, sends one stream to the node, and fans parameters out.

It stands where the switch of LuWu (arXiv 2409.00918, section 3) would. Workers see a node in it, and the node one
worker: sums are of integers, which it does not have to understand. What one worker pulls is kept until all have pulled
it, so that it crosses the link to the node once.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import torch

from espalier.mechanisms.optimizer_node import fixed_point
from espalier.mechanisms.optimizer_node.reduction import Agreed, Member, Reduction, Slot, summary
from espalier.mechanisms.optimizer_node.session import Session, reach
from espalier.mechanisms.optimizer_node.wire import RAW, Address, Frame, Kind, Times
from espalier.parallel.layer_client import StepLost
from espalier.plan.axes.node_layout import BITS, Job
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError

KEPT = 4
"""Layers of parameters that are kept for workers that have not pulled them yet."""


@dataclass(eq=False)
class _Fan:
    """A layer of one step on its way to the workers. Has state. `asked`: who gets each chunk as it comes; `served`:
    their ranks."""

    key: tuple[int, int]
    count: int
    asked: list[Member] = field(default_factory=list)
    served: set[int] = field(default_factory=set)
    chunks: list[Frame] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether all of it is here."""
        return len(self.chunks) == self.count


@dataclass
class _Round:
    """What workers have told at the end of a round. Has state."""

    vectors: dict[int, Any] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    totals: bool = False
    decided: bool = False


class Aggregator:
    """Serves the workers of a site for one node. Has state: threads, from `start` to `close`.

    Args:
        job: of the node; `workers` are those of this site.
        node: its addresses (its own and those of its standbys), and the token of the run.
        door: a listening socket.
        site: the number of this aggregator among those of the run.
        times: seconds of the protocol.
    """

    def __init__(
        self,
        job: Job,
        node: tuple[list[Address], str],
        door: socket.socket,
        site: int = 0,
        times: Times | None = None,
    ) -> None:
        self.job, self.times = job, times or Times()
        host, port = door.getsockname()[:2]
        self.name = f"the aggregator at {host}:{port}"
        self.addresses, self._token = node
        self.site = site
        self.reduction = Reduction(job, door, self._token, self, (self.name, self.times))
        self.session: Session | None = None
        self._pushing: SimpleQueue[tuple[Slot, int, Session | None] | None] = SimpleQueue()
        self._lock = threading.RLock()
        self._fans: list[_Fan] = []
        self._rounds: dict[int, _Round] = {}
        self._closed = False

    def start(self) -> Aggregator:
        """Begins to serve; returns at once."""
        threading.Thread(target=self._push, name=f"{self.name} pushes", daemon=True).start()
        self.reduction.listen()
        return self

    def close(self) -> None:
        """Ends it at once, as if it were killed."""
        self._closed = True
        self._pushing.put(None)
        self.reduction.close()
        if self.session is not None:
            self.session.close()

    def leave(self) -> None:
        """Ends it when all of its workers have left: the node waits for it no more."""
        if self.session is not None:
            self.session.leave()

    # What the reduction calls

    def status(self, greeting: dict[str, Any]) -> dict[str, Any]:
        """That of the node: workers follow its starts, not those of this process."""
        return reach(self.addresses, self._token, self.name, self.times)[1]

    def reset(self, step: int, cluster: str) -> int:
        """Begins a session with the node."""
        if self.session is not None:
            self.session.close()
        address, _ = reach(self.addresses, self._token, self.name, self.times)
        told = {"rank": -1 - self.site, "job": summary(self.job), "workers": self.job.workers}
        with self._lock:
            self._fans.clear()
            self._rounds.clear()
        answers = _Answers(self)
        greeting = told | {"cluster": cluster, "resume": step}
        patience = self.times.silence if len(self.addresses) > 1 else self.times.patience
        times = replace(self.times, patience=patience)
        session = answers.session = Session(self.name, times, (address, self._token), greeting, answers)
        try:
            session.start()
        except StepLost as error:  # others came first, with a newer start of some node
            raise ConnectionError from error
        self.session = session
        if answers.ended:
            raise ConnectionError
        return session.first

    def exponents(self, turn: int, layer: int, agreed: Agreed) -> None:
        """See Above."""
        payload = agreed.shared.numpy().data
        self._ask(Frame(Kind.EXPONENTS, layer, turn, count=agreed.workers, payload=payload))

    def opened(self, slot: Slot) -> None:
        """See Above."""
        self._pushing.put((slot, slot.number, self.session))

    def request(self, member: Member, frame: Frame) -> None:
        """See Above."""
        if frame.kind == Kind.PULL:
            self._pull(member, frame)
            return
        with self._lock:
            end = self._rounds.setdefault(frame.step, _Round())
            if frame.kind == Kind.TOTALS:
                end.vectors |= serialization.loads(frame.payload)
                end.told.add(member.rank)
            elif not end.decided:
                end.decided = True
                self._ask(frame)
        self.changed()

    def changed(self) -> None:
        """See Above."""
        members = dict(self.reduction.members)
        with self._lock:
            for turn, end in self._rounds.items():
                due = {rank for rank, one in members.items() if one.first <= turn}
                if due and due <= end.told and not end.totals:
                    end.totals = True
                    payload = memoryview(serialization.dumps(end.vectors))
                    self._ask(Frame(Kind.TOTALS, step=turn, payload=payload))

    def _ask(self, frame: Frame) -> None:
        session = self.session
        if session is not None:
            with suppress(EspalierError):  # `lost` is called with it
                session.ask(frame)

    # Gradients

    def _push(self) -> None:
        while (found := self._pushing.get()) is not None:
            slot, number, session = found
            while not slot.complete.wait(0.2) and session is self.session and not self._closed:
                pass
            if session is None or session is not self.session or slot.number != number:
                continue
            try:
                self._send(slot, session)
            except EspalierError:
                continue
            self.reduction.free(number)
            if (number + 1) % self.reduction.each == 0:
                self._end(slot.round)

    def _send(self, slot: Slot, session: Session) -> None:
        assert slot.chunk is not None
        total = slot.total[: slot.chunk.elements]
        width = RAW if slot.raw else 4 if BITS[self.job.push] == 32 else 2
        codes = total.clone() if slot.raw else total.to(fixed_point.WIDTHS[width * 8], copy=True)
        place = (slot.chunk.layer, slot.round, slot.chunk.index)
        frame = Frame(Kind.GRADIENT, *place, width, slot.weight, codes.numpy().data.cast("B"))
        session.links["push"].send(frame, wait=self.times.answer)

    def _end(self, turn: int) -> None:
        """All chunks of the round were sent."""
        with self.reduction.lock, self._lock:
            self._rounds = {one: end for one, end in self._rounds.items() if one >= turn}
            self.reduction.end_round()

    # Parameters

    def _pull(self, member: Member, frame: Frame) -> None:
        """Each worker gets the oldest copy that it has not had yet; where there is none, one is asked for."""
        with self._lock:
            fan = next((one for one in self._fans if one.key == _key(frame) and member.rank not in one.served), None)
            if fan is None:
                self._forget()
                fan = _Fan(_key(frame), len(self.reduction.chunks[frame.layer]))
                self._fans.append(fan)
                self._ask(frame)
            fan.asked.append(member)
            fan.served.add(member.rank)
            for chunk in fan.chunks:
                member.send(chunk)

    def _forget(self) -> None:
        """Layers that all have got, and the oldest beyond those that are kept."""
        here = set(self.reduction.members)
        if self.reduction.gathered:
            self._fans = [one for one in self._fans if not (one.whole and one.served >= here)]
        whole = [one for one in self._fans if one.whole]
        for one in whole[: max(0, len(whole) - KEPT + 1)]:
            self._fans.remove(one)

    def _fan(self, frame: Frame) -> None:
        with self._lock:
            fan = next((one for one in self._fans if one.key == _key(frame) and not one.whole), None)
            if fan is not None:
                fan.chunks.append(frame)
                for member in fan.asked:
                    member.send(frame)
            self._forget()

    # What arrives from the node

    def deliver(self, frame: Frame) -> None:
        """An answer of the node."""
        if frame.kind == Kind.EXPONENTS:
            shared = torch.frombuffer(frame.payload, dtype=torch.uint8)
            self.reduction.answer(frame.step, frame.layer, Agreed(shared, frame.count))
        elif frame.kind == Kind.PARAMETERS:
            self._fan(frame)
        else:
            for member in list(self.reduction.members.values()):
                member.send(frame)

    def lost(self, session: Session | None, error: EspalierError) -> None:
        """The node is gone for good, or has started again: the workers have to come again."""
        if not isinstance(error, StepLost) and len(self.addresses) == 1 and not self._closed:
            for member in list(self.reduction.members.values()):
                member.fail(error, self.times)
        with self.reduction.lock:
            if session is self.session:
                self.session = None
                self.reduction.forget()


class _Answers:
    """What arrives in one session with the node. Has state."""

    def __init__(self, aggregator: Aggregator) -> None:
        self.aggregator = aggregator
        self.session: Session | None = None
        self.ended = False

    def buffer(self, frame: Frame, size: int) -> memoryview:
        """See Receiver."""
        return memoryview(bytearray(size))

    def deliver(self, frame: Frame) -> None:
        """See Receiver."""
        self.aggregator.deliver(frame)

    def lost(self, error: EspalierError) -> None:
        """See Receiver."""
        self.ended = True
        self.aggregator.lost(self.session, error)


def _key(frame: Frame) -> tuple[int, int]:
    return frame.layer, frame.step
