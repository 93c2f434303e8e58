"""Every rank has everything: data parallel. Gradients are summed in buckets while backward still runs.

After DistributedDataParallel (Li et al., arXiv 2006.15704): buckets in reverse order of the parameters, a small first
one, launched from gradient hooks in a fixed order. It deviates where that is simpler or exact:
- The sum is a sum, not a mean: losses are divided by the weight of the whole batch before backward.
- Each fresh gradient is copied into its bucket by its own hook, while it is still in the processor's cache; later
  micro-batches add in place. Zeroing a bucket and adding into it reads and writes more, and was faster only while
  every fresh gradient also cost page faults, which `rank.keep_freed_memory` ends.
- One flag per parameter travels with its bucket, so a parameter that no rank used keeps `.grad = None`, just as on one
  rank, and one that some ranks used never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic, sent_bytes, traffic
from espalier.compose import Claim
from espalier.cost import Cost
from espalier.errors import UserError
from espalier.shard.agree import same_start

if TYPE_CHECKING:
    from espalier.cluster import Link

FIRST_BUCKET = 2**20  # bytes; DistributedDataParallel's figure: the first exchange should begin early
BUCKET = 25 * 2**20  # bytes; likewise

CLAIM = Claim("replicate", question="shard", changes=frozenset({"gradients are summed", "whole matrices"}))


class Piece(NamedTuple):
    """One parameter as far as buckets care: how many elements of how many bytes, in whose company it may travel."""

    elements: int
    element_bytes: int
    group: Any = None
    """Parameters of one dtype and device share buckets."""


def buckets(pieces: Sequence[Piece], bucket_bytes: int = BUCKET) -> list[list[int]]:
    """Indices of `pieces` by bucket, in the order of launch. A pure function of its arguments.

    Pieces are taken in reverse, as backward gives their gradients. A bucket closes when it has reached its bytes (the
    first of each group `FIRST_BUCKET`, or `bucket_bytes` if that is less), so only a single larger piece exceeds it
    by much. Buckets are launched in the order in which they close.
    """
    full: list[list[int]] = []
    open_: dict[Any, list[int]] = {}
    held: dict[Any, int] = {}
    limit: dict[Any, int] = {}
    for index in reversed(range(len(pieces))):
        piece = pieces[index]
        key = (piece.group, piece.element_bytes)
        open_.setdefault(key, []).append(index)
        held[key] = held.get(key, 0) + piece.elements * piece.element_bytes
        if held[key] >= limit.setdefault(key, min(FIRST_BUCKET, bucket_bytes)):
            full.append(open_.pop(key))
            held[key], limit[key] = 0, bucket_bytes
    return full + list(open_.values())


class Replicate:
    """Data parallel on a Channel (any torch process group will do). Has state: hooks and buckets.

    Args:
        model: changed in place: its parameters and buffers become rank 0's, its gradients become views of buckets.
        channel: the replicas; None, or a group of one rank, adds no hook, no buffer and no cost.
        bucket_bytes: bytes of gradients exchanged at once.

    Raises:
        UserError: the ranks' models differ in a name, shape or dtype (named).

    >>> replicate = Replicate(model, channel)  # doctest: +SKIP
    >>> for index, batch in enumerate(batches):  # doctest: +SKIP
    ...     with replicate.accumulate(last=index == len(batches) - 1):
    ...         (loss(model, batch) / total_weight).backward()
    >>> replicate.wait()  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, channel: dist.ProcessGroup | None, *, bucket_bytes: int = BUCKET) -> None:
        self.model = model
        self._channel = channel if channel is not None and channel.size() > 1 else None
        self._buckets: list[_Bucket] = []
        self._hooks: list[Any] = []
        self._last: bool | None = None
        self._launched = 0
        if self._channel is None:
            return
        same_start(model, self._channel)
        self._seen = _Seen(model)
        slots = [_Slot(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        pieces = [_piece(slot.parameter) for slot in slots]
        for indices in buckets(pieces, bucket_bytes):
            bucket = _Bucket([slots[index] for index in indices])
            self._buckets.append(bucket)
            for slot in bucket.slots:
                hook = self._hook(bucket, slot)
                self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(hook))

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro-batch; the exchange begins inside the `last` one of a step."""
        return nullcontext() if self._channel is None else self._micro_batch(last)

    def wait(self) -> None:
        """Returns when every `.grad` holds the sum over all ranks: a view of a bucket, valid until the next backward.

        Raises:
            UserError: no backward ran in `accumulate(last=True)`, or the model changed after wrapping.
            RunFailed: a rank did not take part in time.
        """
        if self._channel is None:
            return
        if self._last is not True:
            raise UserError(
                "Replicate.wait() found no backward to wait for.",
                do="run the step's last backward inside `with replicate.accumulate(last=True):`",
            )
        self._last = None
        self._launch_ready(everything=True)
        for bucket in self._buckets:
            bucket.finish()

    def detach(self) -> None:
        """Takes off every hook; the model is plain again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()
        self._channel = None

    @contextmanager
    def _micro_batch(self, last: bool) -> Iterator[None]:
        self._last = None  # an error inside leaves no half step to wait for
        self._launched = 0
        for bucket in self._buckets:
            bucket.attach()
        self._seen.check(self.model)
        self._armed = last
        yield
        self._last = last

    def _hook(self, bucket: _Bucket, slot: _Slot) -> Any:
        def arrived(_: Tensor) -> None:
            slot.take()
            bucket.missing -= 1
            if bucket.missing == 0 and self._armed:
                self._launch_ready()
            elif bucket.missing < 0:
                raise _twice(slot.name)

        return arrived

    def _launch_ready(self, everything: bool = False) -> None:
        """Launches complete buckets in their fixed order, which all ranks share whatever order gradients come in."""
        while self._launched < len(self._buckets) and (everything or self._buckets[self._launched].missing == 0):
            assert self._channel is not None
            self._buckets[self._launched].launch(self._channel)
            self._launched += 1


class _Slot:
    """One parameter, its place in a bucket, and whether this rank used it since its gradient was cleared."""

    __slots__ = ("name", "parameter", "used", "view")

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name, self.parameter = name, parameter
        self.view = parameter
        self.used = False

    def take(self) -> None:
        """Moves a fresh gradient into the bucket, while it is still in the processor's cache."""
        grad = self.parameter.grad
        if grad is not None and grad is not self.view:
            with torch.no_grad():
                self.view.copy_(grad)
            self.parameter.grad = self.view
        self.used = True


class _Bucket:
    """Gradients [elements] and, behind them, one flag per parameter: 1 where this rank has a gradient. Has state."""

    def __init__(self, slots: list[_Slot]) -> None:
        self.slots = slots
        self.missing = len(slots)
        first = slots[0].parameter
        elements = sum(slot.parameter.numel() for slot in slots)
        self.buffer = torch.zeros(elements + len(slots), dtype=first.dtype, device=first.device)
        self.flags = self.buffer[elements:]
        self.work: Any = None
        offset = 0
        for slot in slots:
            slot.view = _like(self.buffer[offset : offset + slot.parameter.numel()], slot.parameter)
            offset += slot.parameter.numel()

    def attach(self) -> None:
        """Before a micro-batch: all gradients are still to come."""
        self.missing = len(self.slots)
        for slot in self.slots:
            if slot.parameter.grad is None:
                slot.used = False

    def launch(self, channel: dist.ProcessGroup) -> None:
        """Begins the sum over all ranks."""
        with torch.no_grad():
            self.flags.fill_(1)
            for index, slot in enumerate(self.slots):
                if slot.parameter.grad is not None:
                    slot.take()  # also what somebody put there themselves
                else:
                    slot.view.zero_()
                    self.flags[index] = 0
        with traffic(Traffic.GRADIENTS):
            self.work = channel.allreduce([self.buffer], dist.AllreduceOptions())

    def finish(self) -> None:
        """Waits for the sum. What only other ranks used has their gradient; what nobody used gets None."""
        self.work.wait()
        self.work = None
        for index, slot in enumerate(self.slots):
            if not slot.used:
                slot.parameter.grad = slot.view if self.flags[index].item() else None


class _Seen:
    """What the model looked like when it was wrapped."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, len(module._modules), len(module._parameters)) for module in model.modules()]
        self._parameters = [
            (f"{prefix}.{name}".lstrip("."), module._parameters, name, parameter, parameter.requires_grad)
            for prefix, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check(self, model: nn.Module) -> None:
        """Raises UserError naming the first change."""
        for path, owner, name, parameter, trainable in self._parameters:
            if owner.get(name) is not parameter or parameter.requires_grad is not trainable:
                raise _changed(path, model)
        for module, modules, parameters in self._modules:
            if len(module._modules) != modules or len(module._parameters) != parameters:
                raise _changed(type(module).__name__, model)


def cost(pieces: Sequence[Piece], ranks: Any, link: Link, *, bucket_bytes: int = BUCKET, codec: Any = None) -> Cost:
    """What one step of `Replicate` exchanges on each rank.

    Args:
        pieces: the trainable parameters in the model's order.
        ranks: replicas (NumPy array allowed).
        link: the slowest link of the ring (its fields may be arrays).
        bucket_bytes: as given to `Replicate`.
        codec: of class `gradients`; default exact.

    Returns:
        `seconds["all_reduce"]`: launch + 2·(n-1)·latency per bucket, and the bytes over the bandwidth; none of it
        hidden behind backward. `sent["gradients"]`: the ledger's bytes, flags included. `held["buckets"]`: bytes of
        the buffers, in which the gradients lie (do not count those again).
    """
    from espalier.comm.exact import EXACT

    carried = codec or EXACT
    seconds: Any = 0.0 * ranks
    sent: Any = 0.0 * ranks
    held = 0
    for indices in buckets(pieces, bucket_bytes):
        width = pieces[indices[0]].element_bytes
        elements = sum(pieces[index].elements for index in indices) + len(indices)
        bytes_ = sent_bytes("all_reduce", carried.wire_bytes(elements, width), ranks)
        sent = sent + bytes_
        seconds = seconds + (link.launch + 2 * (ranks - 1) * link.latency) * (ranks > 1) + bytes_ / link.bandwidth
        held += elements * width
    return Cost(
        seconds={"all_reduce": seconds},
        held={"buckets": held * (ranks > 1)},
        sent={"gradients": sent},
        sources={"all_reduce": f"launch + 2(n-1)·latency per bucket + bytes / bandwidth; {link.source}".rstrip("; ")},
    )


def _piece(parameter: Tensor) -> Piece:
    return Piece(parameter.numel(), parameter.element_size(), (parameter.dtype, parameter.device))


def _like(flat: Tensor, parameter: Tensor) -> Tensor:
    """`flat` [elements] in `parameter`'s shape, and in its strides where these leave no holes."""
    stride = torch.empty_like(parameter, device="meta").stride()  # the parameter's own where it leaves no holes
    return flat.as_strided(parameter.size(), stride, flat.storage_offset())


def _twice(name: str) -> UserError:
    return UserError(
        f"Parameter '{name}' got its gradient twice in one backward.",
        why="its bucket may already be on the wire (reentrant checkpointing, or two backwards in one micro-batch)",
        do="use torch.utils.checkpoint with use_reentrant=False; one backward per `accumulate` block",
    )


def _changed(where: str, model: nn.Module) -> UserError:
    return UserError(
        f"The model ({type(model).__name__}) changed at '{where}' after it was wrapped in Replicate.",
        why="a parameter was added, replaced, frozen or thawed; its gradient would not be exchanged rightly",
        do="change the model first, then wrap it; or call replicate.detach() and wrap it again",
    )
