"""Compressed collectives: what a Channel does for a class of traffic that has a codec.

Reductions are a direct exchange: each rank encodes the parts of the others once, the owner of a part adds what comes,
in rank order and in full precision, and the sum is encoded once more for everybody, its owner included, so that all
ranks end with the same bits. That is one lossy step for each contribution and one for the sum, whatever the number of
ranks (a ring of N ranks has N - 1). Parts are cut into pieces, so that encoding, sending and decoding overlap.

With a residual (`base.feedback`) what is lost is added to what is sent next: the sum over steps of what arrives is the
sum of what was given, less what the residuals hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Work

from espalier.comm import wire_format
from espalier.comm.base import Codec, Spent, check_feedback, stays
from espalier.comm.comm_thread import CommThread, QueuedWork
from espalier.comm.wire_format import Bucket
from espalier.kernels import accelerator
from espalier.recipe.errors import UserError

PIECE = 2**18
"""Values encoded at once: at 100 Mbit/s and 8 bits 21 ms on the wire, 50 µs and more in a codec."""
ALIGNED = 1024
"""Parts begin at multiples of this: the largest block of any codec."""
SMALL = 2**14
"""Bytes of a tensor below which it is sent as it is: at 100 Mbit/s they take 1.3 ms, which a header and a second phase
would cost too."""
MESSAGES = ("send", "ring")
"""From one rank to one other."""
NAME = 64
"""Bytes of a codec's name that ranks compare."""

Start = Callable[[Callable[[Spent], None]], QueuedWork]
"""Launches a collective; what is given is called with what it took."""


def parts(elements: int, ranks: int) -> list[int]:
    """Where each rank's part of a tensor begins, and the end: equal parts but for the last, aligned."""
    each = -(-elements // (ranks * ALIGNED)) * ALIGNED
    return [min(rank * each, elements) for rank in range(ranks)] + [elements]


def pieces(start: int, stop: int) -> list[slice]:
    """A part, piece by piece."""
    return [slice(a, min(a + PIECE, stop)) for a in range(start, stop, PIECE)]


def sent_bytes(codec: Codec, operation: str, elements: Any, place: tuple[int, int], width: int = 4) -> Any:
    """Bytes that a rank sends in an encoded collective of tensors of `elements` values (NumPy arrays allowed), headers
    included: exact for codecs of fixed length while all values are finite, else at most that.

    Args:
        operation: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`, or `send` and `ring` (one message).
        elements: of the whole tensor, a multiple of the ranks but in an all-reduce and a message.
        place: the rank (the first sends most) and the number of ranks.
        width: bytes of a value; lossy codecs work on four or more.
    """
    width = width if codec.lossless else max(4, width)
    (rank, ranks), elements = place, np.asarray(elements)
    if operation in MESSAGES:
        return wire_format.most_bytes(codec, elements, width)
    if operation != "all_reduce":
        return (ranks - 1) * _part_bytes(codec, elements // ranks, width)
    each = -(-elements // (ranks * ALIGNED)) * ALIGNED
    whole, rest = np.divmod(elements, np.maximum(1, each))
    mine = _part_bytes(codec, np.clip(elements - rank * each, 0, each), width)
    every = whole * _part_bytes(codec, each, width) + _part_bytes(codec, rest, width)
    return every + (ranks - 2) * mine


def ratio(codec: Codec) -> float:
    """float32 bytes over encoded bytes of a whole piece, where the codec's length is fixed; else 1."""
    return 4 * PIECE / float(wire_format.most_bytes(codec, PIECE, 4)) if codec.fixed else 1.0


def _part_bytes(codec: Codec, elements: Any, width: int) -> Any:
    """Bytes of one part, piece by piece."""
    full, rest = np.divmod(elements, PIECE)
    return full * wire_format.most_bytes(codec, PIECE, width) + (rest > 0) * wire_format.most_bytes(codec, rest, width)


@dataclass
class CodedCollectives:
    """Encoded collectives of one class in one group. Has state: the lane, and how many collectives there were.

    Attributes:
        codec: of all messages.
        inner: a group of its own, with `send` and `recv` (Gloo's methods).
        place: this rank and the number of ranks in it.
        kind: the traffic class.
        members: global ranks, for messages.
        timeout: of every wait.
    """

    codec: Codec
    inner: Any
    place: tuple[int, int]
    kind: str
    members: Sequence[int]
    timeout: Callable[[], timedelta]
    lane: CommThread = field(init=False)
    number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.lane = CommThread(f"espalier-{self.kind}")
        self._warm()
        self._agree()

    def _warm(self) -> None:
        """Kernels are compiled at their first use, for seconds: now, while nobody waits for a message of this rank."""
        sample = torch.zeros(ALIGNED)
        wire = self.codec.encode(sample)
        if wire is not None:
            self.codec.decode(wire, sample)

    def _agree(self) -> None:
        """Raises UserError when the ranks' codecs differ."""
        mine = self.codec.name.encode()[:NAME].ljust(NAME)
        mark = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        there = self.everyone(mark)
        names = [bytes(row.numpy()).decode().strip() for row in there]
        if len(set(names)) > 1:
            shown = ", ".join(f"rank {self.members[rank]} has {name!r}" for rank, name in enumerate(names[:8]))
            raise UserError(
                f"Ranks disagree about the codec of {self.kind}: {shown}.",
                do="give every rank the same recipe and plan",
            )

    # --- what Channels ask -------------------------------------------------------------------------------------------

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is worth encoding, and can be. The same on all ranks for tensors of one size."""
        return tensor.nbytes >= SMALL and self.carries(tensor)

    def carries(self, tensor: Tensor) -> bool:
        """Whether the codec takes the dtype."""
        return tensor.is_floating_point() and tensor.element_size() in (2, 4, 8)

    def all_reduce(self, tensor: Tensor, residual: Tensor | None, average: bool) -> Start:
        """The sum (or mean) of all ranks' `tensor` [n], in place, with the same bits on all.

        Raises UserError: a residual, and a codec with which feedback diverges."""
        self._check(residual)
        return lambda booked: self.launch(lambda job: job.all_reduce(tensor, residual, average), booked)

    def reduce_scatter(self, output: Tensor, input: Tensor, residual: Tensor | None, average: bool) -> Start:
        """Rank r gets the sum (or mean) of all ranks' r-th part of `input` [ranks * m], in `output` [m].

        Raises UserError as `all_reduce`."""
        self._check(residual)
        return lambda booked: self.launch(lambda job: job.reduce_scatter(output, input, residual, average), booked)

    def all_gather(self, output: Tensor, input: Tensor) -> Start:
        """Every rank gets all ranks' `input` [m] in `output` [ranks * m], its own as the others see it."""
        return lambda booked: self.launch(lambda job: job.all_gather(output, input), booked)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Start:
        """Rank r gets every rank's r-th of `inputs`. Parts may have any sizes; small ones go as they are."""
        return lambda booked: self.launch(lambda job: job.all_to_all(outputs, inputs), booked)

    def send(self, tensor: Tensor, peer: int, tag: int) -> tuple[list[Work], int]:
        """Works of the sends of `tensor` to `peer`, and their bytes."""
        sends, _ = wire_format.seal(
            self.codec, _flat(tensor, self.codec), Bucket(self.kind, 0, self.members[self.place[0]])
        )
        works = [self.inner.send([part], peer, _tag(tag, index)) for index, part in enumerate(sends)]
        return works, sum(send.numel() for send in sends)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> tuple[Work, Callable[[], None]]:
        """Work of the first send from `peer`, and what is left to do when it is here."""
        like = _flat(tensor, self.codec)
        first = self.room_for(like)
        work = self.inner.recv([first], peer, _tag(tag, 0))
        origin = (Bucket(self.kind, 0), self.members[peer])

        def finish() -> None:
            rest = self.rest_of(first, like, origin, (peer, _tag(tag, 1)))
            values = wire_format.opened(self.codec, (first, rest), like, origin)
            tensor.detach().copy_(values.view(tensor.shape))

        return work, finish

    def room_for(self, like: Tensor) -> Tensor:
        """[bytes] for the first send of a message of what is `like` this."""
        return torch.empty(wire_format.first_bytes(self.codec, like.numel(), like.element_size()), dtype=torch.uint8)

    def rest_of(
        self, first: Tensor, like: Tensor, origin: tuple[Bucket, int], source: tuple[int, int]
    ) -> Tensor | None:
        """The second send of a message by its `first`, from a `source` (rank, tag), once it is here; None: it has
        none."""
        header = wire_format.header_of(first, self.codec, like, origin)
        if not header.rest:
            return None
        rest = torch.empty(header.rest, dtype=torch.uint8)
        self.inner.recv([rest], *source).wait(self.timeout())
        return rest

    def _check(self, residual: Tensor | None) -> None:
        if residual is not None:
            check_feedback(self.codec)

    def everyone(self, row: Tensor) -> list[Tensor]:
        """Every rank's `row` (of one shape and dtype), as it is. Only inside a job of the lane."""
        rank, ranks = self.place
        there = [torch.empty_like(row) for _ in range(ranks)]
        there[rank] = row
        others = [peer for peer in range(ranks) if peer != rank]
        coming = [self.inner.recv([there[peer]], peer, 0) for peer in others]
        going = [self.inner.send([row], peer, 0) for peer in others]
        for work in (*coming, *going):
            work.wait(self.timeout())
        return there

    def close(self) -> None:
        """Ends the thread."""
        self.lane.close()

    def launch(self, act: Callable[[_Job], None], booked: Callable[[Spent], None]) -> QueuedWork:
        """Runs `act` with a job of the lane; `booked` is called with what it took."""
        self.number += 1
        job = _Job(self, Bucket(self.kind, self.number, self.members[self.place[0]]))
        after = following()

        def run() -> None:
            with torch.no_grad(), after:
                act(job)
                job.finish()
            booked(Spent(job.sent, job.raw, job.seconds, job.lost, job.given))

        return self.lane.put(run)


class _Coming(NamedTuple):
    """A message under way: its source, its first send, and what it will be."""

    source: int
    first: Tensor
    work: Work
    like: Tensor


class _Job:
    """One collective while it runs in the lane. Has state: the sends under way, and what it takes (see `Spent`)."""

    def __init__(self, coded: CodedCollectives, bucket: Bucket) -> None:
        self.coded = coded
        self.codec = coded.codec
        self.inner = coded.inner
        self.bucket = bucket
        self.rank, self.ranks = coded.place
        self.members = coded.members
        self.timeout = coded.timeout
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.sent = self.raw = 0
        self.seconds = self.lost = self.given = 0.0
        self._going: list[Work] = []

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, values: Tensor, peers: Sequence[int]) -> Tensor | None:
        """Sends `values` [n] to `peers`. Returns the encoded bytes, None where they go as they are."""
        begun = time.perf_counter()
        sends, raw = wire_format.seal(self.codec, values, self.bucket)
        self.seconds += time.perf_counter() - begun
        self.raw += len(peers) * values.nbytes
        for peer in peers:
            for index, part in enumerate(sends):
                self._going.append(self.inner.send([part], peer, index))
                self.sent += part.numel()
        if raw or self.codec.lossless:
            return None
        return sends[0][wire_format.HEADER :] if self.codec.fixed else sends[-1]

    def seen(self, values: Tensor, wire: Tensor | None) -> Tensor:
        """What was sent, as its receivers see it."""
        return values if wire is None else self.codec.decode(wire, values)

    def send_with_feedback(self, values: Tensor, peer: int, residual: Tensor) -> None:
        """Sends `values` and what is in `residual`, where what is lost stays."""
        wanted = values + residual.to(values.device)
        wire = self.send(wanted, [peer])
        if wire is None:
            residual.zero_()
        else:
            begun = time.perf_counter()
            rest = residual if residual.device == wanted.device else torch.empty_like(wanted)
            torch.sub(wanted, self.codec.decode(wire, wanted), out=rest)
            if rest is not residual:
                residual.copy_(rest)
            self.seconds += time.perf_counter() - begun
            self.lost += float(torch.dot(rest, rest))
            self.given += float(torch.dot(wanted, wanted))

    def expect(self, source: int, like: Tensor) -> _Coming:
        """Gets ready for a message from `source`."""
        first = self.coded.room_for(like)
        return _Coming(source, first, self.inner.recv([first], source, 0), like)

    def receive(self, coming: _Coming) -> Tensor:
        """The values of a message, once it is here."""
        origin = (self.bucket, self.members[coming.source])
        coming.work.wait(self.timeout())
        rest = self.coded.rest_of(coming.first, coming.like, origin, (coming.source, 1))
        begun = time.perf_counter()
        values = wire_format.opened(self.codec, (coming.first, rest), coming.like, origin)
        self.seconds += time.perf_counter() - begun
        return values

    def finish(self) -> None:
        """Returns when all that was sent has left."""
        for work in self._going:
            work.wait(self.timeout())

    # --- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, residual: Tensor | None, average: bool) -> None:
        flat = _flat(tensor, self.codec)
        values = self._carried(flat)
        ends = parts(flat.numel(), self.ranks)
        cut = [pieces(a, b) for a, b in pairwise(ends)]
        residual = None if self.codec.lossless else residual
        coming = self._scatter(values, cut, residual)
        sums = [(rank, piece, self.expect(rank, values[piece])) for rank in self.others for piece in cut[rank]]
        for piece, messages in zip(cut[self.rank], coming, strict=True):
            mine = values[piece] if residual is None else values[piece] + residual[piece].to(values.device)
            total = self._sum(mine, messages)
            seen = self.seen(total, self.send(total, self.others))
            if residual is not None:
                residual[piece] = 0 if seen is total else total - seen
            flat[piece] = self._mean(seen, average)
        for _, piece, message in sums:
            flat[piece] = self._mean(self.receive(message), average)
        _give_back(tensor, flat)

    def reduce_scatter(self, output: Tensor, input: Tensor, residual: Tensor | None, average: bool) -> None:
        values = self._carried(_flat(input, self.codec))
        each = output.numel()
        cut = [pieces(rank * each, (rank + 1) * each) for rank in range(self.ranks)]
        coming = self._scatter(values, cut, None if self.codec.lossless else residual)
        reduced = values.new_empty(each, dtype=output.dtype)
        for local, piece, messages in zip(pieces(0, each), cut[self.rank], coming, strict=True):
            reduced[local] = self._mean(self._sum(values[piece], messages), average)
        output.detach().copy_(reduced.view(output.shape))

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        mine = _flat(input, self.codec)
        each = mine.numel()
        gathered = mine.new_empty(self.ranks * each, dtype=output.dtype)
        cut = [pieces(rank * each, (rank + 1) * each) for rank in range(self.ranks)]
        coming = [(piece, self.expect(rank, gathered[piece])) for rank in self.others for piece in cut[rank]]
        for local, piece in zip(pieces(0, each), cut[self.rank], strict=True):
            gathered[piece] = self.seen(mine[local], self.send(mine[local], self.others))
        for piece, message in coming:
            gathered[piece] = self.receive(message)
        output.detach().copy_(gathered.view(output.shape))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        coming = []
        plain = []
        for source in self.others:
            target = outputs[source]
            if target.nbytes < SMALL:
                room = torch.empty(target.numel(), dtype=target.dtype)
                if target.numel():
                    plain.append((target, room, self.inner.recv([room], source, 2)))
                continue
            like = _flat(target, self.codec)
            coming += [(target, piece, self.expect(source, like[piece])) for piece in pieces(0, like.numel())]
        for peer in self.others:
            values = _flat(inputs[peer], self.codec)
            if values.nbytes >= SMALL:
                for piece in pieces(0, values.numel()):
                    self.send(values[piece], [peer])
            elif values.numel():
                self._going.append(self.inner.send([values.cpu()], peer, 2))
                self.sent += values.nbytes
                self.raw += values.nbytes
        outputs[self.rank].detach().copy_(inputs[self.rank].detach().view(outputs[self.rank].shape))
        for target, piece, message in coming:
            target.detach().view(-1)[piece] = self.receive(message).to(target.device)
        for target, room, work in plain:
            work.wait(self.timeout())
            target.detach().copy_(room.view(target.shape))

    # --- parts of them -----------------------------------------------------------------------------------------------

    def _carried(self, flat: Tensor) -> Tensor:
        """In the precision in which lossy codecs and sums work."""
        return flat if self.codec.lossless else flat.to(torch.promote_types(flat.dtype, torch.float32))

    def _scatter(self, values: Tensor, cut: list[list[slice]], residual: Tensor | None) -> list[list[_Coming]]:
        """Sends every other rank its part; returns what comes for each piece of this rank's own."""
        coming = [[self.expect(source, values[piece]) for source in self.others] for piece in cut[self.rank]]
        for index in range(max(map(len, cut))):
            for peer in self.others:
                if index >= len(cut[peer]):
                    continue
                piece = cut[peer][index]
                if residual is None:
                    self.send(values[piece], [peer])
                else:
                    self.send_with_feedback(values[piece], peer, residual[piece])
        return coming

    def _sum(self, mine: Tensor, coming: Sequence[_Coming]) -> Tensor:
        """The sum in rank order."""
        rows = mine.new_empty(self.ranks, mine.numel())
        rows[self.rank] = mine
        for message in coming:
            rows[message.source] = self.receive(message)
        return rows.sum(0, dtype=rows.dtype)

    def _mean(self, total: Tensor, average: bool) -> Tensor:
        return total / self.ranks if average else total


def _flat(tensor: Tensor, codec: Codec) -> Tensor:
    """[n] where the codec encodes: on its device, or on the host. The same memory where it can be."""
    flat = tensor.detach().reshape(-1)
    return (flat if stays(codec, flat.device.type) else flat.cpu()).contiguous()


def _give_back(tensor: Tensor, flat: Tensor) -> None:
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _tag(tag: int, index: int) -> int:
    """Of messages from rank to rank: apart from those of collectives, and each user's tag from the others."""
    return 4 + 2 * tag + index


def following() -> AbstractContextManager[None]:
    """Called where a collective is launched. What is done inside the block, in whatever thread, begins after all that
    the launcher's current stream was given so far, and has ended when the block ends. Without a GPU: nothing."""
    if not accelerator.begun():
        return nullcontext()
    return _after(accelerator.current(), accelerator.current_stream().record_event())


@contextmanager
def _after(device: torch.device, ready: torch.Event) -> Iterator[None]:
    with accelerator.selected(device):
        stream = accelerator.current_stream()
        stream.wait_event(ready)
        yield
        stream.synchronize()
