"""Client of optimizer nodes on a worker: push gradients and pull parameters, layer by layer, in the background.

After LuWu (arXiv 2409.00918), section 4: `push`, `pull` and `wait`. Pushes and pulls are two independent streams, each
in the order of the calls. A push first tells the node the exponents of the gradient
(kernels/fixed_point.py), and while the answer is on its way those of the next layer follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import xxhash
from torch import Tensor

from espalier.comm.base import Ledger, Traffic
from espalier.kernels import fixed_point
from espalier.mechanisms.optimizer_node import wire
from espalier.mechanisms.optimizer_node.reduction import SharedExponents
from espalier.mechanisms.optimizer_node.residuals import PushResiduals
from espalier.mechanisms.optimizer_node.session import Session, reach
from espalier.mechanisms.optimizer_node.wire import RAW, Address, Frame, FrameKind, Times, packed
from espalier.parallel.layer_client import StepLost, step_lost
from espalier.plan.axes.node_layout import BITS, LayerChunk, NodeJob
from espalier.recipe import serialization
from espalier.recipe.errors import EspalierError, PeerLost, RunFailed, from_words
from espalier.store.direct_io import bytes_of

CODING = 3
"""Chunks of pushed integers on their way to one node."""
_BACK = 2
"""Steps that nodes may lose: one that was not committed, and one whose generation is damaged."""


@dataclass(eq=False)
class NodeTransfer:
    """A push or pull on its way. Has state.

    Attributes:
        what: in messages.
        layer: in the job of the client; `local`: in that of the node.
        tensor: what is pushed, or where it is pulled to.
        left: chunks that have not arrived.
        round: of a push.
        residual: that is added to a push, where there is one.
    """

    what: str
    connection: _NodeConnection
    layer: int
    local: int
    step: int
    tensor: Tensor
    left: int
    round: int = 0
    residual: Tensor | None = None


class Client:
    """Pushes and pulls the layers of a job. Has state: threads and connections, until `close`.

    Args:
        addresses: of each node: its own, and behind it those of its standbys.
        rank: of this worker.
        job: all layers; those of each node are `job.parts(len(addresses))`.
        token: of the run.
        times: seconds of the protocol.

    Attributes:
        feedback: of 8-bit pushes what rounding leaves is kept for the next step, 4 bytes a parameter; else they are
            rounded at random.
        residuals: where it is kept.
        step: that the nodes stand at, or are on their way to; at first, the one that this worker begins with.
        ledger: bytes sent by traffic class.
        pushed_as: the class of pushes.
    """

    pushed_as = Traffic.GRADIENTS
    feedback = True

    def __init__(
        self,
        addresses: Sequence[Sequence[Address]],
        rank: int,
        job: NodeJob,
        token: str,
        times: Times | None = None,
    ) -> None:
        self.rank = rank
        self.job = job
        self.times = times or Times()
        self.name = f"worker {rank}"
        self.ledger = Ledger()
        self._addresses = addresses
        self.token = token
        self._parts = job.parts(len(addresses))
        self._place = {
            number: (node, local)
            for node, (numbers, _) in enumerate(self._parts)
            for local, number in enumerate(numbers)
        }
        self.residuals = PushResiduals(job)
        self._disk = (0, 0)
        self._connections: list[_NodeConnection] = []
        self._connect()

    def _connect(self) -> None:
        """To all nodes, anew where one of them goes away meanwhile."""
        until = time.monotonic() + self.times.patience
        while True:
            replies = [reach(addresses, self.token, self.name, self.times) for addresses in self._addresses]
            try:
                self._link(replies)
            except (OSError, StepLost):
                for connection in self._connections:
                    connection.close()
                if time.monotonic() > until:
                    raise
                time.sleep(self.times.heartbeat)
            else:
                return

    def _link(self, replies: Sequence[tuple[Address, dict[str, Any]]]) -> None:
        statuses = [status for _, status in replies]
        cluster = ",".join(status["incarnation"] for status in statuses)
        resume = min(status["step"] for status in statuses)
        self._connections = []
        for node, (address, _) in enumerate(replies):
            run = {"cluster": cluster, "resume": resume}
            self._connections.append(_NodeConnection(self, node, address, run))
            self._connections[-1].start()
        self.step = max(connection.joins for connection in self._connections)
        self._ended = [status["totals"] for status in statuses]

    # What a worker does with layers

    def push(self, layer: int, step: int, gradient: Tensor) -> NodeTransfer:
        """Sends the gradient of a layer, one flat float32 vector, which must stay as it is until `wait`. Every worker
        pushes each layer once in a step, in the same order.
        """
        values = gradient.detach().reshape(-1).to("cpu", torch.float32).contiguous()
        what = f"the arrival of the gradient of layer {layer} at step {step}"
        transfer = self._transfer(what, layer, step, values)
        transfer.round = transfer.connection.round
        transfer.connection.preparing.put(transfer)
        return transfer

    def pull(self, layer: int, step: int, out: Tensor) -> NodeTransfer:
        """Fills `out`, one flat vector, with a layer's parameters before `step`, when the step before has ended."""
        what = f"the parameters of layer {layer} at step {step}"
        transfer = self._transfer(what, layer, step, out.view(-1))
        transfer.connection.pull(transfer)
        return transfer

    def _transfer(self, what: str, layer: int, step: int, tensor: Tensor) -> NodeTransfer:
        node, local = self._place[layer]
        assert tensor.numel() == self.job.layers[layer].numel, tensor.shape
        connection = self._connections[node]
        return NodeTransfer(what, connection, layer, local, step, tensor, len(connection.chunks[local]))

    def wait(self, handle: NodeTransfer) -> None:
        """Returns when the gradient has arrived at the node, or the parameters here. What was on its way when `recover`
        was called is void.

        Raises:
            StepLost: a node has started again; see `recover`.
            PeerLost: nothing came for too long.
        """
        if handle.connection in self._connections:
            handle.connection.wait(lambda: not handle.left, handle.what)

    # The end of a step

    def totals(self, step: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over all workers of `values` (float64), and the norm of each trainable tensor's summed gradient, in
        the order of the layers. Waits for the gradients of all workers."""
        payload = packed({self.rank: values.double()})
        for connection in self._connections:
            connection.ask(Frame(FrameKind.TOTALS, step=connection.round, payload=payload))
        return self._joined([connection.totals(step) for connection in self._connections])

    def ended(self, step: int) -> tuple[Tensor, Tensor]:
        """`totals` of a step that the nodes had ended when `recover` was called. Raises StepLost where they were not
        kept."""
        if self.step != step + 1 or not all(self._ended):
            raise step_lost(self.step)
        return self._joined([serialization.loads(totals) for totals in self._ended])

    def _joined(self, answers: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        norms: list[list[float]] = [[] for _ in self.job.layers]
        for (numbers, _), answer in zip(self._parts, answers, strict=True):
            rest = iter(answer["norms"])
            for number in numbers:
                norms[number] = [next(rest) for _ in self.job.layers[number].tensors]
            read, written = answer["disk"]
            self._disk = self._disk[0] + read, self._disk[1] + written
        return answers[0]["sums"], torch.tensor([norm for layer in norms for norm in layer])

    def move(self, step: int, scale: float, rate: float, following: float | None = None) -> None:
        """Ends the step, whose gradients were pushed: gradients times `scale`, AdamW with its rate times `rate`. Every
        worker decides the same. `following`: the rate expected of the next step, which the node then takes while its
        gradients still come, and undoes where that step is decided otherwise."""
        payload = packed({"scale": scale, "rate": rate, "following": following})
        for connection in self._connections:
            connection.ask(Frame(FrameKind.MOVE, step=connection.round, payload=payload))
            connection.round += 1
        self.step = step + 1

    def read(self) -> dict[str, float]:
        """Bytes that the nodes' disks have `read` and `written` for the steps that have ended since it was asked."""
        (read, written), self._disk = self._disk, (0, 0)
        return {"read": read, "written": written}

    def settle(self, step: int) -> None:
        """Returns when all nodes have committed `step` steps: they answer pulls then."""
        for numbers, _ in self._parts:
            sizes = {number: self.job.layers[number].numel for number in numbers}
            smallest = min(numbers, key=sizes.__getitem__)
            self.wait(self.pull(smallest, step, torch.empty(sizes[smallest])))

    def recover(self) -> int:
        """Connects again after StepLost, and brings all nodes to the same step: the one to do again. Raises RunFailed
        where they stand further back than a restart explains."""
        for connection in self._connections:
            connection.close()
        before = self.step
        self._connect()
        if self.step < before - _BACK:
            raise RunFailed(
                f"The optimizer nodes stand at step {self.step}, and this worker at step {before}.",
                why="files of a node were removed or replaced while the run went on",
                do="put them back, or start a new run",
            )
        return self.step

    def close(self, leave: bool = True) -> None:
        """Leaves the run after what was sent has arrived; the others go on. Not `leave`: as a process that is killed,
        which the nodes wait for where a step needs all workers."""
        for connection in self._connections:
            connection.end(leave)
        self.residuals.close()

    # Encoding

    def encode(self, push: NodeTransfer, chunk: LayerChunk, shared: SharedExponents, out: Tensor) -> tuple[Tensor, int]:
        """A chunk of a gradient as it is sent, if need be in the memory `out`, and the width of a value."""
        values = self.corrected(push, chunk)
        if self.job.push == "fp32" and shared.workers == 1:
            return values, RAW
        bits = BITS[self.job.push]
        form = (bits, fixed_point.shift(bits, shared.workers))
        rounding: Tensor | int | None = None
        if push.residual is not None:
            rounding = push.residual[chunk.start : chunk.stop]
        elif bits == 8:
            seed = repr((self.rank, push.step, push.layer, chunk.index))
            rounding = xxhash.xxh3_64_intdigest(seed.encode())
        return fixed_point.encode(values, shared.values, form, out, rounding), bits // 8

    def corrected(self, push: NodeTransfer, chunk: LayerChunk) -> Tensor:
        """A chunk of a gradient as it is to be sent: with what earlier steps left out."""
        values = push.tensor[chunk.start : chunk.stop]
        return values if push.residual is None else values + push.residual[chunk.start : chunk.stop]


class _NodeConnection(Session):
    """What a client has with one node: a thread for exponents and one for pushes. Has state.

    Attributes:
        round: of the node, that this worker is in.
        preparing: pushes whose exponents the node has not been told yet.
    """

    def __init__(self, client: Client, node: int, address: Address, run: wire.Greeting) -> None:
        self.client = client
        self.job = client._parts[node][1]
        addresses = client._addresses[node]
        self._standby = len(addresses) > 1
        greeting = run | {"rank": client.rank, "workers": 1}
        place = (address, client.token)
        super().__init__(client.name, client.times.to(addresses), place, self.job, greeting)
        self.chunks = self.job.chunks
        self.round = 0
        self.preparing: SimpleQueue[NodeTransfer | None] = SimpleQueue()
        self._pushing: SimpleQueue[NodeTransfer | None] = SimpleQueue()
        self._free: SimpleQueue[Tensor | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._agreed: dict[tuple[int, int], SharedExponents] = {}
        self._pulls: dict[tuple[int, int], list[NodeTransfer]] = {}
        self._totals: dict[int, Any] = {}
        self._error: EspalierError | None = None
        self._threads: list[threading.Thread] = []
        size = self.job.largest * BITS[self.job.push] // 8
        for _ in range(CODING):
            self._free.put(torch.empty(size, dtype=torch.uint8))

    def start(self) -> None:
        """Connects, and begins to send."""
        super().start()
        self.round = self.first
        for work in (self._prepare, self._push):
            thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
            self._threads.append(thread)
            thread.start()

    # Calls

    def pull(self, transfer: NodeTransfer) -> None:
        place = transfer.local, transfer.step
        with self._changed:
            self._pulls.setdefault(place, []).append(transfer)
        self.ask(Frame(FrameKind.PULL, *place))

    def ask(self, frame: Frame) -> None:
        """Sends a request. Raises what `wait` raises."""
        try:
            super().ask(frame)
        except EspalierError as error:
            self.lost(error)
            assert self._error is not None
            raise self._error from error

    def totals(self, step: int) -> dict[str, Any]:
        """The answer to TOTALS."""
        self.wait(lambda: self.round in self._totals, f"the totals of step {step}")
        return self._totals.pop(self.round)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until `ready`, or too long."""
        allowed = self.times.answer
        with self._changed:
            if not self._changed.wait_for(lambda: ready() or self._error is not None, allowed):
                raise wire.late(self.name, f"{what} from {self.peer}", allowed)
            if not ready() and self._error is not None:
                raise self._error

    def end(self, leave: bool) -> None:
        if leave and self._error is None:
            self.leave()
        self.close()
        # for a push that still waits for others
        self._fail(RunFailed(f"{self.name} has left {self.peer}."))
        for link in self.links.values():
            link.join()
        for thread in self._threads:
            thread.join(self.client.times.silence)

    def close(self) -> None:
        """At once."""
        for queue in (self.preparing, self._pushing, self._free):
            queue.put(None)
        super().close()

    # Threads

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except EspalierError as error:
            self.lost(error)

    def _prepare(self) -> None:
        while push := self.preparing.get():
            if self.job.push == "int8" and self.client.feedback:
                push.residual = self.client.residuals.of(push.layer, push.step)
            exponents = [torch.empty(0, dtype=torch.uint8)]
            for chunk in self.chunks[push.local]:
                exponents.append(fixed_point.exponents(self.client.corrected(push, chunk)))
            self.ask(SharedExponents(torch.cat(exponents), 1).frame(push.local, push.round))
            self._pushing.put(push)

    def _push(self) -> None:
        while push := self._pushing.get():
            key = (push.round, push.local)
            what = f"the exponents of layer {push.layer} at step {push.step}, which other workers have to push too,"
            self.wait(lambda: key in self._agreed, what)  # noqa: B023
            agreed = self._agreed.pop(key)
            at = 0
            for chunk in self.chunks[push.local]:
                stop = at + fixed_point.blocks(chunk.elements)
                shared = SharedExponents(agreed.values[at:stop], agreed.workers)
                at = stop
                room = self._free.get()
                if room is None:
                    return
                codes, width = self.client.encode(push, chunk, shared, room)
                if push.residual is not None and chunk is self.chunks[push.local][-1]:
                    self.client.residuals.keep(push.layer, push.step + 1, push.residual)  # before all has arrived
                payload = bytes_of(codes)
                place = push.local, push.round, chunk.index, width
                frame = Frame(FrameKind.GRADIENT, *place, payload=payload)
                arrived = partial(self._pushed, push, room, codes)
                self.links["push"].send(frame, arrived, wait=self.times.answer)
                self.client.ledger.add(self.client.pushed_as, "send", payload.nbytes)

    def _pushed(self, push: NodeTransfer, room: Tensor, codes: Tensor) -> None:
        """`codes`: what was sent, which had to live until now."""
        self._free.put(room)
        self._arrived(push)

    def _arrived(self, transfer: NodeTransfer) -> None:
        with self._changed:
            transfer.left -= 1
            if not transfer.left:
                self._changed.notify_all()

    # What arrives

    def buffer(self, frame: Frame, size: int) -> memoryview:
        """Parameters go straight to where they are wanted, if they can."""
        if frame.kind == FrameKind.PARAMETERS:
            out = self._wanted(frame)
            if out.device.type == "cpu" and out.is_contiguous():
                return bytes_of(out)
        return super().buffer(frame, size)

    def deliver(self, frame: Frame) -> None:
        """An answer of the node."""
        if frame.kind == FrameKind.PARAMETERS:
            out = self._wanted(frame)
            values = torch.frombuffer(frame.payload, dtype=torch.float32)
            if values.data_ptr() != out.data_ptr():
                out.copy_(values)
            pulls = self._pulls[frame.layer, frame.step]
            self._arrived(pulls[0] if frame.chunk + 1 < len(self.chunks[frame.layer]) else pulls.pop(0))
            return
        with self._changed:
            if frame.kind == FrameKind.EXPONENTS:
                self._agreed[frame.step, frame.layer] = SharedExponents.of(frame)
            elif frame.kind == FrameKind.TOTALS:
                self._totals[frame.step] = frame.content
            elif frame.kind == FrameKind.ERROR:
                self._error = from_words(frame.content)
            self._changed.notify_all()

    def _wanted(self, frame: Frame) -> Tensor:
        """Where the chunk in a frame of parameters is pulled to."""
        chunk = self.chunks[frame.layer][frame.chunk]
        return self._pulls[frame.layer, frame.step][0].tensor[chunk.start : chunk.stop]

    def lost(self, error: EspalierError) -> None:
        """The node is gone, or has forgotten this worker. Where there is a standby, that one has the step."""
        lost = self._standby and isinstance(error, PeerLost)
        self._fail(step_lost(self.client.step) if lost else error)

    def _fail(self, error: EspalierError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
