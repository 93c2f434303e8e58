"""The Channel: the only way training bytes leave a rank. It is a torch ProcessGroup round a Gloo, NCCL or MPI one.

DTensor, FSDP2, pipelining and foreign code call it like any group; it books the bytes of every operation by traffic
class, sends through the class's codec, and puts a deadline on every wait.

Reduce-scatter: Gloo implements it as a whole all-reduce. Here it is an all-to-all and a sum in rank order, which
sends half as much and gives each rank the same bits whatever the timing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
    ReduceScatterOptions,
    Store,
)

from espalier.comm.backends import INNER, GroupRequest
from espalier.comm.base import Carrying, Codec, Ledger, Traffic, current_traffic, sent_bytes
from espalier.comm.c10d_arguments import (
    REDUCTIONS,
    ReduceOp,
    averages,
    is_connection,
    many,
    payload,
    reducing,
    residual_of,
    shares,
    type_of,
    wire_size,
)
from espalier.comm.flight_recorder import FlightRecorder, RecordedCollective
from espalier.comm.work import Pending
from espalier.kernels import accelerator

if TYPE_CHECKING:
    from torch import Tensor

    from espalier.comm.compressed_collectives import CodedCollectives, Start


@dataclass(frozen=True)
class SharedRecords:
    """What all Channels of one rank share: the ledger, the record of its collectives, and the deadline's default."""

    ledger: Ledger
    watch: FlightRecorder
    inner: str
    """A name in `backends.INNER`: how the groups inside the Channels are made."""


# Torch's stubs type every overload of every method; a trampoline takes only the forms that torch itself calls.
_ProcessGroup: Any = dist.ProcessGroup


class Channel(_ProcessGroup):
    """A process group that keeps a byte ledger, applies codecs, and never waits without end. Has state.

    Made by `connect`, `torch.distributed.new_group` or a DeviceMesh, not by hand.

    Attributes:
        ledger: payload bytes that left this rank, shared by all its Channels.
        default_traffic: the class of operations outside any `traffic` block.
        timeout: the deadline of every wait; see `set_timeout`.
    """

    def __init__(self, asked: GroupRequest, inner: dict[str, Any], line: SharedRecords) -> None:
        super().__init__(asked.rank, asked.size)  # the form with a store makes no trampoline for a Python subclass
        self._store = asked.store
        self.line = line
        self.ledger = line.ledger
        self.members = asked.members
        self.default_traffic = Traffic.ACTIVATIONS
        self.timeout = asked.timeout
        self._inner = inner
        self._codecs: dict[Traffic, Codec] = {}
        self._carriers: dict[tuple[Traffic, Any], Any] = {}
        self._coded: dict[Traffic, CodedCollectives] = {}
        self._near: dict[Traffic, frozenset[int]] = {}
        self._uses = itertools.count()
        self._alone = next(iter(inner.values())) if len(set(inner.values())) == 1 else None
        self._stream = inner["cuda"] if line.inner == "nccl" else None
        self._rank = asked.rank
        self._size = asked.size
        self._label = asked.name
        if line.watch.longest is not None:
            self.set_timeout(asked.timeout)
        for device, backend in inner.items():
            if isinstance(backend, torch._C._distributed_c10d.Backend):
                # Lets torch find a backend for its queries, and carries the few calls that C++ makes past this class.
                self._register_backend(torch.device(device), type_of(backend), backend)
                self._set_default_backend(type_of(backend))

    def use(self, kind: Traffic, codec: Codec, near: Collection[int] = ()) -> None:
        """From now on, what is of class `kind` crosses this Channel as `codec` writes it. Same call on every rank.

        Sums, gathers, all-to-alls and messages of floats are encoded, in a Gloo group and a thread of their own;
        other reductions, integers, small tensors, and messages to and from the ranks `near` this one (each other's) go
        as they are. Raises UserError when the ranks' codecs differ.
        """
        self._near[kind] = frozenset(near)
        if kind in self._coded:
            if self._coded[kind].codec.name == codec.name:
                return
            self._coded.pop(kind).close()
        if isinstance(codec, Carrying):
            self._codecs[kind] = codec
            self._carriers |= {(kind, inner): codec.carrier(inner) for inner in self._inner.values()}
        elif self._size > 1:
            self._codecs.pop(kind, None)
            place = (self._rank, self._size)
            reach = self.line.watch.reach
            from espalier.comm.compressed_collectives import CodedCollectives

            coded = CodedCollectives(
                codec, self._beside(kind), place, kind._value_, self.members, lambda: reach(self.timeout)
            )
            weakref.finalize(self, coded.lane.close)
            self._coded[kind] = coded

    def _beside(self, kind: Traffic) -> Any:
        """A group of the same ranks for host tensors, for the encoded messages of one class: what has several phases in
        a thread of its own must not mix with what torch launches."""
        made = INNER["gloo" if self.line.inner in ("nccl", "staged") else self.line.inner]
        name = f"{self.group_name} {kind._value_}"
        reach = self.line.watch.reach(self.timeout)
        store = PrefixStore(f"coded {next(self._uses)}", self._store)
        return made(GroupRequest(store, self._rank, self._size, reach, self.members, name))["cpu"]

    def _coding(self, tensors: Sequence[Tensor], operation: Any = None, parts: bool = False) -> CodedCollectives | None:
        """What encodes these `tensors`, reduced by `operation` if by any; None: they go as they are. Of `parts`, which
        may differ in size from rank to rank, each is looked at by itself."""
        coded = self._coded.get(current_traffic(self.default_traffic)) if self._coded else None
        if coded is None or getattr(operation, "op", operation) not in (None, ReduceOp.SUM, ReduceOp.AVG):
            return None
        takes = coded.carries if parts else coded.takes
        return coded if all(takes(tensor) for tensor in tensors) else None

    def _message_coding(self, tensors: Sequence[Tensor], peer: int) -> CodedCollectives | None:
        """The same for a message to or from `peer`."""
        near = self._near.get(current_traffic(self.default_traffic), ()) if self._near else ()
        return None if peer in near else self._coding(tensors)

    def _encoded(
        self, coded: CodedCollectives, operation: str, tensors: Sequence[Tensor], starts: Sequence[Start]
    ) -> Pending:
        """Launches encoded collectives; the ledger gets what they send once that is known."""
        entry = RecordedCollective(self._label, operation, coded.kind, payload(tensors), self.members)

        booked = partial(self.ledger.add_encoded, coded.kind, operation)
        return self._end(entry, lambda: [start(booked) for start in starts])

    def set_timeout(self, timeout: timedelta, longest: timedelta | None = None) -> None:
        """Changes the deadline of later waits. With `longest`, waits of all Channels of this rank go on past their
        deadlines, for at most so long, while another rank of the run computes. NCCL's and messages' do not."""
        self.timeout = timeout
        self.line.watch.longest = longest or self.line.watch.longest
        for inner in self._inner.values():
            inner.set_timeout(timeout if inner is self._stream else self.line.watch.reach(timeout))

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """`espalier`."""
        return "espalier"

    def get_group_store(self) -> Store:
        """The store this group met in."""
        return self._store

    @property
    def group_name(self) -> Any:
        """The name torch gave this group."""
        return self._label

    # --- one path for all operations -----------------------------------------------------------------------------

    def _begin(
        self, operation: str, tensors: Sequence[Tensor], sent: float | None = None, root: int = -1
    ) -> tuple[Any, RecordedCollective]:
        """Books the operation on `tensors` (the whole payload). Returns what carries it, and its record."""
        kind = current_traffic(self.default_traffic)
        codec = self._codecs.get(kind)
        size = payload(tensors) if codec is None else wire_size(codec, tensors)
        if sent is None:
            sent = sent_bytes(operation, size, self._size, root=root == self._rank)
        self.ledger.add(kind._value_, operation, sent)
        carrier = self._alone or self._inner[tensors[0].device.type if tensors else "cpu"]
        entry = RecordedCollective(self._label, operation, kind._value_, size, self.members)
        entry.stream = carrier is self._stream
        return carrier if codec is None else self._carriers[kind, carrier], entry

    def _message(
        self, operation: str, tensors: Sequence[Tensor], peer: int, tag: int, sent: float | None = None
    ) -> tuple[Any, RecordedCollective]:
        """The same for a message to or from `peer` (rank in this group): numbered by its direction."""
        carrier, entry = self._begin(operation, tensors, sent)
        me = self.members[self._rank]
        other = self.members[peer]
        source, target = (me, other) if operation == "send" else (other, me)
        entry.expected = (me, other)
        entry.key = f"{self._label}:{source}>{target}#{tag}"
        return carrier, entry

    def _end(
        self, entry: RecordedCollective, launch: Callable[[], Any], finish: Callable[[], None] | None = None
    ) -> Pending:
        watch = self.line.watch
        watch.enter(entry)
        try:
            works = launch()
        except RuntimeError as error:
            if is_connection(str(error)):
                raise watch.failure(entry, str(error)) from None
            raise
        # NCCL keeps the deadline itself; its wait with a timeout would block the host instead of the stream.
        limit = None if entry.stream else self.timeout
        return Pending(works if type(works) is list else [works], entry, watch, limit, finish)

    # --- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Pending:
        """Every rank gets the reduction of all ranks' `tensors`, in place."""
        tensors = many(tensors)
        options = reducing(AllreduceOptions, opts)
        coded = self._coding(tensors, options.reduceOp)
        if coded is not None:
            residual = residual_of(tensors)
            mean = averages(options)
            starts = [coded.all_reduce(tensor, residual, mean) for tensor in tensors]
            return self._encoded(coded, "all_reduce", tensors, starts)
        carrier, entry = self._begin("all_reduce", tensors)
        return self._end(entry, lambda: [carrier.allreduce([tensor], options) for tensor in tensors])

    allreduce_coalesced = allreduce  # each travels alone: Gloo's coalesced form copies everything twice

    def reduce(self, tensors: Any, opts: Any) -> Pending:
        """The root gets the reduction of all ranks' `tensors`."""
        tensors = many(tensors)
        carrier, entry = self._begin("reduce", tensors, root=opts.rootRank)
        return self._end(entry, lambda: carrier.reduce(tensors, opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Rank r gets the reduction of all ranks' r-th part of `input`."""
        return self._reduce_scatter([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """`reduce_scatter_single` of several tensors."""
        return self._reduce_scatter(list(outputs), list(inputs), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """`reduce_scatter_single` with the parts of the input as a list."""
        if isinstance(outputs, torch.Tensor):
            outputs = [outputs]
            inputs = [inputs]
        whole = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self._reduce_scatter(list(outputs), whole, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Pending:
        options = reducing(ReduceScatterOptions, opts)
        reduction = REDUCTIONS.get(options.reduceOp.op if hasattr(options.reduceOp, "op") else options.reduceOp)
        coded = self._coding(inputs, options.reduceOp)
        if coded is not None:
            residual = residual_of(inputs)
            mean = averages(options)
            starts = [coded.reduce_scatter(o, i, residual, mean) for o, i in zip(outputs, inputs, strict=True)]
            return self._encoded(coded, "reduce_scatter", inputs, starts)
        if self._stream is not None and accelerator.is_on(outputs[0]):
            carrier, entry = self._begin("reduce_scatter", inputs)
            pairs = list(zip(outputs, inputs, strict=True))
            return self._end(entry, lambda: [carrier._reduce_scatter_base(o, i, options) for o, i in pairs])
        if reduction is None:
            return self._reduce_and_slice(outputs, inputs, options)
        carrier, entry = self._begin("reduce_scatter", inputs)
        flat = [tensor.detach().reshape(-1) for tensor in inputs]
        rows = [torch.empty_like(tensor) for tensor in flat]
        pairs = list(zip(rows, flat, strict=True))

        def finish() -> None:
            for output, parts in zip(outputs, rows, strict=True):
                output.detach().copy_(reduction(parts.view(self._size, -1)).view(output.shape))

        return self._end(
            entry, lambda: [carrier.alltoall_base(r, i, [], [], AllToAllOptions()) for r, i in pairs], finish
        )

    def _reduce_and_slice(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Pending:
        """For reductions that are not arithmetic: a whole all-reduce, and its bytes."""
        carrier, entry = self._begin("all_reduce", inputs)
        whole = [tensor.detach().reshape(-1).clone() for tensor in inputs]
        plain = reducing(AllreduceOptions, options.reduceOp)

        def finish() -> None:
            for output, total in zip(outputs, whole, strict=True):
                output.detach().copy_(total.view(self._size, -1)[self._rank].view(output.shape))

        return self._end(entry, lambda: [carrier.allreduce([tensor], plain) for tensor in whole], finish)

    # --- moves ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> Pending:
        """Every rank gets the root's `tensors`."""
        tensors = many(tensors)
        carrier, entry = self._begin("broadcast", tensors, root=opts.rootRank)
        return self._end(entry, lambda: carrier.broadcast(tensors, opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Every rank gets all ranks' `input`, one after the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """`all_gather_single` of several tensors."""
        options = opts or AllgatherOptions()
        coded = self._coding(outputs)
        if coded is not None:
            starts = [coded.all_gather(output, input_) for output, input_ in zip(outputs, inputs, strict=True)]
            return self._encoded(coded, "all_gather", outputs, starts)
        carrier, entry = self._begin("all_gather", outputs)
        pairs = [(output, input_.contiguous()) for output, input_ in zip(outputs, inputs, strict=True)]
        return self._end(entry, lambda: [carrier._allgather_base(o, i, options) for o, i in pairs])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """`all_gather_single` with the parts of the output as lists."""
        if isinstance(inputs, torch.Tensor):
            outputs = [outputs]
            inputs = [inputs]
        carrier, entry = self._begin("all_gather", [part for parts in outputs for part in parts])
        return self._end(entry, lambda: carrier.allgather(outputs, inputs, opts or AllgatherOptions()))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """`allgather` of several tensors."""
        carrier, entry = self._begin("all_gather", [part for parts in outputs for part in parts])
        return self._end(entry, lambda: carrier.allgather_coalesced(outputs, inputs, opts or AllgatherOptions()))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Pending:
        """The root gets all ranks' input."""
        sent = 0 if opts.rootRank == self._rank else payload(inputs)
        carrier, entry = self._begin("gather", inputs, sent)
        return self._end(entry, lambda: carrier.gather(outputs, inputs, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Pending:
        """Rank r gets the root's r-th tensor."""
        others = [part for parts in inputs for rank, part in enumerate(parts) if rank != self._rank]
        carrier, entry = self._begin("scatter", outputs, payload(others) if opts.rootRank == self._rank else 0)
        return self._end(entry, lambda: carrier.scatter(outputs, inputs, opts))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Pending:
        """Rank r gets every rank's r-th part of `input`; parts are equal where no splits of dim 0 are given."""
        sent = None
        coded = self._coding([input], parts=True)
        if coded is not None:
            into = shares(output, output_splits, self._size)
            out_of = shares(input, input_splits, self._size)
            return self._encoded(coded, "all_to_all", [input], [coded.all_to_all(into, out_of)])
        if input_splits:
            elements = input.numel() // max(1, input.size(0)) * (sum(input_splits) - input_splits[self._rank])
            sent = elements * input.element_size()
        carrier, entry = self._begin("all_to_all", [input], sent)
        options = opts or AllToAllOptions()
        splits = list(output_splits or []), list(input_splits or [])
        return self._end(entry, lambda: carrier.alltoall_base(output, input, *splits, options))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Pending:
        """`all_to_all_single` with the parts as lists, sent as one tensor (Gloo has no list form)."""
        coded = self._coding(inputs, parts=True)
        if coded is not None:
            return self._encoded(coded, "all_to_all", inputs, [coded.all_to_all(outputs, inputs)])
        sent = payload([part for rank, part in enumerate(inputs) if rank != self._rank])
        carrier, entry = self._begin("all_to_all", inputs, sent)
        source = torch.cat([part.detach().reshape(-1) for part in inputs])
        splits = [[part.numel() for part in parts] for parts in (outputs, inputs)]
        target = source.new_empty(sum(splits[0]))

        def finish() -> None:
            for output, part in zip(outputs, target.split(splits[0]), strict=True):
                output.detach().copy_(part.view(output.shape))

        options = opts or AllToAllOptions()
        return self._end(entry, lambda: carrier.alltoall_base(target, source, *splits, options), finish)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Pending:
        """Sends `tensors` to rank `peer` of this group."""
        coded = self._message_coding(tensors, peer)
        if coded is not None:
            works, sent = coded.send(tensors[0], peer, tag)
            return self._end(self._message("send", tensors, peer, tag, sent)[1], lambda: works)
        carrier, entry = self._message("send", tensors, peer, tag)
        return self._end(entry, lambda: carrier.send(tensors, peer, tag))

    def signal(self, tensors: Any, peer: int, tag: int = 0) -> Pending:
        """Sends what tells of bytes that went another way and are booked there; itself it is not booked."""
        carrier, entry = self._message("send", tensors, peer, tag, 0.0)
        return self._end(entry, lambda: carrier.send(tensors, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Pending:
        """Receives into `tensors` from rank `peer` of this group."""
        carrier, entry = self._message("recv", tensors, peer, tag)
        coded = self._message_coding(tensors, peer)
        if coded is not None:
            work, finish = coded.recv(tensors[0], peer, tag)
            return self._end(entry, lambda: work, finish)
        return self._end(entry, lambda: carrier.recv(tensors, peer, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Pending:
        """Receives into `tensors` from whoever sends first. Who is missing cannot be known."""
        carrier, entry = self._begin("recv", tensors)
        entry.expected = ()
        entry.key = f"{self._label}:any>{self.members[self._rank]}#{tag}"
        return self._end(entry, lambda: carrier.recv_anysource(tensors, tag))

    def barrier(self, opts: Any = None) -> Pending:
        """Returns when all ranks have come. Carries no payload."""
        carrier, entry = self._begin("barrier", [])
        return self._end(entry, lambda: carrier.barrier(opts or dist.BarrierOptions()))
