"""A2Q: rows of features quantized with a width and a step of their own, both learned. After Zhu et al., ICLR 2023,
arXiv 2302.00193.

Most nodes of a graph have small aggregates and few have large ones, so a width for each node takes far fewer bits than
one for all. In semi-supervised tasks few nodes hear of the loss; widths and steps are therefore learned from a node's
own quantization error (the local gradient), while features get the gradient of the task.

A row of one value is its own to within half a step, not exactly: steps are those of a table, see base.py.

Deviations: a row's error is measured in its own step (mean |x_q - x| / step, the divisor held fixed), and for the width
in its range (step 2^(B-1)), so that rows of all sizes learn alike and one weight of the memory loss fits all; steps are
powers of 2^(1/8), see base.py; each row's step is fitted to its values round the learned one, in training as after it
(`fitted`). The gradient of the task does not pass clipped values (`ste = "clip"`), as in the paper; in the authors'
code the mask never applies (`"pass"`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from espalier.kernels.base import operation
from espalier.kernels.step_codes import OCTAVE, STEPS, step_codes
from espalier.mechanisms.few_bits.bit_allocator import (
    MOST,
    STEP_RATE,
    BitAllocator,
    Layer,
    RowIndex,
    Total,
    _Step,
    alone,
    largest_code,
    rounded,
    stored,
)
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Integer, UInt8


class Rule(NamedTuple):
    """How a quantizer rounds and learns.

    Attributes:
        signed: codes have a sign; else negative values become 0.
        local: widths and steps follow the quantization error of their own row, times this (0: the gradient of the
            task).
        ste: whether the gradient of the task passes values that were clipped.
        owned: rows, the first ones, whose own errors count (0: all): others are counted by the rank that owns them. The
            gradient of the task is that of all rows: each rank has its part of it.
    """

    signed: bool = True
    local: float = 0.0
    ste: Literal["clip", "pass"] = "clip"
    owned: int = 0


def codes_of(x: Tensor, step: Tensor, bits: Tensor, signed: bool) -> Tensor:
    """sign(x) min(floor(|x| / step + 0.5), 2^(B-1) - 1), in the dtype of `x`; `step` and `bits` broadcast."""
    x = x if signed else x.clamp(min=0)
    return x.sign() * torch.minimum((x.abs() / step + 0.5).floor(), largest_code(bits, signed))


class FakeQuantize(torch.autograd.Function):
    """`apply(x, step, bits, rule)`: step * code, with the gradients of the paper's equations 3 to 5.

    With `in` where |x| <= step (2^(B-1) - 1): dx_q/dstep = code - x/step if in, else the largest code with its sign;
    dx_q/dbits = 0 if in, else sign(x) 2^(B-1) ln 2 step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, bits: Tensor, rule: Rule) -> Tensor:
        ctx.rule = rule
        quantized = rounded_values(x, step, bits, rule)
        ctx.save_for_backward(x, step, bits, quantized.dstep, quantized.dbits)
        return quantized.values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, step, bits, *local = ctx.saved_tensors
        if ctx.rule.local and not ctx.needs_input_grad[0]:
            return None, local[0], local[1], None
        dx, dstep, dbits = rounding_gradients(x, step, bits, ctx.rule, gradients[0])
        return (dx, *local, None) if ctx.rule.local else (dx, dstep, dbits, None)


class Learns(torch.autograd.Function):
    """`apply(y, step, bits, dstep, dbits)`: y; the gradients of step and bits are those given. Where x needs none, its
    codes go without gradients through a layer whose result is `y`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs[2:])
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *ctx.saved_tensors, None, None


class Rounded(NamedTuple):
    """Step * code of every value, and the local gradients of steps and bits (None: the rule has none)."""

    values: Tensor
    dstep: Tensor | None = None
    dbits: Tensor | None = None


def compiled(x: Tensor, step: Tensor, bits: Tensor, *_: Any) -> bool:
    """Whether kernels round: float32 rows with a step for each row or column."""
    shapes = ((len(x), 1), (1, x.shape[1])) if x.dim() == 2 else ()
    return (
        x.dtype == step.dtype == torch.float32 and x.numel() > 0 and step.shape == bits.shape and step.shape in shapes
    )


def _in_one_pass(
    x: Tensor, step: Tensor, bits: Tensor, rule: Rule, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What `row_steps_cpu.round_values` makes, and its two sums in the shape of steps."""
    from espalier.mechanisms.few_bits import row_steps_cpu

    pairs = step.flatten().contiguous(), largest_code(bits, rule.signed).flatten().contiguous()
    by_row = step.shape == (len(x), 1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = np.zeros((2, 1 if by_row else row_steps_cpu.BLOCKS, step.numel()), np.float32)
    summed = (upstream is None) == (rule.local != 0)
    added = (len(x) if upstream is not None else rule.owned or len(x)) if summed else 0
    options = int(by_row), int(rule.signed), int(rule.ste == "pass"), added
    given = x.detach().contiguous(), (x[:0] if upstream is None else upstream).detach().contiguous()
    arrays = [tensor.numpy() for tensor in (*given, *pairs)]
    row_steps_cpu.round_values(*arrays[:2], tuple(arrays[2:]), options, out.numpy(), sums)
    totals = sums[:, 0] if by_row else sums.sum(1, dtype=np.float64).astype(np.float32)
    errors, beyond = (torch.from_numpy(total).view(step.shape) for total in totals)
    return out, errors, beyond


def _inside(x: Tensor, step: Tensor, bits: Tensor, signed: bool) -> Tensor:
    top = step * largest_code(bits, signed)
    return (x.abs() <= top) if signed else (x <= top) & (x >= 0)


@operation("rounded_values")
@torch.no_grad()
def rounded_values(x: Tensor, step: Tensor, bits: Tensor, rule: Rule) -> Rounded:
    """See `FakeQuantize`; `step` and `bits` alike: of rows [rows, 1] or columns [1, columns]."""
    code = codes_of(x, step, bits, rule.signed)
    if not rule.local:
        return Rounded(code * step)
    error = (code * step - x).sign() / step * (rule.local * step.numel() / x.numel())
    if rule.owned:
        error[rule.owned :] = 0
    inside = _inside(x, step, bits, rule.signed)
    sign = x.sign() if rule.signed else (x > 0).to(x.dtype)
    dstep = error * torch.where(inside, code - x / step, code)
    dbits = error * torch.where(inside, 0, sign * math.log(2) * step)
    return Rounded(code * step, dstep.sum_to_size(step.shape), dbits.sum_to_size(bits.shape))


@rounded_values.fast("cpu", wins=compiled)
@torch.no_grad()
def rounded_by_kernel(x: Tensor, step: Tensor, bits: Tensor, rule: Rule) -> Rounded:
    """numba: one pass."""
    out, errors, beyond = _in_one_pass(x, step, bits, rule)
    weight = rule.local * step.numel() / x.numel()
    return Rounded(out, errors / step * weight, beyond * (-weight * math.log(2))) if rule.local else Rounded(out)


@operation("rounding_gradients")
@torch.no_grad()
def rounding_gradients(
    x: Tensor, step: Tensor, bits: Tensor, rule: Rule, upstream: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Those of the task: of values, and, where the rule is not local, of steps and bits: see `FakeQuantize`."""
    inside = _inside(x, step, bits, rule.signed)
    dx = upstream if rule.ste == "pass" else upstream * inside
    if rule.local:
        return dx, None, None
    code = codes_of(x, step, bits, rule.signed)
    largest = largest_code(bits, rule.signed)
    dstep = upstream * torch.where(inside, code - x / step, code)
    sign = x.sign() if rule.signed else (x > 0).to(x.dtype)
    dbits = upstream * torch.where(inside, 0, sign * (largest + 1) * math.log(2) * step)
    return dx, dstep.sum_to_size(step.shape), dbits.sum_to_size(bits.shape)


@rounding_gradients.fast("cpu", wins=compiled)
@torch.no_grad()
def gradients_by_kernel(
    x: Tensor, step: Tensor, bits: Tensor, rule: Rule, upstream: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """numba: one pass."""
    out, dstep, beyond = _in_one_pass(x, step, bits, rule, upstream)
    if rule.local:
        return out, None, None
    return out, dstep, beyond * (largest_code(bits, rule.signed) + 1) * math.log(2) * step


PARTS = 2
"""Of an octave, that the steps of rows are apart."""
OFFSETS = tuple(part / PARTS for part in range(-2 * PARTS, PARTS + 1))
"""Octaves from the learned step of those that a row's is taken from."""
_TRIED = torch.cat([STEPS[:1].expand(16), STEPS[:: OCTAVE // PARTS], STEPS[-1:].expand(16)]).numpy()


@operation("fitted_steps")
@torch.no_grad()
def fitted(x: Tensor, logarithm: Tensor, bits: Tensor, signed: bool, gain: float = 1.0) -> Tensor:
    """log2 of the step of each row of `x / gain` that has the least squared error, among those in OFFSETS of the
    learned one. In so many PARTS of an octave, so that few steps are to be told apart in a package."""
    middle = (PARTS * logarithm).round() / PARTS
    best = middle
    least = None
    x = x if gain == 1 else x / gain
    for offset in OFFSETS:
        step = _Step.apply(middle + offset)[:, None].to(x.dtype)
        error = (codes_of(x, step, bits[:, None].to(x.dtype), signed) * step - x).square().sum(1)
        better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        least = error if least is None else torch.where(better, error, least)
        best = torch.where(better, middle + offset, best)
    return best


@fitted.fast("cpu", wins=lambda x, *_: x.dtype == torch.float32)
@torch.no_grad()
def fitted_by_rows(x: Tensor, logarithm: Tensor, bits: Tensor, signed: bool, gain: float = 1.0) -> Tensor:
    """numba: a row's values are read once."""
    from espalier.mechanisms.few_bits import row_steps_cpu

    middle = ((PARTS * logarithm).round() / PARTS).float().contiguous()
    pairs = middle.numpy(), largest_code(bits, signed).float().contiguous().numpy()
    tables = (_TRIED, np.array(OFFSETS, np.float32))
    out = torch.empty_like(middle)
    row_steps_cpu.fit(x.contiguous(), pairs, tables, (int(signed), np.float32(gain)), out)
    return out


class Coded(NamedTuple):
    """Rows as they are stored: codes int8 (signed) or uint8 [rows, columns]; of each row the stored width, the code of
    its step (`base.STEPS`), and the entry of its allocator."""

    codes: Integer[Tensor, "rows columns"]
    widths: UInt8[Tensor, " rows"]
    steps: UInt8[Tensor, " rows"]


class Unchanged:
    """What is made of each row of a matrix and of its pair, kept from the second time on that the very same matrix
    comes (features that no dropout changes do, every step): only rows whose pairs have changed are then made anew. Has
    state: the matrix, the pairs, and what was made."""

    def __init__(self) -> None:
        self.of: tuple[Any, ...] = ()
        self.pairs: tuple[Tensor, ...] = ()
        self.made: tuple[Tensor, ...] = ()
        self.versions: list[int] = []

    def __reduce__(self) -> tuple[type[Unchanged], tuple[()]]:
        return Unchanged, ()

    @torch.no_grad()
    def __call__(self, x: Tensor, tag: Any, pairs: tuple[Tensor, ...], make: Callable[..., Any]) -> Any:
        """`make(x, *pairs)`: of each row on its own; it may depend on `tag` besides."""
        if x.device.type != "cpu" or x.requires_grad or x.is_inference():
            return make(x, *pairs)
        same = self.of and self.of[0]() is x and self.of[1:] == (x._version, tag)
        if not same:
            self.of = (weakref.ref(x), x._version, tag)
            self.pairs = ()
            self.made = ()
            return make(x, *pairs)
        if not self.made or self.versions != [result._version for result in self.made]:
            changed = torch.arange(len(x))
        else:
            changed = torch.stack([new != old for new, old in zip(pairs, self.pairs, strict=True)]).any(0).nonzero()
        if 2 * len(changed) > len(x):
            self.made = tuple(make(x, *pairs))
        elif len(changed):
            at = changed.flatten()
            for old, new in zip(self.made, make(x[at], *(tensor[at] for tensor in pairs)), strict=True):
                old[at] = new
        self.pairs, self.versions = tuple(tensor.clone() for tensor in pairs), [result._version for result in self.made]
        return self.made


class FeatureQuantizer(nn.Module):
    """Rows of features, quantized. Has state: its allocator's pairs.

    >>> from espalier.mechanisms.few_bits.bit_allocator import NodeBits
    >>> quantizer = FeatureQuantizer(NodeBits(3, bits=4), columns=2, rule=Rule(signed=False, local=1.0))
    >>> x = torch.tensor([[0.5, 1.0], [0.0, 0.2], [3.0, 0.1]])
    >>> quantizer.begin(x)
    >>> bool((quantizer(x) - x).abs().max() < 0.5)
    True

    Attributes:
        gain: what dropout multiplies values by while training, and steps with them.
        share: of the batch that this pass is over: local gradients of several passes then add up to those of one.
        shift: taken from all widths, see `base.MemoryTarget`.
        narrowing: steps of training over which that shift grows from nothing to all of it; 0: it is whole at once.
        step: of training, that passes are made for.
        last: log2 of each row's step in the last pass, before `factor`.
    """

    def __init__(self, allocator: BitAllocator, columns: int, rule: Rule) -> None:
        super().__init__()
        self.allocator = allocator
        self.columns = columns
        self.rule = rule
        self.gain = 1.0
        self.share = 1.0
        self.beginning: Total | None = None
        self.shift: Any = float
        self.narrowing = 0.0
        self.step = 0
        self.last = torch.zeros(0)
        self.kept_steps = Unchanged()
        self.kept_values = Unchanged()

    @property
    def layer(self) -> Layer:
        """For a target."""
        return Layer(self.allocator, self.columns, self.rule.signed)

    def begin(self, x: Float[Tensor, "rows columns"], index: RowIndex | None = None, total: Total = alone) -> None:
        """Steps that fit the values `x`; `total` adds up over ranks."""
        self.allocator.begin(x, index or RowIndex(), self.rule.signed, total)

    def _pairs(self, x: Tensor, index: RowIndex) -> tuple[Tensor, Tensor, Tensor | None]:
        at = self.allocator.entries_of(x, index, self.rule.signed)
        bits = self.allocator.bits
        logarithm = self.allocator.logarithm
        shifted = bits.abs() - self._shift()
        bits = shifted + (shifted.clamp(min=1) - shifted).detach()  # what has no bits may get some again
        if at is not None:
            bits = bits[at]
            logarithm = logarithm[at]
        learns = index.shown
        shown = self.allocator.shown
        if learns is None and shown is not None:
            learns = (shown if at is None else shown[at]) > 0
        if self.training and learns is not None:
            bits = torch.where(learns, bits, bits.detach())
            logarithm = torch.where(learns, logarithm, logarithm.detach())
        if self.allocator.fits:
            with torch.no_grad():
                given = (PARTS * logarithm).round() / PARTS, rounded(bits, self.rule.signed)
            tag = self.rule.signed, self.factor
            (fit,) = self.kept_steps(x, tag, given, lambda *rows: [fitted(rows[0], rows[1], rows[2], *tag)])
            logarithm = fit + (logarithm - logarithm.detach())
        return bits, logarithm, at

    def _shift(self) -> float:
        shift: float = self.shift()
        return shift * min(1.0, self.step / self.narrowing) if self.training and self.narrowing else shift

    def forward(self, x: Float[Tensor, "rows columns"], index: RowIndex | None = None) -> Float[Tensor, "rows columns"]:
        """step * code of every value."""
        values, learned = self.rounded(x, index)
        return values if learned is None else learned(values)

    def rounded(self, x: Tensor, index: RowIndex | None = None) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """step * code of every value. Where these need no gradients to learn by (`x` has none, and the rule is local),
        what is returned besides is called with a result of theirs, which then carries the local gradients."""
        index = index or RowIndex()
        if self.beginning is not None:
            self.begin(x, index, self.beginning)
        bits, logarithm, _ = self._pairs(x, index)
        rule = self.rule._replace(local=self.rule.local * self.share, owned=index.owned)
        step = _Step.apply(logarithm)
        step = step * self.factor if self.factor != 1 else step
        step, bits, self.last = step.to(x.dtype)[:, None], bits.to(x.dtype)[:, None], logarithm.detach()
        if x.requires_grad or not rule.local or not torch.is_grad_enabled():
            return FakeQuantize.apply(x, step, bits, rule), None
        pairs = step.detach(), rounded(bits.detach(), rule.signed)
        if index.owned:
            values, *local = rounded_values(x, *pairs, rule)
        else:
            values, *local = self.kept_values(
                x, rule, pairs, lambda *rows: rounded_values(rows[0], rows[1], rows[2], rule)
            )
        return values, lambda result: Learns.apply(result, step, bits, *local)

    @property
    def factor(self) -> float:
        """What steps are multiplied by: the gain, while training."""
        return self.gain if self.training else 1.0

    @torch.no_grad()
    def codes(self, x: Float[Tensor, "rows columns"], index: RowIndex | None = None) -> Coded:
        """What `forward` rounds `x` to, in integers: `codes * STEPS[steps]` are its very numbers."""
        bits, logarithm, _ = self._pairs(x, index or RowIndex())
        steps = _Step.apply(logarithm).to(x.dtype)[:, None]
        kind = torch.int8 if self.rule.signed else torch.uint8
        codes = codes_of(x, steps, bits.to(x.dtype)[:, None], self.rule.signed).to(kind)
        return Coded(codes, stored(bits, self.rule.signed), step_codes(logarithm))


class ColumnQuantizer(nn.Module):
    """Columns of a matrix of `bits` each with a learned step: weights (by output), messages X W, and sums. Has state:
    the steps. A `local` one learns them from its own error, else from the task."""

    def __init__(self, columns: int, bits: int, local: bool, dim: int = 1) -> None:
        super().__init__()
        if not 2 <= bits <= MOST:
            raise UserError(f"{bits} bits of signed codes are not possible.", do=f"2 to {MOST}")
        self.raw_step = nn.Parameter(torch.full((columns,), -3 / STEP_RATE))
        self.bits = bits
        self.local = local
        self.dim = dim
        self.share = 1.0
        self.beginning: Total | None = None

    def _step(self, x: Tensor) -> Tensor:
        step: Tensor = _Step.apply(self.raw_step * STEP_RATE).to(x.dtype)
        return step[None, :] if self.dim == 1 else step[:, None]

    @torch.no_grad()
    def begin(
        self, x: Float[Tensor, "rows columns"], owned: int = 0, total: Total = alone, shown: Tensor | None = None
    ) -> None:
        """Steps that fit the values of `x`, as LSQ begins; `owned`: see `Rule`; `total` adds up over ranks; `shown`:
        see `RowIndex`."""
        sizes = x[: owned or None].abs()
        sizes = sizes if shown is None else sizes[shown[: owned or None]]
        sizes = total(sizes.sum(1 - self.dim)) / total(sizes.new_tensor(sizes.shape[1 - self.dim]))
        middle = sizes[sizes > 0].median() if bool((sizes > 0).any()) else torch.ones(())
        sizes = torch.where(sizes > 0, sizes, middle)
        self.raw_step.copy_((2 * sizes / math.sqrt(2 ** (self.bits - 1) - 1)).log2() / STEP_RATE)

    def forward(
        self, x: Float[Tensor, "rows columns"], owned: int = 0, shown: Tensor | None = None
    ) -> Float[Tensor, "rows columns"]:
        """step * code of every value. `owned`: see `Rule`; `shown`: see `RowIndex`."""
        if self.beginning is not None:
            self.begin(x, owned, self.beginning, shown)
        step = self._step(x)
        bits = step.new_full(step.shape, self.bits).detach()
        rule = Rule(local=self.share * (len(x) / owned if owned else 1.0) if self.local else 0.0, owned=owned)
        values: Tensor
        if shown is None or not rule.local:
            return FakeQuantize.apply(x, step, bits, rule)
        teach = x.detach()[: owned or None][shown[: owned or None]]
        values = FakeQuantize.apply(x, step.detach(), bits, rule)
        if not len(teach):
            return values
        rule = rule._replace(local=rule.local * len(teach) / len(x), owned=0)
        _, *learned = rounded_values(teach, step.detach(), bits, rule)
        return Learns.apply(values, step, bits, *learned)

    @torch.no_grad()
    def codes(self, x: Float[Tensor, "rows columns"]) -> tuple[Tensor, Tensor]:
        """int8 codes, and the step of each column (or row): `codes * step` is what `forward` gives."""
        step = self._step(x)
        return codes_of(x, step, step.new_full(step.shape, self.bits), True).to(torch.int8), step


def quantize_weights(module: nn.Module, bits: int) -> None:
    """Every `nn.Linear` (and PyG's) below `module` multiplies by a weight of `bits` bits, a learned step for each
    output. Raises UserError: bits outside 2 to 8."""
    for layer in [child for child in module.modules() if isinstance(getattr(child, "weight", None), nn.Parameter)]:
        weight = layer.weight
        if isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(layer, nn.Embedding):
            quantizer = ColumnQuantizer(len(weight), bits, local=False, dim=0)
            quantizer.begin(weight)
            parametrize.register_parametrization(layer, "weight", quantizer, unsafe=True)


def quantize_inputs(layer: nn.Module, quantizer: FeatureQuantizer) -> None:
    """The rows that `layer` is called with (its first argument) are quantized: for anybody's layer of message passing,
    PyG's among them. The quantizer becomes a part of the layer."""
    layer.add_module("quantizer", quantizer)

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (quantizer(inputs[0]), *inputs[1:])

    layer.register_forward_pre_hook(before)


def quantizers_of(model: nn.Module) -> Iterable[FeatureQuantizer]:
    """All in `model`, in order."""
    return [module for module in model.modules() if isinstance(module, FeatureQuantizer)]
