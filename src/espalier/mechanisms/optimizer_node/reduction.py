"""Reduction server: what an optimizer node and an aggregator share, the side that workers see.

A server listens, admits those who know the token, and adds gradients chunk by chunk into a ring of
slots. The numbers of pushed frames count the chunks of the job, round after round, so a slot is
complete when the minimum of all workers' Acks has passed its number, and all get the same Credit:
the slots that are free. A node updates its state with the sums, an aggregator pushes them on.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from espalier.comm.base import Ledger, Traffic
from espalier.kernels import fixed_point
from espalier.mechanisms.optimizer_node import wire
from espalier.mechanisms.optimizer_node.wire import RAW, Arrived, Frame, FrameKind, FrameLink, Peer, Times
from espalier.plan.axes.node_layout import LayerChunk, NodeJob
from espalier.recipe.errors import EspalierError, RunFailed, UserError, words_of

SLOTS = 6
"""Chunks whose sums may be incomplete at the same time."""
_STRANGERS = 64


@dataclass
class SumSlot:
    """The sum of one chunk. Has state.

    Attributes:
        number: of the push frame. round: see `ReductionServer.round`.
        total: int32 sums of all who have pushed it; where `raw`, the float32 values of the only one.
    """

    total: Tensor
    number: int = -1
    round: int = -1
    chunk: LayerChunk = field(init=False)
    raw: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    complete: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class SharedExponents:
    """Exponents of a layer's gradient, and of how many workers they are the largest."""

    values: Tensor
    workers: int

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """Those in `frame`."""
        return cls(torch.frombuffer(frame.payload, dtype=torch.uint8), frame.count)

    def frame(self, layer: int, round: int) -> Frame:
        """The frame with them."""
        payload = self.values.numpy().data
        return Frame(FrameKind.EXPONENTS, layer, round, count=self.workers, payload=payload)


@dataclass
class RoundEnd:
    """What members tell at the end of a round. Has state.

    Attributes:
        vectors: of each rank, to be summed for `totals`.
        reported: ranks of the members that sent theirs, some for others too.
    """

    round: int
    vectors: dict[int, Tensor] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)


class Member(Peer):
    """A worker, or an aggregator for several. Has state: its links, and memory for gradients."""

    def __init__(self, server: ReductionServer, greeting: wire.Greeting, first: int) -> None:
        super().__init__()
        self.server = server
        self.first = first
        self.rank = greeting["rank"]
        self.session = greeting["session"]
        self.workers = greeting["workers"]
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def buffer(self, frame: Frame, size: int) -> memoryview:
        """Memory of the member for gradients; new memory for the rest."""
        if frame.kind != FrameKind.GRADIENT:
            return super().buffer(frame, size)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(self.server.job.chunk * 4, dtype=torch.uint8)
        return self._scratch.numpy().data[:size]

    def deliver(self, frame: Frame) -> None:
        """A member that breaks the rules is told so, and left out."""
        try:
            self.server.receive(self, frame)
        except EspalierError as error:
            self.fail(error)
            raise

    def lost(self, error: EspalierError) -> None:
        """It has gone without a word."""
        self.server.drop(self)

    def send(self, frame: Frame, done: Arrived | None = None, stream: str = "control") -> None:
        """Answers it; nothing is done where it is gone."""
        if frame.kind == FrameKind.PARAMETERS:
            self.server.ledger.add(Traffic.PARAMETERS, "send", frame.payload.nbytes)
        try:
            self.links[stream].post(frame, done)
        except EspalierError:
            if done is not None:
                done()

    def fail(self, error: EspalierError) -> None:
        """Tells it why it cannot go on, and gives it a moment to hear that."""
        self.send(Frame(FrameKind.ERROR, payload=wire.packed(words_of(error))))
        with suppress(EspalierError):
            self.links["control"].drained(20 * self.server.times.heartbeat)


class ReductionServer(ABC):
    """Sums what workers push, in threads from `start` to `close`. Has state.

    Args:
        job: what is pushed.
        door: a listening socket.
        token: of the run.
        times: seconds of the protocol.

    Attributes:
        lock: of all that is not in a slot; `changed` is its condition.
        complete: a round needs all workers of the job, and begins anew where it loses one; else the
            others go on. Set before `start`.
        gathered: all workers of the job have come. forgotten: they have not, since `forget`.
        round: how often all chunks were summed, or were to be. A round ends with a step.
            Frames of workers carry it in place of the step, except for
            pulls.
        ends: of rounds that have not ended.
        asked: when somebody came last (`time.monotonic`).
        ledger: payload bytes of gradients received from members, and of parameters sent to them.
        error: why it has ended.
    """

    kind = ""
    """In messages."""
    end_type: type[RoundEnd] = RoundEnd
    """Of `ends`."""

    def __init__(self, job: NodeJob, door: socket.socket, token: str, times: Times) -> None:
        self.job, self.door, self.token, self.times = job, door, token, times
        host, port = door.getsockname()[:2]
        self.name = f"the {self.kind} at {host}:{port}"
        self.incarnation = secrets.token_hex(8)
        self.chunks = job.chunks
        self.each = len(job.all_chunks)
        self.largest = job.largest
        self.slots = [SumSlot(torch.empty(self.largest, dtype=torch.int32)) for _ in range(SLOTS)]
        self.members: dict[int, Member] = {}
        self.agreed: dict[tuple[int, int], SharedExponents] = {}
        self.ends: dict[int, Any] = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.round = 0
        self.complete = self.gathered = self.forgotten = self.closed = False
        self.asked = time.monotonic()
        self.ledger = Ledger()
        self.error: EspalierError | None = None
        self._acks: dict[int, int] = {}  # of each member, the number of the frame that it pushes next
        self._proposals: dict[tuple[int, int], dict[int, SharedExponents]] = {}
        self._handed = self._freed = 0
        self._cluster = ""

    def start(self) -> Self:
        """Begins to serve; returns at once."""
        for work in (*self.stages(), self._accept):
            self.begin(work)
        return self

    def begin(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs `work` in a thread; where it fails the server does."""
        threading.Thread(target=self._guarded, args=(work, *arguments), daemon=True).start()

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except EspalierError as error:
            self.fail(error)
        except Exception as error:  # a bug, or a device that is gone: nobody may wait for it
            why = f"{type(error).__name__}: {error}"
            self.fail(RunFailed(f"{self.name} has failed.", why=why))

    def close(self) -> None:
        """Ends it at once, without a word to the workers, as if it were killed."""
        self.fail(RunFailed(f"{self.name} was closed."), tell=False)

    def fail(self, error: EspalierError, tell: bool = True) -> None:
        """Ends it: the workers raise `error`, unless they are not to be told."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self.error = error
            self.changed.notify_all()
        members = list(self.members.values())
        for member in members if tell else ():
            member.fail(error)
        self.release()
        self.door.close()
        for member in members:
            member.close()

    # What nodes and aggregators do differently. Nothing here waits for workers.

    @abstractmethod
    def stages(self) -> Sequence[Callable[[], None]]:
        """Each runs in a thread of its own."""

    @abstractmethod
    def release(self) -> None:
        """Ends these threads, and the connections that this process has dialed."""

    @abstractmethod
    def status(self, greeting: wire.Greeting) -> wire.Greeting:
        """`step`: the last one that is whole. Raises ConnectionError to send whoever greets away."""

    @abstractmethod
    def reset(self, step: int, cluster: str) -> int:
        """Goes back to `step`; nothing that came since counts. Returns the next round. `cluster`:
        names all nodes of the run as they were started."""

    @abstractmethod
    def opened(self, slot: SumSlot) -> None:
        """The first worker has pushed this chunk. Called in the order of the slots."""

    @abstractmethod
    def pull(self, member: Member, frame: Frame) -> None:
        """A member asks for the parameters of a layer."""

    @abstractmethod
    def decide(self, end: Any, frame: Frame) -> None:
        """A member says how a round ends."""

    def exponents(self, round: int, layer: int, shared: SharedExponents) -> None:
        """What all members share for a layer: each is told, by the link on which it pushes, where
        no parameters are before it."""
        with self.lock:
            self.agreed[round, layer] = shared
            self.tell_all(shared.frame(layer, round), "push")

    def tell_all(self, frame: Frame, stream: str = "control") -> None:
        """Sends `frame` to every member."""
        for member in list(self.members.values()):
            member.send(frame, stream=stream)

    def progress(self) -> None:
        """Members have come or gone, or told something."""
        with self.changed:
            self.changed.notify_all()

    # Members

    def _accept(self) -> None:
        strangers: dict[socket.socket, socket.socket] = {}  # who has not proved anything, the oldest first
        while not self.closed:
            with suppress(OSError):  # no descriptor is left, until a stranger goes
                connection = self.door.accept()[0]
                if len(strangers) >= _STRANGERS:
                    wire.hang_up(strangers.pop(next(iter(strangers))))
                strangers[connection] = connection
                threading.Thread(target=self._admit, args=(connection, strangers), daemon=True).start()

    def _admit(self, connection: socket.socket, strangers: dict[socket.socket, socket.socket]) -> None:
        greeting = member = None
        with suppress(OSError, EspalierError, KeyError):
            greeting = wire.admit(connection, self.token, self._greet)
        strangers.pop(connection, None)
        if greeting and greeting["reply"].get("known"):
            member = self.members.get(greeting["rank"])
        if not greeting or not member:
            wire.hang_up(connection)
        else:
            member.links[greeting["stream"]].attach(connection, greeting["expected"])

    def _greet(self, greeting: wire.Greeting) -> wire.Greeting:
        with self.lock:
            self.asked = time.monotonic()
            if greeting["ask"] == "status":
                return {"incarnation": self.incarnation} | self.status(greeting)
            check_job(self.job, greeting["job"], self.name, greeting["rank"])
            member = self.members.get(greeting["rank"])
            if member is None or member.session != greeting["session"]:
                member = self._join(greeting) if greeting["new"] else None
            status = self.status(greeting)
            if member is None:
                return {"known": False} | status
            expected = member.links[greeting["stream"]].receiving.expected
            joins = int(status["step"]) + member.first - self.round
            return {"known": True, "expected": expected, "first": member.first, "joins": joins} | status

    def _join(self, greeting: wire.Greeting) -> Member:
        before = self.members.get(greeting["rank"])
        if before is not None and greeting["cluster"] == self._cluster:
            self.drop(before)
            if not self._cluster:
                raise ConnectionError("the round begins anew")
        if greeting["cluster"] != self._cluster or self._abandoned(greeting):
            # the first to come after some node of the run has started again, or after all others
            # were lost in a step
            self.forget()
            self.round = self.reset(greeting["resume"], greeting["cluster"])
            self._handed = self._freed = self.round * self.each
            self._cluster = greeting["cluster"]
        first = self.round + (self.gathered and self._begun())
        member = Member(self, greeting, first)
        for stream, number in (("control", 0), ("push", first * self.each)):
            names = self.name, f"worker {member.rank}"
            member.links[stream] = FrameLink(names, member, self.times, first=(0, number))
        push = member.links["push"]
        push.room = None
        push.grant(max(self._freed, first * self.each) + len(self.slots))
        self.members[member.rank] = member
        self._acks[member.rank] = first * self.each
        for link in member.links.values():
            link.start()
        workers = sum(member.workers for member in self.members.values())
        self.gathered = self.gathered or workers >= self.job.workers
        self.forgotten = self.forgotten and not self.gathered
        self._review()
        return member

    def _begun(self) -> bool:
        """Whether exponents of this round have come."""
        return any(round >= self.round for round, _ in (*self._proposals, *self.agreed))

    def _abandoned(self, greeting: wire.Greeting) -> bool:
        """Whether nobody is left of those who began the present step, or ended one that another
        node has not."""
        if self.members or self._begun():
            return not self.members
        return self.status(greeting)["step"] != greeting["resume"]

    def drop(self, member: Member) -> None:
        """From now on nothing waits for it. Chunks that it has pushed count, unless rounds are to be
        `complete`: then it is as if this server had started again, and all come anew."""
        with self.lock:
            if self.members.get(member.rank) is member:
                if self.complete and self.took_part(member):
                    self.forget()
                    self.incarnation = secrets.token_hex(8)
                else:
                    del self.members[member.rank]
                    del self._acks[member.rank]
                    self.gathered = self.gathered and not self.complete
                    self._review()
        member.close()

    def took_part(self, member: Member) -> bool:
        """Whether the round may have something of it: exponents, which come before all else."""
        proposed = any(member.rank in proposals for proposals in self._proposals.values())
        return proposed or any(round >= self.round for round, _ in self.agreed)

    def _review(self) -> None:
        """Members have come or gone: some may have waited for that."""
        for key in list(self._proposals):
            self._agree(key)
        self._hand_over()
        self.progress()

    def forget(self) -> None:
        """All members, and what they pushed. They will notice, and come again."""
        with self.lock:
            gone = list(self.members.values())
            self.members = {}
            self._acks.clear()
            self._proposals.clear()
            self.agreed.clear()
            self.gathered = False
            self.forgotten = True
            self._cluster = ""
            for slot in self.slots:
                slot.number = -1
        for member in gone:
            member.close()

    def due(self, round: int) -> set[int]:
        """Ranks of the members that take part in a round."""
        return {rank for rank, member in list(self.members.items()) if member.first <= round}

    def reported(self, end: RoundEnd) -> bool:
        """Whether all of them have sent their totals."""
        due = self.due(end.round)
        return bool(due) and due <= end.reported

    def end_round(self) -> None:
        """What comes now belongs to the next one."""
        with self.lock:
            self.agreed = {key: value for key, value in self.agreed.items() if key[0] > self.round}
            self.round += 1

    # Frames

    def receive(self, member: Member, frame: Frame) -> None:
        """Any frame of a member."""
        if frame.kind == FrameKind.GRADIENT:
            self.ledger.add(Traffic.GRADIENTS, "receive", frame.payload.nbytes)
            self._add(member, frame)
        elif frame.kind == FrameKind.EXPONENTS:
            key = frame.step, frame.layer
            with self.lock:
                self._proposals.setdefault(key, {})[member.rank] = SharedExponents.of(frame)
                self._agree(key)
        elif frame.kind == FrameKind.LEAVE:
            self.drop(member)
        else:
            self.request(member, frame)

    def request(self, member: Member, frame: Frame) -> None:
        """A member asks for parameters, ends a round or decides on it."""
        if frame.kind == FrameKind.PULL:
            self.pull(member, frame)
            return
        with self.lock:
            if frame.step not in self.ends:
                self.ends[frame.step] = self.end_type(frame.step)
            end = self.ends[frame.step]
            if frame.kind == FrameKind.TOTALS:
                end.vectors |= frame.content
                end.reported.add(member.rank)
            else:
                self.decide(end, frame)
            self.progress()

    def _agree(self, key: tuple[int, int]) -> None:
        proposals = self._proposals[key]
        if self.gathered and proposals and self.due(key[0]) <= set(proposals):
            del self._proposals[key]
            largest = torch.stack([each.values for each in proposals.values()]).amax(0)
            workers = sum(each.workers for each in proposals.values())
            self.exponents(*key, SharedExponents(largest, workers))

    def _add(self, member: Member, frame: Frame) -> None:
        number = member.links["push"].receiving.expected
        slot = self.slots[number % len(self.slots)]
        chunk = self.chunks[frame.layer][frame.chunk]
        with slot.lock:
            first = slot.number != number
            if first:
                slot.number = number
                slot.round = frame.step
                slot.chunk = chunk
                slot.complete.clear()
                self.opened(slot)
            elif slot.chunk is not chunk or slot.round != frame.step:
                raise _order(member, frame, slot)
            dtype = torch.float32 if frame.width == RAW else fixed_point.WIDTHS[frame.width * 8]
            values = torch.frombuffer(frame.payload, dtype=dtype)
            total = slot.total[: chunk.elements]
            if first or frame.width == RAW:  # by NumPy: one pass of one thread
                slot.raw = frame.width == RAW
                (total.view(torch.float32) if slot.raw else total).numpy()[:] = values.numpy()
            else:
                fixed_point.add(total, values)
        with self.lock:
            if self.members.get(member.rank) is member:
                self._acks[member.rank] = number + 1
                self._hand_over()

    def _hand_over(self) -> None:
        while self._handed < min(self._acks.values(), default=0):
            self.slots[self._handed % len(self.slots)].complete.set()
            self._handed += 1

    def free(self, number: int) -> None:
        """The sum of that frame was read: another may use its memory. Called in the order of the
        numbers."""
        with self.lock:
            self._freed = max(self._freed, number + 1)
            for member in self.members.values():
                member.links["push"].grant(self._freed + len(self.slots))


def _order(member: Member, frame: Frame, slot: SumSlot) -> RunFailed:
    return RunFailed(
        f"Worker {member.rank} pushed layer {frame.layer} where another worker pushed layer {slot.chunk.layer}.",
        why="all workers push the layers of a step in the same order, every layer once",
        do="push the layers from the last to the first on every worker",
    )


def check_job(job: NodeJob, fields: dict[str, str], name: str, rank: int) -> None:
    """Raises UserError where a worker's job differs from this one, and names the first field that
    does."""
    for field_, value in summary(job).items():
        if fields.get(field_) != value:
            raise UserError(
                f"Worker {rank} and {name} do not agree on {field_!r}.",
                why=f"the worker says {fields.get(field_)}, the node {value}",
                do="start both from the same recipe, or give the node an empty folder",
            )


def summary(job: NodeJob) -> dict[str, str]:
    """What a worker and its node must have in common."""
    table = repr([(layer.name, layer.tensors) for layer in job.layers])
    elements = sum(layer.numel for layer in job.layers)
    digest = xxhash.xxh3_64_hexdigest(table.encode())
    return {
        "layers": f"{len(job.layers)} layers of {elements:,} elements ({digest})",
        "push": job.push,
        "chunk": str(job.chunk),
        "outer": str(job.outer),
    }
