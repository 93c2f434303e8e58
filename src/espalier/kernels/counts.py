"""Operation counts: what a piece of code multiplies, adds and moves, and the joules that takes, with cited constants.

`Counter` counts any PyTorch code, by the modules it runs in; kernels that PyTorch cannot see say themselves what they
do (`record`). Every figure is given with and without memory traffic: energy tables of papers often leave it out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

PICO = 1e-12


@dataclass(frozen=True)
class Joules:
    """What one operation takes: a value in joules, and who says so."""

    value: float
    source: str


HOROWITZ = "M. Horowitz, Computing's energy problem, ISSCC 2014, figure 1.1.9 (45 nm, 0.9 V)"
HAN = "Han et al., arXiv 1506.02626, table 1 (45 nm)"

ENERGY: Mapping[str, Joules] = {
    "mac": Joules(4.6 * PICO, f"fp32: 3.7 pJ to multiply, 0.9 pJ to add; {HOROWITZ}"),
    "ac": Joules(0.9 * PICO, f"fp32: 0.9 pJ to add; {HOROWITZ}"),
    "int8_mac": Joules(0.3 * PICO, f"int8: 0.2 pJ to multiply, int32: 0.1 pJ to add; {HOROWITZ}"),
    "int32_add": Joules(0.1 * PICO, f"int32: 0.1 pJ to add, of fewer bits in proportion; {HOROWITZ}"),
    "other": Joules(0.9 * PICO, f"fp32, as an addition; {HOROWITZ}"),
    "sram_byte": Joules(1.25 * PICO, f"5 pJ for 32 bits of an SRAM; {HAN}"),
    "dram_byte": Joules(160 * PICO, f"640 pJ for 32 bits of DRAM; {HAN}"),
    "hbm_byte": Joules(56 * PICO, "7 pJ for a bit of HBM, as Yan et al. count it (HyGCN, HPCA 2020, arXiv 2001.02514)"),
}
"""Joules of one operation. A MAC multiplies and accumulates; an AC accumulates (what a spike asks for)."""


@dataclass(frozen=True)
class Counts:
    """Operations and bytes. Counts add up, and may be scaled.

    Attributes:
        macs: multiplications with accumulation, floating point; int8_macs: of 8-bit numbers.
        acs: accumulations without a multiplication: synaptic operations (SOPs); int32_adds: of 32-bit integers.
        other: elementwise operations, one for each number that comes out.
        bytes_moved: read and written, each operation for itself: no cache is assumed.
    """

    macs: float = 0.0
    int8_macs: float = 0.0
    acs: float = 0.0
    other: float = 0.0
    bytes_moved: float = 0.0
    int32_adds: float = 0.0

    def __add__(self, more: Counts) -> Counts:
        return Counts(*(getattr(self, field.name) + getattr(more, field.name) for field in fields(self)))

    def times(self, factor: float) -> Counts:
        """So many times as much."""
        return Counts(*(factor * getattr(self, field.name) for field in fields(self)))

    def joules(self, memory: str = "none", energy: Mapping[str, Joules] = ENERGY) -> float:
        """Energy of the arithmetic; with `memory`, `"sram"`, `"dram"` or `"hbm"`, that of moving the bytes
        too."""
        joules = self.macs * energy["mac"].value + self.acs * energy["ac"].value
        joules += self.int8_macs * energy["int8_mac"].value + self.other * energy["other"].value
        joules += self.int32_adds * energy["int32_add"].value
        return joules + (0.0 if memory == "none" else self.bytes_moved * energy[f"{memory}_byte"].value)


NOTHING = Counts()


def low_bit(macs: float, left: float, right: float) -> Counts:
    """So many MACs of codes of `left` and `right` bits, as 8-bit ones: the energy of a multiplier is in proportion to
    the product of the widths, as its array of partial products is. That is a model, not a measurement."""
    return Counts(int8_macs=macs * left * right / 64)


def integer_sums(sums: float, bits: int) -> Counts:
    """So many additions of integers of `bits` bits, as 32-bit ones: the energy of an adder is in proportion to the
    width of the sum, whatever the width of what is added."""
    return Counts(int32_adds=sums * bits / 32)


def constants(energy: Mapping[str, Joules] = ENERGY) -> list[tuple[str, float, str]]:
    """(operation, picojoules, source) of each constant: what stands beside every figure made from them."""
    return [(name, price.value / PICO, price.source) for name, price in energy.items()]


_ACTIVE = threading.local()


def record(counts: Counts) -> None:
    """Adds what a kernel has done to every `Counter` that is open in this thread."""
    for counter in getattr(_ACTIVE, "counters", ()):
        counter.add(counts)


def is_counting() -> bool:
    """Whether a `Counter` is open in this thread, so that a kernel may look closer at its input."""
    return bool(getattr(_ACTIVE, "counters", ()))


@contextmanager
def hidden() -> Iterator[None]:
    """PyTorch's own operations inside do not count: their caller says what they stand for."""
    counters: Sequence[Counter] = getattr(_ACTIVE, "counters", ())
    for counter in counters:
        counter.hiding += 1
    try:
        yield
    finally:
        for counter in counters:
            counter.hiding -= 1


@dataclass
class _Parts:
    """Counts by part. Has state."""

    by_part: dict[str, Counts] = field(default_factory=dict)

    def add(self, part: str, counts: Counts) -> None:
        self.by_part[part] = self.by_part.get(part, NOTHING) + counts


class Counter(TorchDispatchMode):
    """Counts what runs inside `with Counter(model) as counter:`. Has state: counts by part.

    The parts are the names of the model's innermost modules that were running ("" outside all of them), or of `part`.

    >>> layer = nn.Linear(8, 4, bias=False)
    >>> with Counter(layer) as counter:
    ...     _ = layer(torch.zeros(10, 8))
    >>> counter.total.macs
    320.0
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation: seconds, 70 MiB

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.hiding = model, 0
        self._parts, self._inside, self._hooks = _Parts(), [""], list[Any]()

    @property
    def parts(self) -> Mapping[str, Counts]:
        """Counts by name of the module."""
        return dict(self._parts.by_part)

    @property
    def total(self) -> Counts:
        """All parts together."""
        return sum(self._parts.by_part.values(), NOTHING)

    def add(self, counts: Counts) -> None:
        """Adds to the part that is running."""
        self._parts.add(self._inside[-1], counts)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside counts for the part `name`."""
        self._inside.append(name)
        try:
            yield
        finally:
            self._inside.pop()

    def __enter__(self) -> Self:
        super().__enter__()
        _ACTIVE.counters = (*getattr(_ACTIVE, "counters", ()), self)
        for name, module in [] if self.model is None else self.model.named_modules():
            if name:
                before = module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
                after = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
                self._hooks += [before, after]
        return self

    def _leave(self) -> None:
        self._inside.pop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _ACTIVE.counters = tuple(counter for counter in _ACTIVE.counters if counter is not self)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one operation of PyTorch, and runs it."""
        out = func(*args, **(kwargs or {}))
        if not self.hiding:
            self.add(_counted(func, args, kwargs or {}, out))
        return out


def _counted(func: Any, args: Any, kwargs: Any, out: Any) -> Counts:
    results, given = _tensors(out), _tensors((args, kwargs))
    if getattr(func, "is_view", False) or not results:
        return NOTHING
    moved = float(sum(tensor.numel() * tensor.element_size() for tensor in (*given, *results)))
    operator = getattr(func, "_overloadpacket", func)  # one of higher order has no overloads
    if (flops := flop_registry.get(operator)) is not None:
        return Counts(macs=flops(*args, **kwargs, out_val=out) / 2, bytes_moved=moved)
    if operator in _MOVES:
        return Counts(bytes_moved=moved)
    return Counts(other=float(max(tensor.numel() for tensor in (*given, *results))), bytes_moved=moved)


_COPIES = (
    "clone copy_ _to_copy cat stack index index_select gather embedding empty zeros ones full zero_ fill_ new_zeros"
)
_MOVES = {getattr(torch.ops.aten, name) for name in f"{_COPIES} new_empty arange constant_pad_nd".split()}
"""Operations that calculate nothing."""


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def table(by_part: Mapping[str, Counts], memory: str = "dram") -> list[tuple[str, float, float, float, float, float]]:
    """(part, MACs, accumulations, bytes, joules of arithmetic, joules with `memory`) of each, the largest first."""
    rows = []
    for part, counts in by_part.items():
        macs, name = counts.macs + counts.int8_macs, part or "outside of modules"
        rows.append(
            (name, macs, counts.acs + counts.int32_adds, counts.bytes_moved, counts.joules(), counts.joules(memory))
        )
    return sorted(rows, key=lambda row: -row[-1])
