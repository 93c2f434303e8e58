"""LoRA: frozen matrices, each with a trained product of two thin ones beside it (arXiv 2106.09685).

y = x W' + alpha / rank * (x A') B', with A [rank, in] drawn as PEFT draws it and B [out, rank] zero, so that training
begins at the model's own answers. rsLoRA (arXiv 2312.03732) scales by alpha / sqrt(rank). DoRA (arXiv 2402.09353)
trains the length of each row of W + scale * B A by itself. Frozen matrices may be kept in bf16, or in 8 or 4 bits
(QLoRA's idea, arXiv 2305.14314, here with integer codes and a bf16 scale for each row, or for 64 columns of it); then
the tables of tokens are bf16.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.language.gpt import GPT
from espalier.language.operation_counts import DecoderLoad
from espalier.plan.axes.flat_layout import Sized
from espalier.recipe import Adapters
from espalier.recipe.cost import Anatomy, Product
from espalier.recipe.decoder_shapes import DecoderSizes

if TYPE_CHECKING:
    from jaxtyping import BFloat16, Float, Float32, Int8

TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
GROUP = 64
"""Columns that share a scale in 4 bits."""
ISSUED = 42
"""Operations of a block's forward pass without adapters."""
CAST, CODED = 6, 20
"""Bytes read and written for each value of a matrix that is cast, and that is made of codes and cast, for a product."""
BITS = {"bf16": 16, "int8": 8, "int4": 4}
"""Of a frozen value, by `tune.frozen`."""


class LoraLinear(nn.Linear):
    """A linear layer of a frozen `weight`, with an adapter. `active = False` computes without the adapter."""

    def __init__(self, inner: nn.Linear, options: Adapters) -> None:
        nn.Module.__init__(self)
        self.in_features = inner.in_features
        self.out_features = inner.out_features
        self.rank = options.rank
        self.active = True
        alpha = 2.0 * options.rank if options.alpha is None else options.alpha
        self.scale = alpha / (math.sqrt(options.rank) if options.rslora else options.rank)
        self.weight = inner.weight
        self.weight.requires_grad_(False)
        self.register_parameter("bias", inner.bias)
        if inner.bias is not None:
            inner.bias.requires_grad_(False)
        wide = torch.promote_types(inner.weight.dtype, torch.float32)
        place: dict[str, Any] = {"device": inner.weight.device, "dtype": wide}
        self.lora_a = nn.Parameter(torch.empty(options.rank, self.in_features, **place))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, options.rank, **place))
        self.magnitude = nn.Parameter(torch.empty(self.out_features, **place)) if options.dora else None

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The frozen layer's answer and the adapter's."""
        if self.magnitude is None or not self.active:
            return self.adapted(F.linear(x, self.weight, self.bias), x)
        answer = self.adapted(F.linear(x, self.weight), x)
        length = self.merged_directions().norm(dim=1).detach()  # a constant in backward (section 4.3 of the paper)
        scaled = answer * (self.magnitude / length)
        return scaled if self.bias is None else scaled + self.bias

    def adapted(self, plain: Tensor, x: Tensor) -> Tensor:
        """The frozen layer's answer and what the adapter adds to it."""
        return plain + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b) if self.active else plain

    def merged_directions(self) -> Float[Tensor, "out in"]:
        """The frozen matrix and the product of the adapter's."""
        return self.dense() + self.scale * self.lora_b @ self.lora_a

    def dense(self) -> Float[Tensor, "out in"]:
        """The frozen matrix."""
        return self.weight

    @torch.no_grad()
    def merged(self) -> Float[Tensor, "out in"]:
        """The matrix that computes what this layer does."""
        directions = self.merged_directions()
        if self.magnitude is not None:
            directions = directions * (self.magnitude / directions.norm(dim=1))[:, None]
        return directions

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Fills the adapter: A uniform within 1 / sqrt(in) (`kaiming_uniform_(a=sqrt(5))`, as PEFT does), B zero."""
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(self.in_features)
        drawn = torch.empty(self.lora_a.shape).uniform_(-bound, bound, generator=generator)
        self.lora_a.copy_(drawn)
        self.lora_b.zero_()
        if self.magnitude is not None:
            self.magnitude.copy_(self.weight.norm(dim=1))


Fill = Callable[[nn.Module, str], None]
"""Gives a module, by its name, the values of the parameters that it holds itself."""


def adapt(model: GPT, options: Adapters, seed: int, fill: Fill | None = None) -> GPT:
    """`model` with all its weights frozen and an adapter beside each of `options.targets`, in place.

    Frozen weights are no part of its `state_dict`: whoever loads that builds the model from the same weights first.
    `fill`: of a model on the meta device; matrices are filled one by one, so that one of them at a time is whole.
    """
    targets = options.targets or TARGETS
    bits = BITS.get(options.frozen)
    for name, layer in [*model.named_modules()]:
        if fill is not None:
            fill(layer, name)
        layer.requires_grad_(False)
        if not (name.startswith("blocks.") and isinstance(layer, nn.Linear)):
            continue
        parent, _, child = name.rpartition(".")
        adapted = LoraLinear(layer, options) if child in targets else layer
        setattr(model.get_submodule(parent), child, adapted)
        if adapted.weight.is_meta:
            continue
        if isinstance(adapted, LoraLinear):
            adapted.begin(zlib.crc32(f"{seed} {name}".encode()))
        if bits is not None:
            compress(adapted, bits)
    if bits is not None:
        for table in {model.embedding.weight, model.words}:
            table.data = table.data.to(torch.bfloat16)
        model.embedding.__class__ = WideEmbedding
    leave_out_frozen(model)
    return model


class WideEmbedding(nn.Embedding):
    """A table stored in bf16 that begins the residual stream in fp32."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def leave_out_frozen(model: nn.Module) -> None:
    """Makes `state_dict` and `load_state_dict` of `model` those of its trainable parameters and its buffers."""

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                state.pop(prefix + name, None)

    def loaded(module: nn.Module, keys: Any) -> None:
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        keys.missing_keys[:] = [key for key in keys.missing_keys if key not in frozen]

    model.register_state_dict_post_hook(saved)
    model.register_load_state_dict_post_hook(loaded)


def layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The adapted layers by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Computes as the frozen model does."""
    adapted = list(layers(model).values())
    for layer in adapted:
        layer.active = False
    try:
        yield
    finally:
        for layer in adapted:
            layer.active = True


def frozen_sizes(model: GPT, options: Adapters, each: int) -> Iterator[Sized]:
    """The weights under the adapters of `model` (maybe on the meta device), of a reference beside it, and all else that
    is frozen: `each` bytes for a value, or codes and scales as `compress` makes them."""
    bits = BITS.get(options.frozen)
    tables = {model.embedding.weight, model.words}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        block = int(name.split(".")[1]) if name.startswith("blocks.") else None
        stored = [(parameter.numel(), each if bits is None or parameter not in tables else 2)]
        if bits is not None and block is not None and parameter.dim() == 2:
            stored = coded(parameter.shape[0], parameter.shape[1], bits)
        yield from (Sized(count, size, block, (f"{size} bytes", False), False) for count, size in stored)


def coded(rows: int, columns: int, bits: int) -> list[tuple[int, int]]:
    """(elements, bytes of each) of the codes and scales of a matrix, see `quantized`."""
    if bits == BITS["bf16"]:
        return [(rows * columns, 2)]
    group = columns if bits == BITS["int8"] else GROUP
    groups = rows * -(-columns // group)
    return [(groups * (group * bits // 8), 1), (groups, 2)]


def work(anatomy: Anatomy, load: DecoderLoad, options: Adapters) -> Anatomy:
    """`anatomy` of a decoder with adapters: frozen matrices have no gradient, so that inputs which only they need are
    not kept; matrices in fp32 are cast for products in fewer bits, and the copies kept; codes are made whole."""
    size = load.size
    layer = anatomy.layer
    matrices = _matrices(load.size)
    targets = options.targets or TARGETS
    tokens = layer.tokens
    each = [rows * columns for rows, columns in matrices.values()]
    values = sum(each)
    codes = options.frozen in ("int8", "int4")
    cast = options.frozen == "fp32" and load.compute < load.whole
    made = codes * load.compute + (options.frozen == "int4")  # bytes of each value while a matrix is made of codes
    wide = {name: load.compute if name in ("out", "down") else load.whole for name in targets}  # of DoRA's answers
    inner = sum(options.rank * load.compute + options.dora * matrices[name][0] * wide[name] for name in targets)
    unused = size.width * sum(not set(group) & set(targets) for group in (TARGETS[:3], TARGETS[4:6]))
    unused += size.feed_forward * ("down" not in targets)
    more = tokens * (inner - load.compute * unused) + 2 * values * cast
    thin = [
        Product(tokens, *sides)
        for name in targets
        for sides in ((matrices[name][1], options.rank), (options.rank, matrices[name][0]))
    ]
    sides = sum(product.inner + product.columns for product in thin)
    moved = layer.moved + values * (CODED if codes else CAST * cast)
    fuller = replace(
        layer,
        products=(*(replace(product, frozen=True) for product in layer.products), *thin),
        saved=layer.saved + more * (load.recompute == "none"),
        transient=layer.transient + more * (load.recompute != "none") + max(each) * made,
        put_off=tokens * sides * load.compute,
        moved=moved,
        issued=ISSUED + 4 * len(targets),  # two products, a scale and an addition
        moved_back=2 * layer.moved + values * CODED * codes,
    )
    rest = anatomy.rest
    head = tuple(replace(product, frozen=True) for product in rest.products)
    return replace(anatomy, layer=fuller, rest=replace(rest, products=head))


def _matrices(size: DecoderSizes) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the matrices of a block, by name."""
    width = size.width
    inner = size.feed_forward
    key = (size.kv_width, size.width)
    sides = ((size.query_width, width), key, key, (width, size.query_width), (inner, width), (inner, width))
    return dict(zip(TARGETS, (*sides, (width, inner)), strict=True))


# --- fewer bits for the frozen matrices ------------------------------------------------------------------------------


class FrozenLinear(torch.autograd.Function):
    """x W' for a W of codes and scales, which is made whole for one product at a time and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
        """The product."""
        ctx.save_for_backward(codes, scales)
        ctx.bits = bits
        ctx.columns = x.shape[-1]
        return F.linear(x, whole(codes, scales, bits, ctx.columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x."""
        codes, scales = ctx.saved_tensors
        return gradients[0] @ whole(codes, scales, ctx.bits, ctx.columns, gradients[0].dtype), None, None, None


class CompressedLinear(nn.Linear):
    """A linear layer whose frozen matrix is codes and scales."""

    codes: nn.Parameter
    scales: nn.Parameter
    bits: int

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        plain: Tensor = FrozenLinear.apply(x, self.codes, self.scales, self.bits)
        return plain if self.bias is None else plain + self.bias

    def dense(self) -> Float32[Tensor, "out in"]:
        """The frozen matrix."""
        return whole(self.codes, self.scales, self.bits, self.in_features, torch.float32)


class CompressedLora(CompressedLinear, LoraLinear):
    """A `LoraLinear` whose frozen matrix is codes and scales."""

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        return self.adapted(CompressedLinear.forward(self, x), x)


@torch.no_grad()
def compress(layer: nn.Linear, bits: int) -> None:
    """Keeps codes of `bits` bits (16, 8 or 4) in place of the frozen matrix of `layer`."""
    codes, scales = quantized(layer.weight.float(), bits)
    del layer.weight
    layer.bits = bits  # type: ignore[assignment]
    layer.register_parameter("codes", nn.Parameter(codes, requires_grad=False))
    layer.register_parameter("scales", nn.Parameter(scales, requires_grad=False))
    layer.__class__ = CompressedLora if isinstance(layer, LoraLinear) else CompressedLinear


def quantized(
    weight: Float[Tensor, "out in"], bits: int
) -> tuple[Int8[Tensor, "out m"], BFloat16[Tensor, "out groups"]]:
    """Codes nearest to `weight` and their scales: in 16 bits bf16 without scales; in 8 bits one scale for each row and
    a code in each byte; in 4 bits one for each `GROUP` columns and two codes in each byte, the even column in the low
    half.

    The error of a value is at most half a scale, which is the largest magnitude of its row or group / 127 (or / 7).
    """
    if bits == BITS["bf16"]:
        return weight.bfloat16(), weight.new_empty(0)
    rows, columns = weight.shape
    levels, group = (127, columns) if bits == 8 else (7, GROUP)
    padded = F.pad(weight, (0, -columns % group)).view(rows, -1, group)
    scales = (padded.abs().amax(2) / levels).bfloat16()
    codes = (padded / scales.float().clamp(min=1e-30)[..., None]).round().clamp(-levels, levels).to(torch.int8)
    flat = codes.view(rows, -1)
    if bits == 8:
        return flat, scales
    return (flat[:, 0::2] & 15) | (flat[:, 1::2] << 4), scales


def whole(
    codes: Int8[Tensor, "out m"], scales: BFloat16[Tensor, "out groups"], bits: int, columns: int, dtype: torch.dtype
) -> Float[Tensor, "out in"]:
    """The matrix of `columns` columns that `quantized` made them of. Codes and scales are exact in bf16, so that in
    fewer bits it is the rounded fp32 matrix."""
    if bits == BITS["bf16"]:
        return codes.to(dtype)
    if bits == 8:
        return codes.to(dtype).mul_(scales)
    halves = torch.stack([(codes << 4) >> 4, codes >> 4], 2).view(len(codes), -1, GROUP)
    return halves.to(dtype).mul_(scales[..., None]).view(len(codes), -1)[:, :columns]
