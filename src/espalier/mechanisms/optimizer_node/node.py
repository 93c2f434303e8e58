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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from espalier.kernels import fixed_point
from espalier.mechanisms.optimizer_node.chunk_update import update
from espalier.mechanisms.optimizer_node.reduction import Member, ReductionServer, RoundEnd, SumSlot
from espalier.mechanisms.optimizer_node.state_file import ChunkState, keep_totals, totals_of
from espalier.mechanisms.optimizer_node.wire import Frame, FrameKind, Greeting, Times, packed
from espalier.plan.axes.node_layout import BITS, LayerChunk, NodeJob
from espalier.recipe import serialization
from espalier.recipe.errors import RunFailed, UserError
from espalier.store.direct_io import aligned

if TYPE_CHECKING:
    from espalier.store.generations import Generations

DEPTH = 3
"""Chunks between reading and writing."""
SENDING = 2
"""Chunks of parameters on their way to one worker."""
_SQUARED = 1 << 16


@dataclass(frozen=True)
class StepDecision:
    """How a step moves the parameters: gradients times `scale`, AdamW's rate times `rate`."""

    scale: float
    rate: float


@dataclass
class NodeStep(RoundEnd):
    """A step of the node while gradients come in. Has state.

    Attributes:
        number: of the step, once it has begun; its gradients are of the parameters of that number.
        expected: the decision that is applied before it is made; None: the sums wait.
        decision: what the workers decided.
        following: the rate that they expect for the step after.
        applied: what was applied to each chunk whose sum is complete.
        totals: what all ranks were told of it, encoded.
        norms: of each tensor (layer, place) that lies in one chunk.
        squares: of the others, the sums over their pieces.
    """

    number: int = -1
    expected: StepDecision | None = None
    decision: StepDecision | None = None
    following: float | None = None
    applied: dict[LayerChunk, StepDecision | None] = field(default_factory=dict)
    norms: dict[tuple[int, int], float] = field(default_factory=dict)
    squares: dict[tuple[int, int], float] = field(default_factory=dict)
    totals: bytes = b""


@dataclass
class _ChunkWork:
    """A chunk in the pipeline: its sum is in `slot` (as its frame `number`), or, for another
    attempt, in the file of sums. `decision`: to be applied; `final`: it is the workers' own.
    `buffers`: of the stage that has it."""

    round: int
    chunk: LayerChunk
    slot: SumSlot | None
    number: int = -1
    step: NodeStep = field(default_factory=lambda: NodeStep(-1))
    decision: StepDecision | None = None
    final: bool = False
    buffers: ChunkState = field(init=False)


_Queue = SimpleQueue[_ChunkWork | None]


class OptimizerNode(ReductionServer):
    """Holds the state of a job's layers and updates it. Has state: threads, from `start` to `close`.

    Args:
        job: its layers and options.
        files: the state of these layers, and room for the gradients of a step.
        door: a listening socket.
        token: of the run.
        times: seconds of the protocol.

    Attributes:
        replica: `standby.Replica`, what a standby is sent, if there is one; set before `start`.
    """

    kind = "optimizer node"
    end_type = NodeStep

    def __init__(
        self,
        job: NodeJob,
        files: tuple[Generations, Generations],
        door: socket.socket,
        token: str,
        times: Times | None = None,
    ) -> None:
        super().__init__(job, door, token, times or Times())
        self.state, self._sums = files
        self.replica: Any = None
        self._reading = _Queue()
        self._computing = _Queue()
        self._writing = _Queue()
        self._free: SimpleQueue[ChunkState | None] = SimpleQueue()
        for _ in range(DEPTH):
            self._free.put(ChunkState(self.largest))
        self._step = self.ends[0] = NodeStep(0, number=self.state.step)
        self._pulls: dict[int, SimpleQueue[Frame]] = {}
        self._counted = self._moved()

    def _moved(self) -> tuple[int, int]:
        """Bytes read from and written to the disk so far."""
        state = self.state
        sums = self._sums
        return state.read_bytes + sums.read_bytes, state.written_bytes + sums.written_bytes

    def start(self) -> Self:
        if self.replica is not None:
            self.replica.refused = self.fail
            self.replica.begin(self.state, 0)
        return super().start()

    def wait(self) -> None:
        """Returns when it is closed; raises what it failed with."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed)
        if self.error is not None:
            raise self.error

    # What the server calls

    def stages(self) -> tuple[Callable[[], None], ...]:
        return self._read, self._compute, self._write, self._end_steps

    def release(self) -> None:
        for queue in (self._reading, self._computing, self._writing, self._free):
            queue.put(None)
        if self.replica is not None:
            self.replica.close()

    def status(self, greeting: Greeting) -> Greeting:
        return {"step": self.state.step, "totals": totals_of(self.state, self.job)}

    def opened(self, slot: SumSlot) -> None:
        self._reading.put(_ChunkWork(slot.round, slot.chunk, slot, slot.number))

    def pull(self, member: Member, frame: Frame) -> None:
        queue = self._pulls.get(id(member))
        if queue is None:
            queue = self._pulls[id(member)] = SimpleQueue()
            self.begin(self._send, member, queue)
        queue.put(frame)

    def request(self, member: Member, frame: Frame) -> None:
        """See ReductionServer. A round that all have ended without this member stays ended."""
        if frame.kind == FrameKind.PULL or frame.step >= self.round:
            super().request(member, frame)

    def decide(self, end: NodeStep, frame: Frame) -> None:
        decision = frame.content
        end.decision = StepDecision(decision["scale"], decision["rate"])
        end.following = decision["following"]
        end.totals = decision.get("totals", end.totals)

    def reset(self, step: int, cluster: str) -> int:
        with self.lock:
            if step == self.state.step - 1:
                self.state.revert()
            if step != self.state.step:
                raise UserError(
                    f"{self.name} holds step {self.state.step}, and another node of the run step {step}.",
                    do="copy back the files of all nodes from one time",
                )
            self._step = NodeStep(self._step.round + 1, number=step)
            self.ends = {self._step.round: self._step}
            if self.replica is not None:
                self.replica.begin(self.state, self._step.round)
            self.progress()
            return self._step.round

    # Stages

    def _read(self) -> None:
        while (work := self._reading.get()) and (buffers := self._free.get()):
            with self.changed:
                self.changed.wait_for(lambda: self._step.round >= work.round or self.closed)
                work.step = self._step
            if work.round != work.step.round:
                self._free.put(buffers)
                continue
            decided = work.step.decision
            work.decision = decided or work.step.expected
            work.final = decided is not None
            work.buffers = buffers
            buffers.open(work.chunk)
            if work.decision is not None:
                buffers.read(self.state)
            if work.slot is None:
                self._sums.read(work.chunk.name, buffers.gradient, pending=True)
            self._computing.put(work)

    def _compute(self) -> None:
        while work := self._computing.get():
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

    def _sum(self, work: _ChunkWork, slot: SumSlot, gradient: Tensor) -> bool:
        """Waits for the sum of all workers and decodes it; False where the step was begun again
        meanwhile."""
        while not slot.complete.wait(0.2):
            if self.closed or work.step is not self._step:
                return False
        total = slot.total[: work.chunk.elements]
        if slot.raw:
            gradient.copy_(total.view(torch.float32))
        else:
            agreed = self.agreed.get((work.round, work.chunk.layer))
            if agreed is None:
                return False
            places = fixed_point.shift(BITS[self.job.push], agreed.workers)
            before = self.chunks[work.chunk.layer][: work.chunk.index]
            at = sum(fixed_point.blocks(chunk.elements) for chunk in before)
            shared = agreed.values[at : at + fixed_point.blocks(work.chunk.elements)]
            fixed_point.decode(total, shared, places, gradient)
        self.free(work.number)
        return True

    def _measure(self, work: _ChunkWork, gradient: Tensor) -> None:
        step = work.step
        for piece in work.chunk.pieces:
            values = gradient[piece.start : piece.stop]
            key = (work.chunk.layer, piece.tensor)
            if piece.whole:
                step.norms[key] = float(torch.linalg.vector_norm(values))
            else:
                parts = values.split(_SQUARED)  # a norm in float64 makes a copy
                norms = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts)
                square = sum(float(norm) ** 2 for norm in norms)
                step.squares[key] = step.squares.get(key, 0.0) + square
        if not work.final:
            self._sums.write(work.chunk.name, gradient)

    def _write(self) -> None:
        while work := self._writing.get():
            if work.decision is not None:
                work.buffers.write(self.state)
            self._free.put(work.buffers)
            with self.lock:
                work.step.applied[work.chunk] = work.decision
                self.progress()

    # The end of a step

    def _end_steps(self) -> None:
        while not self.closed:
            step = self._step
            if (
                self._until(step, lambda: len(step.applied) == self.each)  # noqa: B023
                and self._until(step, lambda: step.decision is not None or self.reported(step))  # noqa: B023
                and (step.decision is not None or self._totals(step))
                and self._until(step, lambda: step.decision is not None)  # noqa: B023
                and self._apply(step)
            ):
                self._finish(step)

    def _until(self, step: NodeStep, ready: Callable[[], bool]) -> bool:
        """Waits; False where the node was closed or the step begun again."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.closed or step is not self._step)
            return not self.closed and step is self._step

    def _totals(self, step: NodeStep) -> bool:
        """Tells all workers the sums of their vectors, in the order of ranks, and the norms of the
        gradients."""
        first, *rest = [vector for _, vector in sorted(step.vectors.items())]
        sums = first.clone()
        for vector in rest:
            sums += vector
        norms = step.norms | {key: math.sqrt(square) for key, square in step.squares.items()}
        before = self._counted
        self._counted = self._moved()
        disk = [now - then for now, then in zip(self._counted, before, strict=True)]
        totals = {"sums": sums, "norms": [norms[key] for key in sorted(norms)], "disk": disk}
        step.totals = serialization.dumps(totals)
        frame = Frame(FrameKind.TOTALS, step=step.round, payload=memoryview(step.totals))
        self.tell_all(frame)
        return True

    def _apply(self, step: NodeStep) -> bool:
        """Steps again from the state that was committed, where something else was applied than was
        decided; and tells the standby the decision."""
        decision = step.decision
        assert decision is not None
        for chunk, applied in list(step.applied.items()):
            if applied != decision:
                self._reading.put(_ChunkWork(step.round, chunk, None))
        if not self._until(step, lambda: all(applied == decision for applied in step.applied.values())):
            return False
        if self.replica is not None:
            end = asdict(decision) | {"following": step.following, "totals": step.totals}
            self.replica.end(step.round, packed(end))
        return True

    def _finish(self, step: NodeStep) -> None:
        with self.lock:
            if step is not self._step:
                return
            assert step.decision is not None
            following = self.ends.setdefault(step.round + 1, NodeStep(step.round + 1))
            following.number = step.number + 1
            keep_totals(self.state, self.job, following.number, step.totals)
            self.state.commit(following.number)
            if step.following is not None and step.decision.scale == 1.0:
                following.expected = StepDecision(1.0, step.following)
            self.end_round()
            self._step = following
            del self.ends[step.round]
            self.progress()

    # Pulls

    def _send(self, member: Member, requests: SimpleQueue[Frame]) -> None:
        """Answers the pulls of one worker, until it has gone."""
        link = member.links["control"]
        free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(SENDING):
            free.put(aligned(4 * self.largest))
        while link.error is None and not self.closed:
            try:
                frame = requests.get(timeout=1.0)
            except Empty:
                continue
            with self.changed:
                self.changed.wait_for(
                    lambda: self.state.step >= frame.step or self.closed or link.error is not None  # noqa: B023
                )
            for chunk in self.chunks[frame.layer]:
                if link.error is None and not self.closed:
                    self._send_chunk(member, chunk, frame.step, free)

    def _send_chunk(self, member: Member, chunk: LayerChunk, step: int, free: SimpleQueue[Tensor]) -> None:
        buffer = free.get()
        self.state.read(f"{chunk.name}/parameters", buffer)
        if self.state.step != step:
            error = f"Worker {member.rank} pulled layer {chunk.layer} of step {step} after step {step} ended."
            member.fail(RunFailed(error))
        payload = buffer.numpy().data[: 4 * chunk.elements]
        frame = Frame(FrameKind.PARAMETERS, chunk.layer, step, chunk.index, payload=payload)
        member.send(frame, lambda: free.put(buffer))
