"""Client of optimizer nodes on a worker: push gradients and pull parameters, layer by layer, in the background.

After LuWu (arXiv 2409.00918), section 4: `push`, `pull` and `wait`. Pushes and pulls are two independent streams, each
in the order of the calls. A push first tells the node the exponents of the gradient (fixed_point.py), and while the
answer is on its way those of the next layer follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import xxhash
from torch import Tensor

from espalier.comm.base import Ledger, Traffic
from espalier.mechanisms.optimizer_node import fixed_point, wire
from espalier.mechanisms.optimizer_node.reduction import Agreed, summary
from espalier.mechanisms.optimizer_node.session import Session, reach
from espalier.mechanisms.optimizer_node.state_file import PULLED
from espalier.mechanisms.optimizer_node.wire import RAW, Address, Frame, Kind, Times
from espalier.parallel.layer_client import StepLost, step_lost
from espalier.plan.axes.node_layout import BITS, Chunk, Job, chunks_of
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError, PeerLost, RunFailed, from_words
from espalier.store.direct_io import bytes_of

CODING = 3
"""Chunks of pushed integers on their way to one node."""
_BACK = 2
"""Steps that nodes may lose: one that was not committed, and one whose generation is damaged."""


class Handle:
    """A push or pull on its way. Has state."""

    def __init__(self, what: str, parts: int) -> None:
        self.what, self.left = what, parts
        self.error: EspalierError | None = None


@dataclass
class _Push:
    layer: int
    step: int
    round: int
    values: Tensor
    samples: int
    handle: Handle


@dataclass
class _Pull:
    layer: int
    step: int
    out: Tensor
    handle: Handle


class Client:
    """Pushes and pulls the layers of a job. Has state: threads and connections, until `close`.

    Args:
        addresses: of each node: its own, and behind it those of its standbys.
        rank: of this worker.
        job: all layers; those of each node are `job.part(len(addresses))`.
        token: of the run.
        times: seconds of the protocol.

    Attributes:
        feedback: of 8-bit pushes what rounding leaves is kept for the next step, 4 bytes a parameter; else they are
            rounded at random.
        step: that the nodes stand at, or are on their way to; at first, the one that this worker begins with.
        ledger: bytes sent by traffic class; `received` and `sent` count all bytes of the links.
        pushed_as: the class of pushes.
    """

    pushed_as = Traffic.GRADIENTS
    feedback = True

    def __init__(
        self,
        addresses: Sequence[Sequence[Address]],
        rank: int,
        job: Job,
        token: str,
        times: Times | None = None,
    ) -> None:
        self.rank, self.job, self.times = rank, job, times or Times()
        self.name = f"worker {rank}"
        self.ledger = Ledger()
        self._addresses, self.token = addresses, token
        self._place: dict[int, tuple[int, int]] = {}
        for node, numbers in enumerate(job.part(len(addresses))):
            self._place |= {number: (node, local) for local, number in enumerate(numbers)}
        self._residuals: dict[int, Tensor] = {}
        self._disk = (0, 0)
        self._connections: list[_Connection] = []
        self._connect()

    @property
    def sent(self) -> int:
        """Bytes that left this worker, with headers, heartbeats and resends."""
        return sum(link.bytes_sent for one in self._connections for link in one.session.links.values())

    @property
    def received(self) -> int:
        """Bytes that arrived here."""
        return sum(link.bytes_received for one in self._connections for link in one.session.links.values())

    def _connect(self) -> None:
        """To all nodes, anew where one of them goes away meanwhile."""
        until = time.monotonic() + self.times.patience
        while True:
            statuses = [reach(one, self.token, self.name, self.times) for one in self._addresses]
            try:
                self._link(statuses)
            except (OSError, StepLost):
                for one in self._connections:
                    one.close()
                if time.monotonic() > until:
                    raise
                time.sleep(self.times.heartbeat)
            else:
                return

    def _link(self, statuses: Sequence[tuple[Address, dict[str, Any]]]) -> None:
        cluster = ",".join(status["incarnation"] for _, status in statuses)
        resume = min(status["step"] for _, status in statuses)
        self._connections = []
        for place, ((address, _), numbers) in enumerate(zip(statuses, self.job.part(len(statuses)), strict=True)):
            job = replace(self.job, layers=tuple(self.job.layers[one] for one in numbers))
            run = {"cluster": cluster, "resume": resume}
            self._connections.append(_Connection(self, address, job, run, len(self._addresses[place]) > 1))
            self._connections[-1].start()
        self.step = max(one.session.joins for one in self._connections)
        self._ended = [status["totals"] for _, status in statuses]

    # What a worker does with layers

    def push(self, layer: int, step: int, gradient: Tensor, samples: int = 0) -> Handle:
        """Sends the gradient of a layer, one flat float32 vector, which must stay as it is until `wait`. Every worker
        pushes each layer once in a step, in the same order.

        `samples`: the sum over the workers becomes a mean with these weights; 0: it is a plain sum.
        """
        node, local = self._place[layer]
        assert gradient.numel() == self.job.layers[layer].numel, gradient.shape
        return self._connections[node].push(layer, local, step, (gradient, samples))

    def pull(self, layer: int, step: int, out: Tensor) -> Handle:
        """Fills `out`, one flat vector, with a layer's parameters before `step`, when the step before has ended."""
        node, local = self._place[layer]
        assert out.numel() == self.job.layers[layer].numel, out.shape
        return self._connections[node].pull(layer, local, step, out)

    def wait(self, handle: Handle, seconds: float | None = None) -> None:
        """Returns when the gradient has arrived at the node, or the parameters here.

        Raises:
            StepLost: a node has started again; see `recover`.
            PeerLost: nothing came for too long.
        """
        for one in self._connections:
            if handle in one.handles:
                one.wait(lambda: not handle.left, handle.what, seconds)

    # The end of a step

    def totals(self, step: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over all workers of `values` (float64), and the norm of each trainable tensor's summed gradient, in
        the order of the layers. Waits for the gradients of all workers."""
        payload = memoryview(serialization.dumps({self.rank: values.double()}))
        for one in self._connections:
            one.ask(Frame(Kind.TOTALS, step=one.round, payload=payload))
        return self._joined([one.told(step) for one in self._connections])

    def ended(self, step: int) -> tuple[Tensor, Tensor]:
        """`totals` of a step that the nodes had ended when `recover` was called. Raises StepLost where they were not
        kept."""
        if self.step != step + 1 or not all(self._ended):
            raise step_lost(self.step)
        return self._joined([serialization.loads(one) for one in self._ended])

    def _joined(self, told: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        norms: list[list[float]] = [[] for _ in self.job.layers]
        for numbers, answer in zip(self.job.part(len(told)), told, strict=True):
            rest = iter(answer["norms"])
            for number in numbers:
                norms[number] = [next(rest) for _ in self.job.layers[number].tensors]
            self._disk = self._disk[0] + answer["disk"][0], self._disk[1] + answer["disk"][1]
        return told[0]["sums"], torch.tensor([norm for layer in norms for norm in layer])

    def move(self, step: int, scale: float, rate: float, following: float | None = None) -> None:
        """Ends the step, whose gradients were pushed: gradients times `scale`, AdamW with its rate times `rate`. Every
        worker decides the same. `following`: the rate expected of the next step, which the node then takes while its
        gradients still come, and undoes where that step is decided otherwise."""
        self._decide(step, {"scale": scale, "rate": rate, "following": following})
        self.step = step + 1

    def skip(self, step: int) -> None:
        """Drops the gradients of the step, which is then done again."""
        self._decide(step, {"scale": None, "rate": None, "following": None})

    def _decide(self, step: int, decision: dict[str, float | None]) -> None:
        payload = memoryview(serialization.dumps(decision))
        for one in self._connections:
            one.end_round(payload)

    def read(self) -> dict[str, float]:
        """Bytes that the nodes' disks have `read` and `written` for the steps that have ended since it was asked."""
        found, self._disk = self._disk, (0, 0)
        return dict(zip(("read", "written"), found, strict=True))

    def settle(self, step: int) -> None:
        """Returns when all nodes have committed `step` steps: they answer pulls then."""
        for numbers in self.job.part(len(self._addresses)):
            smallest = min(numbers, key=lambda one: self.job.layers[one].numel)
            self.wait(self.pull(smallest, step, torch.empty(self.job.layers[smallest].numel)))

    def recover(self) -> int:
        """Connects again after StepLost, and brings all nodes to the same step: the one to do again. Raises RunFailed
        where they stand further back than a restart explains."""
        for one in self._connections:
            one.close()
        before = self.step
        self._connect()
        if self.step < before - _BACK:
            raise RunFailed(
                f"The optimizer nodes stand at step {self.step}, and this worker at step {before}.",
                why="files of a node were removed or replaced while the run went on",
                do="put them back, or start a new run",
            )
        return self.step

    def close(self) -> None:
        """Leaves the run after what was sent has arrived; the others go on."""
        for one in self._connections:
            one.leave()

    # Encoding

    def encode(self, push: _Push, chunk: Chunk, agreed: Agreed, out: Tensor) -> tuple[Tensor, int]:
        """A chunk of a gradient as it is sent, if need be in the memory `out`, and the width of a value."""
        values = self.corrected(push, chunk)
        if self.job.push == "fp32" and agreed.workers == 1:
            return values, RAW
        bits = BITS[self.job.push]
        form = (bits, fixed_point.shift(bits, agreed.workers))
        if bits == 8 and not self._feeds_back:
            key = xxhash.xxh3_64_intdigest(repr((self.rank, push.step, push.layer, chunk.index)).encode())
            return fixed_point.encode_stochastic(values, agreed.shared, form, key, out), 1
        residual = self._residual(push.layer, chunk) if bits == 8 else None
        return fixed_point.encode(values, agreed.shared, form, residual, out), bits // 8

    @property
    def _feeds_back(self) -> bool:
        return self.job.push == "int8" and self.feedback

    def corrected(self, push: _Push, chunk: Chunk) -> Tensor:
        """A chunk of a gradient as it is to be sent: weighted, with what earlier steps left out."""
        values = push.values[chunk.start : chunk.stop]
        if push.samples:
            values = values * push.samples
        return values + self._residual(push.layer, chunk) if self._feeds_back else values

    def _residual(self, layer: int, chunk: Chunk) -> Tensor:
        if layer not in self._residuals:
            self._residuals[layer] = torch.zeros(self.job.layers[layer].numel)
        return self._residuals[layer][chunk.start : chunk.stop]


class _Connection:
    """What a client has with one node: two links, a thread for exponents and one for pushes. Has state."""

    def __init__(self, client: Client, address: Address, job: Job, run: dict[str, Any], standby: bool) -> None:
        self.client, self.job = client, job
        self.chunks = [chunks_of(job, number) for number in range(len(job.layers))]
        greeting = {"rank": client.rank, "job": summary(job), "workers": 1} | run
        self._standby = standby
        times = replace(client.times, patience=client.times.silence) if standby else client.times
        self.session = Session(client.name, times, (address, client.token), greeting, self)
        self.handles: set[Handle] = set()
        self.round = 0
        self._changed = threading.Condition()
        self._agreed: dict[tuple[int, int], Agreed] = {}
        self._pulls: dict[tuple[int, int], list[_Pull]] = {}
        self._told: dict[int, Any] = {}
        self._error: EspalierError | None = None
        self._threads: list[threading.Thread] = []
        self._preparing: SimpleQueue[tuple[_Push, int] | None] = SimpleQueue()
        self._pushing: SimpleQueue[tuple[_Push, int] | None] = SimpleQueue()
        self._free: SimpleQueue[Tensor | None] = SimpleQueue()
        size = max((chunk.elements for one in self.chunks for chunk in one), default=0) * BITS[job.push] // 8
        for _ in range(CODING):
            self._free.put(torch.empty(size, dtype=torch.uint8))

    def start(self) -> None:
        """Connects, and begins to send."""
        self.session.start()
        self.round = self.session.first
        for work in (self._prepare, self._push):
            self._threads.append(threading.Thread(target=self._guarded, args=(work,), daemon=True))
            self._threads[-1].start()

    # Calls

    def push(self, layer: int, local: int, step: int, what: tuple[Tensor, int]) -> Handle:
        """See Client."""
        handle = Handle(f"the arrival of the gradient of layer {layer} at step {step}", len(self.chunks[local]))
        with self._changed:
            self.handles.add(handle)
        values = what[0].detach().reshape(-1).to("cpu", torch.float32).contiguous()
        self._preparing.put((_Push(layer, step, self.round, values, what[1], handle), local))
        return handle

    def pull(self, layer: int, local: int, step: int, out: Tensor) -> Handle:
        """See Client."""
        handle = Handle(f"the parameters of layer {layer} at step {step}", len(self.chunks[local]))
        with self._changed:
            self.handles.add(handle)
            self._pulls.setdefault((local, step), []).append(_Pull(layer, step, out.view(-1), handle))
        self.ask(Frame(Kind.PULL, local, step))
        return handle

    def end_round(self, decision: memoryview) -> None:
        """Tells it how."""
        self.ask(Frame(Kind.MOVE, step=self.round, payload=decision))
        self.round += 1

    def ask(self, frame: Frame) -> None:
        """Sends a request. Raises what `wait` raises."""
        try:
            self.session.ask(frame)
        except EspalierError as error:
            self.lost(error)
            assert self._error is not None
            raise self._error from error

    def told(self, step: int) -> dict[str, Any]:
        """The answer to TOTALS."""
        self.wait(lambda: self.round in self._told, f"the totals of step {step}")
        return self._told.pop(self.round)

    def wait(self, ready: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Until `ready`, or too long."""
        allowed = self.client.times.answer if seconds is None else seconds
        with self._changed:
            if not self._changed.wait_for(lambda: ready() or self._error is not None, allowed):
                raise wire.late(self.client.name, f"{what} from {self.session.peer}", allowed)
            if not ready() and self._error is not None:
                raise self._error
            self.handles = {one for one in self.handles if one.left}

    def leave(self) -> None:
        """See Client.close."""
        if self._error is None:
            self.session.leave()
        self.close()
        with self._changed:  # for a push that still waits for others
            self._error = self._error or RunFailed(f"{self.client.name} has left {self.session.peer}.")
            self._changed.notify_all()
        for link in self.session.links.values():
            link.join()
        for thread in self._threads:
            thread.join(self.client.times.silence)

    def close(self) -> None:
        """At once."""
        for queue in (self._preparing, self._pushing, self._free):
            queue.put(None)
        self.session.close()

    # Threads

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except EspalierError as error:
            self.lost(error)

    def _prepare(self) -> None:
        while (found := self._preparing.get()) is not None:
            push, local = found
            parts = [fixed_point.exponents(self.client.corrected(push, chunk)) for chunk in self.chunks[local]]
            shared = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
            self.session.ask(Frame(Kind.EXPONENTS, local, push.round, count=1, payload=shared.numpy().data))
            self._pushing.put((push, local))

    def _push(self) -> None:
        while (found := self._pushing.get()) is not None:
            push, local = found
            key = (push.round, local)
            what = f"the exponents of layer {push.layer} at step {push.step}, which other workers have to push too,"
            self.wait(lambda: key in self._agreed, what)  # noqa: B023
            agreed, at = self._agreed.pop(key), 0
            for chunk in self.chunks[local]:
                stop = at + fixed_point.blocks(chunk.elements)
                mine = Agreed(agreed.shared[at:stop], agreed.workers)
                at = stop
                room = self._free.get()
                if room is None:
                    return
                codes, width = self.client.encode(push, chunk, mine, room)
                payload = bytes_of(codes)
                frame = Frame(Kind.GRADIENT, local, push.round, chunk.index, width, push.samples, payload)
                self.session.links["push"].send(
                    frame, partial(self._pushed, push.handle, room, codes), wait=self.client.times.answer
                )
                self.client.ledger.add(self.client.pushed_as, "send", payload.nbytes)

    def _pushed(self, handle: Handle, room: Tensor, codes: Tensor) -> None:
        """`codes`: what was sent, which had to live until now."""
        self._free.put(room)
        self._part(handle)

    def _part(self, handle: Handle) -> None:
        with self._changed:
            handle.left -= 1
            if not handle.left:
                self._changed.notify_all()

    # What arrives

    def buffer(self, frame: Frame, size: int) -> memoryview:
        """Parameters go straight to where they are wanted, if they have the same form there."""
        if frame.kind == Kind.PARAMETERS:
            pull, chunk = self._pulled(frame)
            out = pull.out[chunk.start : chunk.stop]
            if out.device.type == "cpu" and out.dtype == PULLED[self.job.pull] and out.is_contiguous():
                return bytes_of(out)
        return memoryview(bytearray(size))

    def deliver(self, frame: Frame) -> None:
        """An answer of the node."""
        if frame.kind == Kind.PARAMETERS:
            pull, chunk = self._pulled(frame)
            out = pull.out[chunk.start : chunk.stop]
            values = torch.frombuffer(frame.payload, dtype=PULLED[self.job.pull])
            if values.data_ptr() != out.data_ptr():
                out.copy_(values)
            last = chunk.stop == pull.out.numel()
            if last:
                self._pulls[frame.layer, frame.step].pop(0)
            self._part(pull.handle)
            return
        with self._changed:
            if frame.kind == Kind.EXPONENTS:
                shared = torch.frombuffer(frame.payload, dtype=torch.uint8)
                self._agreed[frame.step, frame.layer] = Agreed(shared, frame.count)
            elif frame.kind == Kind.TOTALS:
                self._told[frame.step] = serialization.loads(frame.payload)
            elif frame.kind == Kind.ERROR:
                self._error = from_words(serialization.loads(frame.payload))
            self._changed.notify_all()

    def _pulled(self, frame: Frame) -> tuple[_Pull, Chunk]:
        return self._pulls[frame.layer, frame.step][0], self.chunks[frame.layer][frame.chunk]

    def lost(self, error: EspalierError) -> None:
        """The node is gone, or has forgotten this worker. Where there is a standby, that one has the step."""
        with self._changed:
            if self._standby and isinstance(error, PeerLost):
                error = step_lost(self.client.step)
            self._error = self._error or error
            self._changed.notify_all()
