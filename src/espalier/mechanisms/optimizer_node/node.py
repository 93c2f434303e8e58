"""Optimizer node: sums gradients, runs AdamW on state that lies on disk, and answers pulls of parameters.

After LuWu (arXiv 2409.00918), section 5: the pipeline is step-centric. Threads belong to steps, and chunks of layers go
through them by bounded queues: receive and sum (a thread for each worker), read state, AdamW, write state; a thread for
each worker reads parameters and sends them. Memory is that of the rings of buffers, whatever the size of the model.

Clipping needs the norm of all gradients before the first parameter may move. The node does not wait for it: it keeps
the sums, steps with the factors that it expects, and where the workers then decide otherwise it reads the state that
was committed before and steps again. State becomes visible, on disk and to pulls, when all of a step is committed.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from espalier.mechanisms.optimizer_node import fixed_point
from espalier.mechanisms.optimizer_node.chunk_update import update
from espalier.mechanisms.optimizer_node.reduction import Agreed, Member, Reduction, Slot
from espalier.mechanisms.optimizer_node.state_file import ChunkState, Entries, keep_totals, totals_of
from espalier.mechanisms.optimizer_node.wire import Frame, Kind, Link, Times
from espalier.plan.axes.node_layout import BITS, Chunk, Job
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError, RunFailed, UserError, words_of
from espalier.store.direct_io import aligned

if TYPE_CHECKING:
    from espalier.store.generations import Generations

DEPTH = 3
"""Chunks between reading and writing."""
SENDING = 2
"""Chunks of parameters on their way to one worker."""
_SQUARED = 1 << 16


@dataclass(frozen=True)
class Decision:
    """How a step moves the parameters: gradients times `scale`, AdamW's rate times `rate`."""

    scale: float
    rate: float


SKIP = Decision(0.0, 0.0)
"""The gradients are dropped, and the step is done again."""


@dataclass
class Step:
    """A step of the node while gradients come in. Has state.

    Attributes:
        round: see `Reduction.round`.
        number: of the step, once it has begun; its gradients are of the parameters of that number.
        expected: the decision that is applied before it is made; None: the sums wait.
        decision: what the workers decided.
        following: the rate that they expect for the step after.
        applied: what was applied to each chunk whose sum is complete.
        totals: what all ranks were told of it, encoded.
        norms: of each tensor (layer, place) that lies in one chunk; squares: of the others, the sums over their pieces.
        vectors: what each rank told for `totals`; told: ranks of the members that did, some for others.
    """

    round: int
    number: int = -1
    expected: Decision | None = None
    decision: Decision | None = None
    following: float | None = None
    applied: dict[Chunk, Decision | None] = field(default_factory=dict)
    norms: dict[tuple[int, int], float] = field(default_factory=dict)
    squares: dict[tuple[int, int], float] = field(default_factory=dict)
    vectors: dict[int, Tensor] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    totals: bytes = b""


@dataclass
class _Work:
    """A chunk in the pipeline: its sum is in `slot` (as its frame `number`), or, for another attempt, was kept.
    `decision`: to be applied; `final`: it is the workers' own. `buffers`: of the stage that has it."""

    round: int
    chunk: Chunk
    slot: Slot | None
    number: int = -1
    step: Step = field(default_factory=lambda: Step(-1))
    decision: Decision | None = None
    final: bool = False
    buffers: ChunkState | None = None


class Replication(Protocol):
    """What a node does for its standby; see standby.py."""

    refused: Callable[[EspalierError], None]

    def begin(self, state: Generations, turn: int) -> None:
        """From round `turn` on, with the standby at the step of `state`."""

    def gradient(self, turn: int, chunk: Chunk, values: Tensor) -> None:
        """The sum of a chunk."""

    def end(self, turn: int, decision: dict[str, Any]) -> None:
        """How a round ends."""

    def close(self) -> None:
        """Ends it."""


class OptimizerNode:
    """Keeps the state of a job's layers and moves them. Has state: threads, from `start` to `close`.

    Args:
        job: its layers and options.
        kept: the state of these layers, and room for the gradients of a step.
        door: a listening socket.
        token: of the run.
        times: seconds of the protocol.

    Attributes:
        replica: what a standby is sent, if there is one; set before `start`.
        error: why it has ended.
    """

    def __init__(
        self,
        job: Job,
        kept: tuple[Generations, Generations],
        door: socket.socket,
        token: str,
        times: Times | None = None,
    ) -> None:
        self.job = job
        self.state, self._sums = kept
        self.times = times or Times()
        host, port = door.getsockname()[:2]
        self.name = f"the optimizer node at {host}:{port}"
        self.reduction = Reduction(job, door, token, self, (self.name, self.times))
        self.error: EspalierError | None = None
        self.replica: Replication | None = None
        self._entries = Entries(job)
        self._changed = threading.Condition()
        self._reading: SimpleQueue[_Work | None] = SimpleQueue()
        self._computing: SimpleQueue[_Work | None] = SimpleQueue()
        self._writing: SimpleQueue[_Work | None] = SimpleQueue()
        self._free: SimpleQueue[ChunkState | None] = SimpleQueue()
        largest = max(slot.total.numel() for slot in self.reduction.slots)
        for _ in range(DEPTH):
            self._free.put(ChunkState(largest, self._entries))
        self._step = Step(0, self.state.step)
        self._ahead: dict[int, Step] = {}
        self._pulls: dict[int, SimpleQueue[Frame]] = {}
        self._closed = False
        self._counted = self._moved()

    def _moved(self) -> tuple[int, int]:
        """Bytes read from and written to the disk so far."""
        kept = self.state, self._sums
        return sum(one.read_bytes for one in kept), sum(one.written_bytes for one in kept)

    def buffers(self, workers: int) -> int:
        """Bytes of all rings while so many workers are there: what the node holds, whatever the size of the model."""
        largest = max(slot.total.numel() for slot in self.reduction.slots)
        each = 4 * len(self.reduction.slots) + DEPTH * (4 + self._entries.moments + self._entries.width)
        return largest * (each + workers * (4 + SENDING * self._entries.width))

    def start(self) -> Self:
        """Begins to serve; returns at once."""
        if self.replica is not None:
            self.replica.refused = self.fail
            self.replica.begin(self.state, 0)
        for stage in (self._read, self._compute, self._write, self._end_steps):
            threading.Thread(target=self._run, args=(stage,), daemon=True).start()
        self.reduction.listen()
        return self

    def close(self) -> None:
        """Ends it at once, without a word to the workers, as if it were killed."""
        self.fail(RunFailed(f"{self.name} was closed."), tell=False)

    def wait(self) -> None:
        """Returns when it is closed; raises what it failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed)
        if self.error is not None:
            raise self.error

    def _run(self, stage: Any) -> None:
        try:
            stage()
        except EspalierError as error:
            self.fail(error)
        except Exception as error:  # a bug, or a device that is gone: nobody may wait for this thread
            self.fail(RunFailed(f"{self.name} has failed.", why=f"{type(error).__name__}: {error}"))

    def fail(self, error: EspalierError, tell: bool = True) -> None:
        """Ends it: the workers raise `error`, unless they are not to be told."""
        with self._changed:
            if self._closed:
                return
            self._closed, self.error = True, error
            self._changed.notify_all()
        for member in list(self.reduction.members.values()) if tell else []:
            member.fail(error, self.times)
        for queue in (self._reading, self._computing, self._writing, self._free):
            queue.put(None)
        self.reduction.close()
        if self.replica is not None:
            self.replica.close()

    # What the reduction calls

    def status(self, greeting: dict[str, Any]) -> dict[str, Any]:
        """See Above."""
        return {"step": self.state.step, "totals": totals_of(self.state, self.job)}

    def exponents(self, step: int, layer: int, agreed: Agreed) -> None:
        """See Above."""
        self.reduction.answer(step, layer, agreed)

    def opened(self, slot: Slot) -> None:
        """See Above."""
        assert slot.chunk is not None
        self._reading.put(_Work(slot.round, slot.chunk, slot, slot.number))

    def request(self, member: Member, frame: Frame) -> None:
        """See Above."""
        if frame.kind == Kind.PULL:
            queue = self._pulls.get(id(member))
            if queue is None:
                queue = self._pulls[id(member)] = SimpleQueue()
                threading.Thread(target=self._run, args=(lambda: self._send(member, queue),), daemon=True).start()
            queue.put(frame)
            return
        with self._changed:
            step = (
                self._step if frame.step <= self._step.round else self._ahead.setdefault(frame.step, Step(frame.step))
            )
            if step.round != frame.step:
                return  # all has ended without this one
            if frame.kind == Kind.TOTALS:
                step.vectors |= serialization.loads(frame.payload)
                step.told.add(member.rank)
            else:
                told = serialization.loads(frame.payload)
                step.decision = SKIP if told["scale"] is None else Decision(told["scale"], told["rate"])
                step.following = told["following"]
                step.totals = told.get("totals", step.totals)
            self._changed.notify_all()

    def changed(self) -> None:
        """See Above."""
        with self._changed:
            self._changed.notify_all()

    def reset(self, step: int, cluster: str) -> int:
        """See Above."""
        with self._changed:
            if step == self.state.step - 1:
                self.state.revert()
            if step != self.state.step:
                raise UserError(
                    f"{self.name} holds step {self.state.step}, and another node of the run step {step}.",
                    do="copy back the files of all nodes from one time",
                )
            self._step = Step(self._step.round + 1, step)
            self._ahead.clear()
            if self.replica is not None:
                self.replica.begin(self.state, self._step.round)
            self._changed.notify_all()
            return self._step.round

    # Stages

    def _read(self) -> None:
        while (work := self._reading.get()) is not None and (buffers := self._free.get()) is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._step.round >= work.round or self._closed)
                work.step = self._step
            if work.round != work.step.round:
                self._free.put(buffers)
                continue
            decided = None if work.step.decision == SKIP else work.step.decision
            work.decision, work.final = decided or work.step.expected, decided is not None
            work.buffers = buffers
            buffers.open(work.chunk)
            if work.decision is not None:
                buffers.read(self.state)
            if work.slot is None:
                self._sums.read(work.chunk.name, buffers.gradient, pending=True)
            self._computing.put(work)

    def _compute(self) -> None:
        while (work := self._computing.get()) is not None:
            assert work.buffers is not None
            gradient = work.buffers.gradient[: work.chunk.elements]
            if work.slot is not None and self._sum(work, work.slot, gradient):
                self._measure(work, gradient)
                if self.replica is not None:
                    self.replica.gradient(work.round, work.chunk, gradient)
            if work.step is not self._step:
                self._free.put(work.buffers)
                continue
            if work.decision is not None:
                if work.decision.scale != 1.0:
                    gradient *= work.decision.scale
                update(self.job, work.buffers, work.step.number, work.decision.rate)
            self._writing.put(work)

    def _sum(self, work: _Work, slot: Slot, gradient: Tensor) -> bool:
        """Waits for the sum of all workers and decodes it; False where the step was begun again meanwhile."""
        while not slot.complete.wait(0.2):
            if self._closed or work.step is not self._step:
                return False
        total = slot.total[: work.chunk.elements]
        if slot.raw:
            gradient.copy_(total.view(torch.float32))
        else:
            agreed = self.reduction.agreed.get((work.round, work.chunk.layer))
            if agreed is None:
                return False
            places = fixed_point.shift(BITS[self.job.push], agreed.workers)
            shared = self.reduction.blocks(work.chunk, agreed.shared)
            fixed_point.decode(total, shared, places, slot.weight, gradient)
        self.reduction.free(work.number)
        return True

    def _measure(self, work: _Work, gradient: Tensor) -> None:
        for piece in work.chunk.pieces:
            values = gradient[piece.start : piece.stop]
            key = (work.chunk.layer, piece.tensor)
            if piece.whole:
                work.step.norms[key] = float(torch.linalg.vector_norm(values))
            else:
                parts = values.split(_SQUARED)  # a norm in float64 makes a copy
                square = sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)
                work.step.squares[key] = work.step.squares.get(key, 0.0) + square
        if not work.final:
            self._sums.write(work.chunk.name, gradient)

    def _write(self) -> None:
        while (work := self._writing.get()) is not None:
            assert work.buffers is not None
            if work.decision is not None:
                work.buffers.write(self.state)
            self._free.put(work.buffers)
            with self._changed:
                work.step.applied[work.chunk] = work.decision
                self._changed.notify_all()

    # The end of a step

    def _end_steps(self) -> None:
        while not self._closed:
            step = self._step
            if (
                self._until(step, lambda: len(step.applied) == self.reduction.each)  # noqa: B023
                and self._until(step, lambda: step.decision is not None or self._all_told(step))  # noqa: B023
                and (step.decision is not None or self._totals(step))
                and self._until(step, lambda: step.decision is not None)  # noqa: B023
                and self._apply(step)
                and self._replicate(step)
            ):
                self._finish(step)

    def _until(self, step: Step, ready: Callable[[], bool]) -> bool:
        """Waits; False where the node was closed or the step begun again."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._closed or step is not self._step)
            return not self._closed and step is self._step

    def _all_told(self, step: Step) -> bool:
        due = [rank for rank, one in list(self.reduction.members.items()) if one.first <= step.round]
        return bool(due) and step.told.issuperset(due)

    def _totals(self, step: Step) -> bool:
        """Tells all workers the sums of their vectors, in the order of ranks, and the norms of the gradients."""
        vectors = [vector for _, vector in sorted(step.vectors.items())]
        sums = vectors[0].clone()
        for vector in vectors[1:]:
            sums += vector
        norms = step.norms | {key: math.sqrt(square) for key, square in step.squares.items()}
        before, self._counted = self._counted, self._moved()
        disk = [now - then for now, then in zip(self._counted, before, strict=True)]
        told = {"sums": sums, "norms": [norms[key] for key in sorted(norms)], "disk": disk}
        step.totals = serialization.dumps(told)
        payload = memoryview(step.totals)
        for member in list(self.reduction.members.values()):
            member.send(Frame(Kind.TOTALS, step=step.round, payload=payload))
        return True

    def _apply(self, step: Step) -> bool:
        """Steps again from the state that was committed, where something else was applied than was decided."""
        if step.decision == SKIP:
            return True
        for chunk, applied in list(step.applied.items()):
            if applied != step.decision:
                self._reading.put(_Work(step.round, chunk, None))
        return self._until(step, lambda: all(one == step.decision for one in step.applied.values()))

    def _replicate(self, step: Step) -> bool:
        if self.replica is not None and step.decision is not None:
            scale, rate = (None, None) if step.decision == SKIP else (step.decision.scale, step.decision.rate)
            self.replica.end(
                step.round, {"scale": scale, "rate": rate, "following": step.following, "totals": step.totals}
            )
        return True

    def _finish(self, step: Step) -> None:
        with self.reduction.lock, self._changed:
            if step is not self._step:
                return
            assert step.decision is not None
            following = self._ahead.pop(step.round + 1, None) or Step(step.round + 1)
            following.number = step.number + (step.decision != SKIP)
            if step.decision == SKIP:
                self.state.rollback()
            else:
                keep_totals(self.state, self.job, following.number, step.totals)
                self.state.commit(following.number)
                if step.following is not None and step.decision.scale == 1.0:
                    following.expected = Decision(1.0, step.following)
            self.reduction.end_round()
            self._step = following
            self._changed.notify_all()

    # Pulls

    def _send(self, member: Member, asked: SimpleQueue[Frame]) -> None:
        """Answers the pulls of one worker, until it has gone."""
        link = member.links["control"]
        free: SimpleQueue[Tensor] = SimpleQueue()
        largest = max(chunk.elements for chunks in self.reduction.chunks for chunk in chunks)
        for _ in range(SENDING):
            free.put(aligned(largest * self._entries.width))
        while link.error is None and not self._closed:
            try:
                frame = asked.get(timeout=1.0)
            except Empty:
                continue
            self._await(frame.step, link)
            for chunk in self.reduction.chunks[frame.layer]:
                if link.error is None and not self._closed:
                    self._send_chunk(member, chunk, frame.step, free)

    def _await(self, step: int, link: Link) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.state.step >= step or self._closed or link.error is not None)

    def _send_chunk(self, member: Member, chunk: Chunk, step: int, free: SimpleQueue[Tensor]) -> None:
        whole = free.get()
        self.state.read(f"{chunk.name}/parameters", whole)
        if self.state.step != step:
            error = RunFailed(
                f"Worker {member.rank} pulled layer {chunk.layer} of step {step} after step {step} ended."
            )
            member.send(Frame(Kind.ERROR, payload=memoryview(serialization.dumps(words_of(error)))))
        payload = whole.numpy().data[: chunk.elements * self._entries.width]
        width = self._entries.width
        member.send(
            Frame(Kind.PARAMETERS, chunk.layer, step, chunk.index, width, payload=payload), lambda: free.put(whole)
        )
