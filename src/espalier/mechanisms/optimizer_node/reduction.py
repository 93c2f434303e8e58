"""Sums of what workers push: who takes part, the exponents they share, and slots that fill up in any order.

An optimizer node and an aggregator both receive here. A `Reduction` listens, admits those who know the token, and adds
gradients chunk by chunk into a ring of slots. The numbers of pushed frames count the chunks of the job, round
after round, so a slot is complete when the minimum of all workers' Acks has passed its number, and all get the same
Credit: the slots that are free.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.mechanisms.optimizer_node import fixed_point, wire
from espalier.mechanisms.optimizer_node.wire import RAW, Frame, Kind, Link, Times
from espalier.plan.axes.flow_control import MinimumTable
from espalier.plan.axes.node_layout import Chunk, Job, chunks_of
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError, RunFailed, UserError, words_of

_STRANGERS = 64


@dataclass
class Slot:
    """The sum of one chunk. Has state.

    Attributes:
        number: of the push frame. round: see `Reduction.round`.
        total: int32 sums of all who have pushed it; where `raw`, the float32 values of the only one.
        weight: the sum of their samples; 0: the sum is no mean.
    """

    total: Tensor
    number: int = -1
    round: int = -1
    chunk: Chunk | None = None
    weight: int = 0
    raw: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    complete: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Agreed:
    """Exponents that all workers of a step share for a layer, and how many they are."""

    shared: Tensor
    workers: int


class Above(Protocol):
    """What is done with what a Reduction has brought together. Nothing here waits for workers."""

    def exponents(self, turn: int, layer: int, agreed: Agreed) -> None:
        """Those of all members."""

    def opened(self, slot: Slot) -> None:
        """The first worker has pushed this chunk; called in the order of the slots."""

    def request(self, member: Member, frame: Frame) -> None:
        """A member asks for parameters, ends a step or decides on it."""

    def changed(self) -> None:
        """Members have come or gone."""

    def status(self, greeting: dict[str, Any]) -> dict[str, Any]:
        """`step`: the last one that is whole. Raises ConnectionError to send away whoever greets, for now."""

    def reset(self, step: int, cluster: str) -> int:
        """Back to `step`; nothing that came since counts. Returns the next round. `cluster`: names all nodes of the
        run as they were started."""


class Member:
    """A worker, or an aggregator for several. Has state: its two links."""

    def __init__(self, rank: int, session: str, first: int, workers: int) -> None:
        self.rank, self.session, self.first, self.workers = rank, session, first, workers
        self.links: dict[str, Link] = {}
        self.scratch = torch.empty(0, dtype=torch.uint8)

    def send(self, frame: Frame, done: Callable[[], None] | None = None, stream: str = "control") -> None:
        """Answers it; nothing is done where it is gone."""
        try:
            self.links[stream].post(frame, done)
        except EspalierError:
            if done is not None:
                done()

    def fail(self, error: EspalierError, times: Times) -> None:
        """Tells it why it cannot go on, and gives it a moment to hear that."""
        self.send(Frame(Kind.ERROR, payload=memoryview(serialization.dumps(words_of(error)))))
        with suppress(EspalierError):
            self.links["control"].drained(20 * times.heartbeat)


class _Stream:
    """What arrives on one link of a member."""

    def __init__(self, reduction: Reduction, member: Member) -> None:
        self.reduction, self.member = reduction, member

    def buffer(self, frame: Frame, size: int) -> memoryview:
        """Memory of the member for gradients; new memory for the rest."""
        if frame.kind != Kind.GRADIENT:
            return memoryview(bytearray(size))
        if self.member.scratch.numel() < size:
            self.member.scratch = torch.empty(self.reduction.job.chunk * 4, dtype=torch.uint8)
        return self.member.scratch.numpy().data[:size]

    def deliver(self, frame: Frame) -> None:
        """A frame of the member. One that breaks the rules is told so, and left out."""
        try:
            self.reduction.deliver(self.member, frame)
        except EspalierError as error:
            self.member.fail(error, self.reduction.times)
            raise

    def lost(self, error: EspalierError) -> None:
        """It has gone without a word."""
        self.reduction.drop(self.member)


class Reduction:
    """The side of a node or aggregator that faces workers. Has state.

    Args:
        job: what is pushed.
        door: a listening socket.
        token: of the run.
        above: what the sums go to.
        names: this process in messages, and seconds of the protocol.

    Attributes:
        lock: of all that is not in a slot; taken before a lock of `above`.
        gathered: all workers of the job have come.
        round: how often all chunks were summed, or were to be. A round ends with a step, or with gradients that are
            dropped. Frames of workers carry it in place of the step, except for pulls.
    """

    def __init__(self, job: Job, door: socket.socket, token: str, above: Above, names: tuple[str, Times]) -> None:
        self.job, self.door, self.above = job, door, above
        self.name, self.times = names
        self.incarnation = secrets.token_hex(8)
        self.chunks = [chunks_of(job, number) for number in range(len(job.layers))]
        self.each = sum(map(len, self.chunks))
        self.members: dict[int, Member] = {}
        self.agreed: dict[tuple[int, int], Agreed] = {}
        largest = max((chunk.elements for chunks in self.chunks for chunk in chunks), default=0)
        self.slots = [Slot(torch.empty(largest, dtype=torch.int32)) for _ in range(SLOTS)]
        self._token = token
        self.lock = threading.RLock()
        self._table = MinimumTable()
        self._waiting: dict[tuple[int, int], dict[int, Any]] = {}
        self._handed = self._freed = 0
        self.round = 0
        self.gathered = False
        self._cluster = ""

    def listen(self) -> None:
        """Begins to admit members; returns at once."""
        threading.Thread(target=self._accept, name=f"{self.name} accepts", daemon=True).start()

    # Members

    def _accept(self) -> None:
        strangers: dict[socket.socket, None] = {}  # who has not proved anything yet, the oldest first
        with suppress(OSError):
            while True:
                connection, _ = self.door.accept()
                if len(strangers) >= _STRANGERS:
                    wire.hang_up(next(iter(strangers)))
                strangers[connection] = None
                threading.Thread(target=self._admit, args=(connection, strangers), daemon=True).start()

    def _admit(self, connection: socket.socket, strangers: dict[socket.socket, None]) -> None:
        try:
            greeting = wire.admit(connection, self._token, self._greet)
        except (OSError, EspalierError, KeyError):
            greeting = None
        strangers.pop(connection, None)
        member = self.members.get(greeting["rank"]) if greeting is not None and greeting["ask"] == "link" else None
        if greeting is not None and member is not None and greeting["reply"]["known"]:
            member.links[greeting["stream"]].attach(connection, greeting["expected"])
        else:
            wire.hang_up(connection)

    def _greet(self, greeting: wire.Greeting) -> wire.Greeting:
        with self.lock:
            if greeting["ask"] == "status":
                return {"incarnation": self.incarnation} | self.above.status(greeting)
            check_job(self.job, greeting["job"], self.name, greeting["rank"])
            member = self.members.get(greeting["rank"])
            known = member is not None and member.session == greeting["session"]
            if not known and greeting["new"]:
                member, known = self._join(greeting), True
            status = self.above.status(greeting)
            if member is None or not known:
                return {"known": False} | status
            link = member.links[greeting["stream"]]
            joins = int(status["step"]) + member.first - self.round
            return {"known": True, "expected": link.receiving.expected, "first": member.first, "joins": joins} | status

    def _join(self, greeting: wire.Greeting) -> Member:
        old = self.members.get(greeting["rank"])
        if old is not None:
            self.drop(old)
        if greeting["cluster"] != self._cluster or self._abandoned(greeting):
            # the first to come after some node of the run has started again, or after all others were lost in a step
            self._reset(greeting["resume"], greeting["cluster"])
        first = self.round + (any(key[0] == self.round for key in (*self._waiting, *self.agreed)) and self.gathered)
        member = Member(greeting["rank"], greeting["session"], first, greeting["workers"])
        for stream, number in (("control", 0), ("push", first * self.each)):
            who = f"worker {member.rank}"
            link = Link((self.name, who), _Stream(self, member), self.times, first=(0, number))
            member.links[stream] = link
        push = member.links["push"]
        push.room = None
        push.grant(max(self._freed, first * self.each) + len(self.slots))
        self.members[member.rank] = member
        self._table.add(member.rank, first * self.each)
        for link in member.links.values():
            link.start()
        self.gathered = self.gathered or sum(one.workers for one in self.members.values()) >= self.job.workers
        self._again()
        return member

    def _abandoned(self, greeting: wire.Greeting) -> bool:
        """Whether nobody is left of those who began the present step, or ended one that another node has not."""
        begun = any(key[0] >= self.round for key in (*self._waiting, *self.agreed))
        return not self.members and (begun or self.above.status(greeting)["step"] != greeting["resume"])

    def drop(self, member: Member) -> None:
        """From now on nothing waits for it. Chunks that it has pushed count."""
        with self.lock:
            if self.members.get(member.rank) is member:
                del self.members[member.rank]
                self._table.remove(member.rank)
                self._again()
        for link in member.links.values():
            link.close()

    def _again(self) -> None:
        for key in list(self._waiting):
            self._agree(key)
        self._hand_over()
        self.above.changed()

    def _reset(self, step: int, cluster: str) -> None:
        """Everybody has to come again, and begins with `step`."""
        self.forget()
        self.round = self.above.reset(step, cluster)
        self._handed = self._freed = self.round * self.each
        self._cluster = cluster

    def forget(self) -> None:
        """All members, and what they pushed. They will notice, and come again."""
        with self.lock:
            gone, self.members = list(self.members.values()), {}
            self._table = MinimumTable()
            self._waiting.clear()
            self.agreed.clear()
            self.gathered, self._cluster = False, ""
            for slot in self.slots:
                slot.number = -1
        for member in gone:
            for link in member.links.values():
                link.close()

    def end_round(self) -> None:
        """What comes now belongs to the next one."""
        with self.lock:
            self.agreed = {key: one for key, one in self.agreed.items() if key[0] > self.round}
            self.round += 1

    def blocks(self, chunk: Chunk, shared: Tensor) -> Tensor:
        """The exponents of a chunk, among those of its layer."""
        before = sum(fixed_point.blocks(one.elements) for one in self.chunks[chunk.layer][: chunk.index])
        return shared[before : before + fixed_point.blocks(chunk.elements)]

    def close(self) -> None:
        """Ends all links."""
        self.door.close()
        for member in list(self.members.values()):
            for link in member.links.values():
                link.close()

    # Frames

    def deliver(self, member: Member, frame: Frame) -> None:
        """Any frame of a member."""
        if frame.kind == Kind.GRADIENT:
            self._add(member, frame)
        elif frame.kind == Kind.EXPONENTS:
            with self.lock:
                told = self._waiting.setdefault((frame.step, frame.layer), {})
                told[member.rank] = (torch.frombuffer(frame.payload, dtype=torch.uint8), frame.count)
                self._agree((frame.step, frame.layer))
        elif frame.kind == Kind.LEAVE:
            self.drop(member)
        else:
            self.above.request(member, frame)

    def _agree(self, key: tuple[int, int]) -> None:
        told = self._waiting[key]
        due = {rank for rank, member in self.members.items() if member.first <= key[0]}
        if self.gathered and told and due <= set(told):
            shared = torch.stack([values for values, _ in told.values()]).amax(0)
            del self._waiting[key]
            self.above.exponents(*key, Agreed(shared, sum(count for _, count in told.values())))

    def answer(self, turn: int, layer: int, agreed: Agreed) -> None:
        """Tells all members what they share for a layer: by the link on which they push, where no parameters are
        before it."""
        with self.lock:
            self.agreed[turn, layer] = agreed
            members = list(self.members.values())
        payload = agreed.shared.numpy().data
        for member in members:
            member.send(Frame(Kind.EXPONENTS, layer, turn, count=agreed.workers, payload=payload), stream="push")

    def _add(self, member: Member, frame: Frame) -> None:
        number = member.links["push"].receiving.expected
        slot = self.slots[number % len(self.slots)]
        chunk = self.chunks[frame.layer][frame.chunk]
        with slot.lock:
            first = slot.number != number
            if first:
                self._open(slot, number, frame, chunk)
            elif slot.chunk is not chunk or slot.round != frame.step:
                raise _order(member, frame, slot)
            dtype = torch.float32 if frame.width == RAW else fixed_point.WIDTHS[frame.width * 8]
            values, total = torch.frombuffer(frame.payload, dtype=dtype), slot.total[: chunk.elements]
            if first or frame.width == RAW:  # by NumPy: one pass of one thread
                slot.raw = frame.width == RAW
                (total.view(torch.float32) if slot.raw else total).numpy()[:] = values.numpy()
            else:
                fixed_point.add(total, values)
            slot.weight += frame.count
        with self.lock:
            if self.members.get(member.rank) is member:
                self._table.heard(member.rank, number + 1)
                self._hand_over()

    def _open(self, slot: Slot, number: int, frame: Frame, chunk: Chunk) -> None:
        slot.number, slot.round, slot.chunk, slot.weight = number, frame.step, chunk, 0
        slot.complete.clear()
        self.above.opened(slot)

    def _hand_over(self) -> None:
        while self._handed < self._table.minimum():
            self.slots[self._handed % len(self.slots)].complete.set()
            self._handed += 1

    def free(self, number: int) -> None:
        """The sum of that frame was read: another may use its memory. Called in the order of the numbers."""
        with self.lock:
            self._freed = max(self._freed, number + 1)
            for member in self.members.values():
                member.links["push"].grant(self._freed + len(self.slots))


SLOTS = 6
"""Chunks whose sums may be incomplete at the same time."""


def _order(member: Member, frame: Frame, slot: Slot) -> RunFailed:
    assert slot.chunk is not None
    return RunFailed(
        f"Worker {member.rank} pushed layer {frame.layer} where another worker pushed layer {slot.chunk.layer}.",
        why="all workers push the layers of a step in the same order, every layer once",
        do="push the layers from the last to the first on every worker",
    )


def check_job(job: Job, told: dict[str, str], name: str, rank: int) -> None:
    """Raises UserError where a worker's job differs from this one, and names the first field that does."""
    mine = summary(job)
    for field_, value in mine.items():
        if told.get(field_) != value:
            raise UserError(
                f"Worker {rank} and {name} do not agree on {field_!r}.",
                why=f"the worker says {told.get(field_)}, the node {value}",
                do="start both from the same recipe, or give the node an empty folder",
            )


def summary(job: Job) -> dict[str, str]:
    """What a worker and its node must have in common."""
    import xxhash

    table = repr([(layer.name, layer.tensors) for layer in job.layers])
    elements = sum(layer.numel for layer in job.layers)
    return {
        "layers": f"{len(job.layers)} layers of {elements:,} elements ({xxhash.xxh3_64_hexdigest(table.encode())})",
        "push": job.push,
        "pull": job.pull,
        "chunk": str(job.chunk),
        "outer": str(job.outer),
    }
