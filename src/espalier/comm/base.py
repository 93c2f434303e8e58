"""What crosses the wire? Traffic classes, the Codec Protocol, the byte formulas and the ledger. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from espalier.recipe.cost import ring_bytes
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Traffic(StrEnum):
    """The class of what is sent; decides codec, priority and the ledger's row."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    KEYS_VALUES = "keys_values"
    HALO = "halo"
    EXPERTS = "experts"
    OUTER_STEP = "outer_step"
    CHECKPOINT = "checkpoint"
    CONTROL = "control"
    """Scalars that steer the run: loss sums, stop flags, hashes."""


_CURRENT: ContextVar[Traffic | None] = ContextVar("traffic", default=None)


@contextmanager
def traffic(kind: Traffic) -> Iterator[None]:
    """Everything a Channel sends inside the block is of class `kind`.

    The block does not reach into autograd's own threads: a gradient hook that sends must open it itself.
    """
    token = _CURRENT.set(kind)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_traffic(default: Traffic = Traffic.ACTIVATIONS) -> Traffic:
    """The class of what is being sent now: that of the enclosing `traffic` block, else `default`."""
    return _CURRENT.get() or default


_RESIDUAL: ContextVar[Tensor | None] = ContextVar("residual", default=None)


@contextmanager
def feedback(residual: Tensor | None) -> Iterator[None]:
    """Error feedback for what is launched inside the block: what a lossy codec loses stays in `residual` and is added
    to what is sent next (arXiv 1901.09847). Exact and lossless codecs leave it alone; the exchange raises UserError for
    a codec that is no contraction (`check_feedback`).

    Args:
        residual: as many elements as the tensor that is reduced, in the order of its elements; float32, or float64 for
            float64. Belongs to that tensor on this rank, and must outlive the exchange. None: no feedback.
    """
    token = _RESIDUAL.set(residual)
    try:
        yield
    finally:
        _RESIDUAL.reset(token)


def current_residual() -> Tensor | None:
    """The residual of the enclosing `feedback` block."""
    return _RESIDUAL.get()


class Codec(Protocol):
    """How a tensor becomes bytes and comes back. `exact` is the plain answer."""

    @property
    def name(self) -> str:
        """As `codecs.codec` reads it."""

    @property
    def lossless(self) -> bool:
        """Whether every bit comes back."""

    @property
    def fixed(self) -> bool:
        """Whether `wire_bytes` is exact, whatever the values are."""

    def encode(self, tensor: Tensor) -> Tensor | None:
        """A 1-D tensor to its wire form (uint8, or the tensor itself when nothing changes).

        None where it cannot carry the values, as some are not finite: then they are sent as they are, never turned
        into numbers.
        """

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """The tensor back, of `like`'s shape and dtype."""

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """Bytes on the wire for `elements` values of `element_bytes` each, or the most they can be (NumPy arrays
        allowed)."""


@runtime_checkable
class Carrying(Protocol):
    """A codec that says itself what it is sent through. `exact` names the group as it is; a test's slow link waits."""

    def carrier(self, inner: Any) -> Any:
        """An object with the collective methods of `inner` (a Gloo, NCCL or MPI group)."""


@runtime_checkable
class Resident(Protocol):
    """A codec that encodes and decodes tensors of some devices where they are, so that only bytes are copied."""

    def runs_on(self, device: str) -> bool:
        """Whether it does on devices of this type (`cuda`)."""


@runtime_checkable
class FeedbackBound(Protocol):
    """A codec family of which only some members are contractions: ||x - C(x)||^2 <= (1 - d) ||x||^2 for some d > 0.

    Error feedback needs that (arXiv 1901.09847): otherwise what is carried over may grow from step to step.
    """

    @property
    def name(self) -> str:
        """As of every codec."""

    @property
    def for_feedback(self) -> str:
        """This codec's name where it is a contraction; else that of the nearest member that is."""


def check_feedback(codec: Codec) -> None:
    """Raises UserError for a codec that is no contraction."""
    if isinstance(codec, FeedbackBound) and codec.for_feedback != codec.name:
        raise UserError(
            f"Error feedback with the codec {codec.name!r} diverges.",
            why="the codec may lose more than it is given (||x - C(x)|| > ||x||), so what is carried over grows",
            do=f"{codec.for_feedback}, or int4",
        )


def stays(codec: Codec, device: str) -> bool:
    """Whether a tensor on `device` need not be copied to the host for `codec`."""
    return device == "cpu" or (isinstance(codec, Resident) and codec.runs_on(device))


def sent_bytes(operation: str, size: Any, ranks: Any, *, root: bool = False) -> Any:
    """Payload bytes one rank sends in one collective (NumPy arrays allowed), by the minimal ring algorithms.

    Args:
        operation: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `scatter`, `gather`,
            `reduce`, `send`, `recv` or `barrier`.
        size: bytes of the whole tensor: the full input, or the full output of an all-gather or gather.
        ranks: ranks in the group. Alone, a rank sends nothing.
        root: whether this rank is the root of a broadcast, scatter, gather or reduce.

    Gloo's own traffic was compared on a loopback of its own: all-reduce, all-to-all, gather and scatter send what is
    written here. Its broadcast is a tree, so ranks other than the root forward copies too; only the
    root's one copy is counted.
    """
    if operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        return ring_bytes(operation, size, ranks)
    if operation == "broadcast":
        return ring_bytes(operation, size, ranks) if root else 0 * size
    others = (ranks - 1) / ranks
    if operation == "scatter":
        return size * others if root else 0 * size
    if operation == "gather":
        return 0 * size if root else size / ranks
    if operation == "reduce":  # reduce-scatter, then every share to the root
        return size * others if root else size * others + size / ranks * (ranks > 1)
    assert operation in ("recv", "barrier"), operation
    return 0 * size


@dataclass(frozen=True)
class Spent:
    """What encoded collectives of one class did on this rank.

    Attributes:
        sent: bytes that left it, headers included; raw: those of the same values as they are.
        seconds: in codecs, of its communication thread.
        lost, given: sums of squares of what feedback kept back, and of what was to be sent with it.
    """

    sent: float = 0.0
    raw: float = 0.0
    seconds: float = 0.0
    lost: float = 0.0
    given: float = 0.0

    def plus(self, other: Spent, sign: int = 1) -> Spent:
        """The sum (or difference) of both."""
        return Spent(*(mine + sign * theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def unbooked(spent: Spent) -> None:
    """What no ledger keeps: of trials, and of groups that are not a run's."""


@dataclass
class Ledger:
    """Payload bytes and calls that left this rank, by traffic class and operation. Has state; safe among threads.

    Bytes follow `sent_bytes`: all-reduce 2·(n-1)/n·V, all-gather and reduce-scatter (n-1)/n·V with V the whole
    tensor, broadcast V from the root, all-to-all what goes to others, send V.
    """

    bytes: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    encoded: dict[str, Spent] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, kind: str, operation: str, count: float) -> None:
        """Books `count` bytes of class `kind` sent by `operation`."""
        key = (kind, operation)
        with self._lock:
            self.bytes[key] = self.bytes.get(key, 0) + count
            self.calls[key] = self.calls.get(key, 0) + 1

    def add_encoded(self, kind: str, operation: str, spent: Spent) -> None:
        """Books an encoded collective of class `kind`."""
        self.add(kind, operation, spent.sent)
        with self._lock:
            self.encoded[kind] = self.encoded.get(kind, Spent()).plus(spent)

    def by_class(self) -> dict[str, float]:
        """Bytes by traffic class."""
        totals: dict[str, float] = {}
        with self._lock:
            rows = list(self.bytes.items())
        for (kind, _), count in rows:
            totals[kind] = totals.get(kind, 0) + count
        return totals


class Meter:
    """What a rank has sent since the last look, by the ledger of a Channel. Has state: what was there then."""

    def __init__(self, channel: Any) -> None:
        self._ledger: Ledger | None = getattr(channel, "ledger", None)  # torch's own groups have none
        self._bytes: dict[str, float] = {}
        self._encoded: dict[str, Spent] = {}

    def read(self) -> dict[str, dict[str, float]]:
        """By traffic class: `bytes` sent, and where a codec is at work bytes `saved`, seconds of `coding`, and the
        share `lost` (of the 2-norm, kept for the next step)."""
        if self._ledger is None:
            return {"bytes": {}}
        totals = self._ledger.by_class()
        fresh = {kind: count - self._bytes.get(kind, 0.0) for kind, count in totals.items()}
        self._bytes = totals
        counts = {"bytes": {kind: count for kind, count in fresh.items() if count}}
        encoded = dict(self._ledger.encoded)
        spent = {kind: amounts.plus(self._encoded.get(kind, Spent()), -1) for kind, amounts in encoded.items()}
        self._encoded = encoded
        if spent:
            counts["saved"] = {kind: amounts.raw - amounts.sent for kind, amounts in spent.items()}
            counts["coding"] = {kind: amounts.seconds for kind, amounts in spent.items()}
            counts["lost"] = {
                kind: (amounts.lost / amounts.given) ** 0.5 for kind, amounts in spent.items() if amounts.given
            }
        return counts
