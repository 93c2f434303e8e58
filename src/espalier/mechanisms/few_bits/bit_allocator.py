"""BitAllocator: which width and which step each row of a matrix has. Four policies: one pair for every node, for every
degree, from a bank by the row's largest value, or one for all. Widths that are not learned, those of Sylvie's rows
between ranks and of DiskGNN's packed rows, are in `row_widths`.

The widths are those of A2Q (arXiv 2302.00193): a row of `bits` B = round(|b|) has codes of at most 2^(B-1) - 1. Signed
codes take B bits; of rows without negative values the sign is left out, and they take B - 1. B = 1 leaves zero alone,
which takes nothing. Deviations: steps are learned by their logarithm and are powers of 2^(1/8), so that a step is one
byte in a file and the file holds the very numbers that training saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from espalier.kernels.row_bits import row_bytes
from espalier.kernels.row_widths import RowWidths
from espalier.kernels.step_codes import OCTAVE, STEPS, step_codes
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Int64, Shaped, UInt8

MOST = 8
"""Bits of a stored code at most."""
BIT_RATE, STEP_RATE, OWN_RATE = 1.0, 8.0, 0.5
"""How much faster than the weights widths and steps move; Adam moves every parameter by its rate, whatever the size of
its gradient, so a factor on the parameter is one on the rate. All steps of a layer move together by STEP_RATE, since
values grow while a network learns, and each of several by OWN_RATE besides. A2Q's authors move each by 4 times the
weights' rate and widths by 10 times, in GCN: a row of 16 values, half of them dropped, then pulls its pair about from
step to step."""
PRIOR = 64.0
"""Values of a pair that weigh as much as all of the layer where steps begin: the mean of few values says little."""
SPARSE = 0.25
"""Share of values other than 0 below which steps begin by those alone. LSQ's rule is for values that lie round zero as
a bell does; of words weighted by how rare they are one in fifty is not 0, and by the mean of all 2 bits reach a
fifteenth of the values."""
GRADIENT = 1e-3
"""What gradients of widths and steps are multiplied by, which Adam does not see: thousands of them together would else
be most of the norm by which all gradients are clipped."""


Total = Callable[[Tensor], Tensor]
"""Adds up a tensor over all who call it: ranks that each have some of the rows."""


def alone(value: Tensor) -> Tensor:
    """The plain `Total`: all rows are here."""
    return value


class RowIndex(NamedTuple):
    """Which nodes rows are of: `ids` int64 [rows] (None: all nodes in order), their in-degrees int64 [rows], how many
    of the first ones this rank owns (0: all), and which teach: `shown` bool [rows] (None: all)."""

    ids: Tensor | None = None
    degrees: Tensor | None = None
    owned: int = 0
    shown: Tensor | None = None


class _Learned(torch.autograd.Function):
    """A parameter times its rate, its gradient made small."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return raw * rate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (ctx.rate * GRADIENT), None


class _Step(torch.autograd.Function):
    """The step nearest to 2^logarithm; the gradient is that of the logarithm as it is."""

    @staticmethod
    def forward(ctx: Any, logarithm: Tensor) -> Tensor:
        step = STEPS.to(logarithm.device)[step_codes(logarithm).long()].to(logarithm.dtype)
        ctx.save_for_backward(step)
        return step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (step,) = ctx.saved_tensors
        return gradients[0] * step * math.log(2)


def rounded(bits: Tensor, signed: bool) -> Tensor:
    """B of real-valued bits: 1 to 8, or to 9 where codes have no sign."""
    return bits.abs().round().clamp(1, MOST if signed else MOST + 1)


def stored(bits: Tensor, signed: bool) -> UInt8[Tensor, " entries"]:
    """Bits that a code takes in memory: of B = 1 none."""
    whole = rounded(bits, signed)
    return torch.where(whole == 1, 0, whole if signed else whole - 1).to(torch.uint8)


def largest_code(bits: Tensor, signed: bool) -> Tensor:
    """2^(B-1) - 1."""
    return torch.exp2(rounded(bits, signed) - 1) - 1


class BitAllocator(nn.Module):
    """A width and a step for each row. Has state: the pairs, learned, and how many rows each stands for.

    Attributes:
        counts: float [entries], rows of the whole matrix that have the pair.
        learned: whether widths are; else they stay as they begin.
        rate: of the steps: see OWN_RATE.
        fits: whether each row has a step of its own, which is fitted to its values.
        shown: float [entries], 0 where a row's error teaches nothing; None: all do.
    """

    counts: Tensor
    fits = False
    shown: Tensor | None
    side = 0.0
    """Bits beside the pairs that a stored row takes, to say which pair it has."""

    def __init__(self, entries: int, bits: float, counts: Tensor | None = None, learned: bool = True) -> None:
        super().__init__()
        self.raw_bits = nn.Parameter(torch.full((entries,), bits / BIT_RATE), requires_grad=learned)
        self.rate = STEP_RATE if entries == 1 else OWN_RATE
        self.raw_step = nn.Parameter(torch.full((entries,), -3 / self.rate))
        self.raw_common = nn.Parameter(torch.zeros(()), requires_grad=entries > 1)
        self.learned = learned
        self.register_buffer("counts", torch.ones(entries) if counts is None else counts.float())
        self.register_buffer("shown", None, persistent=False)

    @property
    def bits(self) -> Float[Tensor, " entries"]:
        """Real-valued, the sign included."""
        return _Learned.apply(self.raw_bits, BIT_RATE)

    @property
    def logarithm(self) -> Float[Tensor, " entries"]:
        """log2 of the steps before they are rounded."""
        return _Learned.apply(self.raw_step, self.rate) + _Learned.apply(self.raw_common, STEP_RATE)

    @property
    def steps(self) -> Float[Tensor, " entries"]:
        """As stored."""
        return _Step.apply(self.logarithm)

    @torch.no_grad()
    def widths(self, signed: bool, shift: float = 0.0) -> RowWidths:
        """Of the entries, uint8 as stored and float64, where all are taken down by `shift` before they are rounded."""
        return RowWidths(stored((self.bits.abs() - shift).clamp(min=1), signed), self.counts.double())

    def entries_of(self, x: Tensor, index: RowIndex, signed: bool) -> Int64[Tensor, " rows"] | None:
        """The entry of each row of `x`; None: row i has entry i."""
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)

    @torch.no_grad()
    def spread(self, order: Shaped[Tensor, " entries"]) -> None:
        """Widths begin up to half a bit apart, rising with `order`. A target between two widths then takes a bit from
        some rows; from equal ones it takes it from all at once, and a network that begins with one bit for all loses
        units for good: on CiteSeer two seeds of ten ended 12 points lower."""
        places = order.argsort(stable=True)
        share = self.counts[places].cumsum(0) - self.counts[places] / 2
        self.raw_bits[places] += (share / self.counts.sum() - 0.5) / BIT_RATE

    @torch.no_grad()
    def begin(self, x: Float[Tensor, "rows columns"], index: RowIndex, signed: bool, total: Total = alone) -> None:
        """Steps from values: 2 mean|x| / sqrt(largest code), as LSQ begins (arXiv 1902.08153, section 2.1), where the
        mean is that of the pair's values and of the layer's, each by how many values it is of (PRIOR). Rows of zeros do
        not count, nor zeros where most values are (SPARSE); `total` adds up over ranks."""
        at, (sizes, columns) = self.entries_of(x, index, signed), _sizes(x, index, total)
        at = torch.arange(len(x), device=x.device) if at is None else at
        at = at[: index.owned or None]
        sizes = sizes[: index.owned or None]
        if index.shown is not None:
            sizes = torch.where(index.shown[: index.owned or None], sizes, 0)
        at = at[sizes > 0]
        sizes = sizes[sizes > 0].to(self.counts.dtype)
        zeros = self.counts.new_zeros(len(self.counts))
        sums, counts = (total(zeros.index_add(0, at, values)) for values in (sizes, torch.ones_like(sizes)))
        layer = total(torch.stack([sizes.sum(), sizes.new_tensor(len(sizes))]))
        if not layer[1]:
            return
        weight = counts * columns / (counts * columns + PRIOR)
        whole = (layer[0] / layer[1]).log2()
        means = torch.where(counts > 0, weight * ((sums / counts.clamp(min=1)).log2() - whole), 0) + whole
        largest = largest_code(self.bits, signed).clamp(min=1)
        self.raw_common.zero_()
        self.raw_step.copy_((1 + means - largest.log2() / 2) / self.rate)


def _sizes(x: Tensor, index: RowIndex, total: Total) -> tuple[Tensor, float]:
    """Of the values of each row that count where steps begin: their mean, and how many a row has."""
    counted = (x != 0).sum(1)
    mine = counted[: index.owned or None]
    mine = mine if index.shown is None else mine[index.shown[: index.owned or None]]
    values, rows = total(torch.stack([mine.sum(), mine.new_tensor(len(mine))]).double()).tolist()
    if 0 < values < SPARSE * rows * x.shape[1]:
        return x.abs().sum(1) / counted.clamp(min=1), values / rows
    return x.abs().mean(1), float(x.shape[1])


class UniformBits(BitAllocator):
    """One pair for all rows; its width is fixed."""

    def __init__(self, rows: int, bits: float) -> None:
        super().__init__(1, bits, torch.tensor([float(rows)]), learned=False)


class NodeBits(BitAllocator):
    """One pair for each node (A2Q). A node that no step has seen takes the pair of those that some has, whose range is
    nearest to its largest value. Has state besides: `seen` float [entries], 1 where a step has.

    `places`: which entry each node of the graph at hand has, -1: none, as it was not there in training. `hidden`: nodes
    that an inductive run holds out; without their edges, as training has them, their rows are not those of answers:
    they teach nothing and count as unseen. A target counts as many rows of the others in their place.
    """

    fits = True
    places: Tensor
    seen: Tensor

    def __init__(self, nodes: int, bits: float, places: Tensor | None = None, hidden: Tensor | None = None) -> None:
        shown = torch.ones(nodes)
        if hidden is not None:
            shown[hidden] = 0.0
        super().__init__(nodes, bits, shown * (nodes / max(1.0, float(shown.sum()))))
        self.in_order = places is None
        self.register_buffer("places", torch.arange(nodes) if places is None else places, persistent=False)
        self.register_buffer("seen", torch.zeros(nodes))
        self.shown = None if hidden is None else shown

    @torch.no_grad()
    def take(self, widths: UInt8[Tensor, " nodes"], steps: UInt8[Tensor, " nodes"], signed: bool) -> None:
        """The pairs of rows as they are stored, of all nodes. No step is fitted any more but those of another graph."""
        self.raw_bits.copy_((widths + torch.where(widths == 0, 1, int(not signed))).float() / BIT_RATE)
        self.raw_step.copy_((steps.float() - 128) / OCTAVE / self.rate)
        self.raw_common.zero_()
        self.seen.fill_(1.0)
        self.counts.fill_(1.0)
        self.fits = not self.in_order

    def entries_of(self, x: Tensor, index: RowIndex, signed: bool) -> Int64[Tensor, " rows"] | None:
        """By the node, unseen ones by value."""
        at = self.places if index.ids is None else self.places[index.ids]
        if self.training:
            self.seen[at] = 1.0 if self.shown is None else self.shown[at]
            return None if self.in_order and index.ids is None else at
        strange = (at < 0) | (self.seen[at] == 0)
        if not bool(strange.any()) or not bool(self.seen.any()):
            return at
        known = torch.nonzero(self.seen)[:, 0]
        closest = known[nearest(x, self.bits[known], self.steps[known], signed)]
        return torch.where(strange, closest, at)


_WIDER = 64 * np.exp2(np.arange(1, 8 * 18 + 1) / 8)
DEGREES: Int64[Tensor, " entries-1"] = torch.from_numpy(
    np.concatenate([np.arange(1, 65), np.unique(_WIDER.astype(np.int64))])
)
"""The least degree of each entry but the first: up to 64 each has its own, above eight share each doubling."""


class DegreeBits(BitAllocator):
    """One pair for each in-degree (MEGA), so that a node nobody has seen has one. A degree that the training graph
    lacks has the pair of the nearest degree that it has. `rows`: as many as there are, where `degrees` are of some."""

    def __init__(self, degrees: Int64[Tensor, " nodes"], bits: float, rows: int | None = None) -> None:
        counts = torch.bincount(torch.bucketize(degrees, DEGREES, right=True), minlength=len(DEGREES) + 1)
        share = 1.0 if rows is None else rows / max(1, len(degrees))
        super().__init__(len(DEGREES) + 1, bits, counts * share)

    def entries_of(self, x: Tensor, index: RowIndex, signed: bool) -> Int64[Tensor, " rows"] | None:
        """By degree."""
        assert index.degrees is not None
        at = torch.bucketize(index.degrees, DEGREES.to(index.degrees.device), right=True)
        known = torch.nonzero(self.counts > 0)[:, 0]
        if len(known) in (0, len(self.counts)):
            return at
        return known[_closest(known, torch.arange(len(self.counts), device=known.device))][at]


QUANTILE = 1 << 24
"""Values that torch.quantile takes at most."""


class BankBits(BitAllocator):
    """A bank of pairs for graphs that nobody has seen: each row takes the pair whose range is nearest to its largest
    value (A2Q's nearest neighbour strategy)."""

    side = 16.0

    def __init__(self, rows: int, bits: float, pairs: int = 1000) -> None:
        super().__init__(pairs, bits, torch.full((pairs,), rows / pairs))
        spread = torch.linspace(-8, 2, pairs)
        self.raw_step.data.copy_(spread / self.rate)

    def entries_of(self, x: Tensor, index: RowIndex, signed: bool) -> Int64[Tensor, " rows"] | None:
        """By value."""
        return nearest(x, self.bits, self.steps, signed)

    def begin(self, x: Tensor, index: RowIndex, signed: bool, total: Total = alone) -> None:
        """Steps over the range of the rows' largest values, evenly by their logarithm."""
        largest = x.detach().abs().amax(1)
        largest = largest[largest > 0]
        if len(largest):
            largest = largest[:: -(-len(largest) // QUANTILE)]  # evenly, no more than quantile takes
            ends = (largest.quantile(torch.tensor([0.001, 0.999], dtype=x.dtype))).log2()
            code = math.log2(max(1.0, float(largest_code(self.bits[:1].detach(), signed))))
            spread = torch.linspace(float(ends[0]) - 0.5, float(ends[1]) + 0.5, len(self.counts)) - code
            self.raw_step.data.copy_(spread / self.rate)


@torch.no_grad()
def nearest(x: Float[Tensor, "rows columns"], bits: Tensor, steps: Tensor, signed: bool) -> Int64[Tensor, " rows"]:
    """The pair whose largest value is nearest to that of each row; of equal ones the first by (value, number).

    O(rows log pairs): the pairs are sorted, and of each row's two neighbours the nearer one is taken.
    """
    ranges = steps * largest_code(bits, signed)
    order = torch.argsort(ranges, stable=True)
    ascending = ranges[order]
    wanted = x.detach().abs().amax(1)
    return order[torch.searchsorted(ascending, ascending[_closest(ascending, wanted)])]


def _closest(ascending: Tensor, wanted: Tensor) -> Tensor:
    """int64 [wanted]: where in `ascending` the value nearest to each lies; of two as near the lower one."""
    above = torch.searchsorted(ascending, wanted).clamp(max=len(ascending) - 1)
    below = (above - 1).clamp(min=0)
    nearer = (ascending[above] - wanted).abs() < (wanted - ascending[below]).abs()
    return torch.where(nearer, above, below)


# --- a target ---------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """What a target is over: an allocator, the columns of its rows, and whether its codes are signed."""

    allocator: BitAllocator
    columns: int
    signed: bool


class MemoryTarget:
    """Codes of all layers in at most `target` bytes, as A2Q counts them: steps and widths come on top. Has state: the
    shift it has found last.

    Rows are those that allocators count: of the graph that was trained on, wherever the network is applied, so that
    widths stay those that were trained. `target` None: two bits for each of their values.

    All widths are taken down by the same `shift`, the least that is enough, in training as in evaluation, so that steps
    are learned for the widths that will be stored. `penalty` keeps the widths themselves near the target, as A2Q's
    memory loss does: relu(bytes - target)^2, here as a share of the target and in proportion to the rows, so that one
    weight fits all graphs.

    Raises UserError, where it is `checked`: a target in which not every row of every layer could have one bit. Of a
    trained network it is not: its rows are known when it is loaded.
    """

    weight = 1.0

    def __init__(self, layers: Sequence[Layer], target: int | None = None, checked: bool = True) -> None:
        self.layers = [layer for layer in layers if layer.allocator.learned]
        self.asked = target
        if checked and self.layers and self.target < self.least:
            raise UserError(
                f"quant.target is {self.target:,} bytes, and one bit for each of {round(self.rows):,} rows takes "
                f"{self.least:,}.",
                why="a row with less has no value at all",
                do=f'quant.target = "{self.least}B" or more; with 2 bits for each value it is {self._default():,} '
                "bytes",
            )
        self._known: tuple[int, list[Tensor], float] = (0, [], 0.0)

    @property
    def target(self) -> int:
        """In bytes."""
        return self._default() if self.asked is None else self.asked

    @property
    def rows(self) -> float:
        """Of all layers."""
        return sum(float(layer.allocator.counts.sum()) for layer in self.layers)

    @property
    def least(self) -> int:
        """Bytes with one bit for each row."""
        return math.ceil(self.rows / 8)

    def _default(self) -> int:
        return max(1, math.ceil(sum(float(layer.allocator.counts.sum()) * layer.columns for layer in self.layers) / 4))

    def bytes_at(self, shift: float = 0.0) -> float:
        """Bytes of the codes where every width is taken down by `shift` before it is rounded."""
        return sum(self.bytes_of(layer, shift) for layer in self.layers)

    @staticmethod
    def bytes_of(layer: Layer, shift: float = 0.0) -> float:
        """Of one layer; each row begins with a byte."""
        widths = layer.allocator.widths(layer.signed, shift)
        return float(widths.total(lambda bits: row_bytes(layer.columns, bits.to(torch.int64))))

    def penalty(self) -> Tensor:
        """The loss that counts in gradients; 0 at and below the target."""
        total: Any = 0.0
        for layer in self.layers:
            width = (layer.allocator.bits.abs() - (1 - layer.signed)).clamp(min=0)
            total = total + (width @ layer.allocator.counts.to(width.dtype)) * layer.columns / 8
        excess = torch.as_tensor(total / self.target - 1).clamp(min=0)
        return self.weight * self.rows * excess.square()

    def shift(self) -> float:
        """See the class; found anew when widths, or the rows that they are counted for, have changed."""
        pairs = [(layer.allocator.raw_bits.detach(), layer.allocator.counts) for layer in self.layers]
        now, (before, known, shift), target = (
            [tensor.cpu() for pair in pairs for tensor in pair],
            self._known,
            self.target,
        )
        if target != before or not known or not all(map(torch.equal, now, known)):
            shift = self._least_shift()
            self._known = (target, [tensor.clone() for tensor in now], shift)
        return shift

    def _least_shift(self) -> float:
        if any(layer.allocator.raw_bits.dtype != torch.float32 for layer in self.layers) or not self.layers:
            return self.bisected()
        from espalier.mechanisms.few_bits import row_steps_cpu

        bits = [layer.allocator.bits.detach().cpu() for layer in self.layers]
        of = np.repeat(np.arange(len(bits)), [len(entries) for entries in bits])
        counts = torch.cat([layer.allocator.counts.detach().cpu().double() for layer in self.layers])
        sizes = np.zeros((len(bits), MOST + 2))
        for at, layer in enumerate(self.layers):
            widths = stored(torch.arange(MOST + 2, dtype=torch.float32), layer.signed)
            sizes[at] = row_bytes(layer.columns, widths.long().numpy())
        options = (float(self.target), MOST + 1.0)
        return float(row_steps_cpu.least_shift(torch.cat(bits), counts, of, sizes, options))

    def bisected(self) -> float:
        """The least shift, plainly."""
        low = 0.0
        high = MOST + 1.0
        if self.bytes_at() <= self.target:
            return low
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self.bytes_at(middle) <= self.target else (middle, high)
        return high
