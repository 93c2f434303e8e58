"""What crosses the wire? Traffic classes, the Codec Protocol and the byte ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

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


_CURRENT: ContextVar[Traffic] = ContextVar("traffic", default=Traffic.ACTIVATIONS)


@contextmanager
def traffic(kind: Traffic) -> Iterator[None]:
    """Everything a Channel sends inside the block is of class `kind`."""
    token = _CURRENT.set(kind)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_traffic() -> Traffic:
    """The class of what is being sent now."""
    return _CURRENT.get()


class Codec(Protocol):
    """How a tensor becomes bytes and comes back. `exact` is the plain answer."""

    name: str

    def encode(self, tensor: Tensor) -> Tensor:
        """A 1-D tensor to its wire form (uint8, or the tensor itself when nothing changes)."""
        ...

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """The tensor back, of `like`'s shape and dtype."""
        ...

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """Bytes on the wire for `elements` values of `element_bytes` each (NumPy arrays allowed)."""
        ...


@dataclass
class Ledger:
    """Payload bytes and calls that left this rank, by traffic class and operation. Has state.

    Bytes follow the standard minimal algorithms (ring): all-reduce 2·(n-1)/n·V, all-gather and reduce-scatter
    (n-1)/n·V with V the whole tensor, broadcast V from the root, all-to-all what goes to others, send V.
    """

    bytes: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, kind: str, operation: str, count: float) -> None:
        """Books `count` bytes of class `kind` sent by `operation`."""
        key = (kind, operation)
        self.bytes[key] = self.bytes.get(key, 0) + count
        self.calls[key] = self.calls.get(key, 0) + 1

    def by_class(self) -> dict[str, float]:
        """Bytes by traffic class."""
        totals: dict[str, float] = {}
        for (kind, _), count in self.bytes.items():
            totals[kind] = totals.get(kind, 0) + count
        return totals
