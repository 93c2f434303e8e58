"""Language decoders: their options, published shapes by name, what a recipe leaves open, what is refused. No torch.

One dial, `model.depth`, sets the rest (after nanochat's `--depth`): width, heads, sequence, batch, rates and steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from espalier.config.base import Draft, Kind, Model, RecipeBase
from espalier.errors import UserError, nearest

DEPTH = 4
"""Layers when neither depth nor shape is given: about 3 M parameters, minutes on a laptop."""

HEAD_SIZE = 64
TOKENS_PER_PARAMETER = 20  # Chinchilla, arXiv 2203.15556, table 3: compute-optimal tokens are about 20 x parameters
SMALLEST_BATCH, LARGEST_BATCH = 2_048, 4_194_304  # tokens; 4 Mi is Llama 2's (arXiv 2307.09288)


class Decoder(Model, frozen=True):
    """What the language decoders share. Give `depth`, or `shape`, or the numbers themselves."""

    depth: int | None = None
    shape: str | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    feed_forward: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    tied: bool | None = None
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    initial: str | None = None


class Gpt(Decoder, frozen=True, tag="gpt"):
    """A dense decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU)."""


class Moe(Decoder, frozen=True, tag="moe"):
    """The same decoder with a mixture of experts in place of each feed-forward block."""

    experts: int = 8
    active: int = 2
    balance: float = 0.01


# --- published shapes ----------------------------------------------------------------------------------------------

# The shapes of GPT-2 and GPT-3 are taken over into this decoder (RMSNorm, rotary positions, SwiGLU, no bias). Their
# feed-forward has two matrices of 4 x width; SwiGLU has three, so 8/3 x width keeps the number of parameters (Shazeer,
# "GLU Variants Improve Transformer", arXiv 2002.05202, section 3).


@dataclass(frozen=True)
class Shape:
    """One published decoder: `source` says where its numbers come from."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    tied: bool
    source: str


_GPT2 = "GPT-2 small, 12 layers x 768 (Radford et al. 2019, table 2; heads and vocabulary as in its release)"
_GPT3 = "GPT-3 175B (arXiv 2005.14165, table 2.1; vocabulary of GPT-2)"
_LLAMA = "Llama 2 (arXiv 2307.09288, table 1; width, heads and feed-forward as in its released params.json)"

SHAPES: dict[str, Shape] = {
    "gpt2-124m": Shape(12, 768, 12, 12, 2048, 50257, 1024, True, _GPT2),
    "llama-7b": Shape(32, 4096, 32, 32, 11008, 32000, 4096, False, _LLAMA),
    "llama-13b": Shape(40, 5120, 40, 40, 13824, 32000, 4096, False, _LLAMA),
    "llama-70b": Shape(80, 8192, 64, 8, 28672, 32000, 4096, False, _LLAMA),
    "gpt3-175b": Shape(96, 12288, 96, 96, 32768, 50257, 2048, True, _GPT3),
}


def published(name: str) -> Shape:
    """The published shape called `name`. Raises UserError naming the nearest one."""
    if name not in SHAPES:
        near = nearest(name, SHAPES)
        raise UserError(
            f'model.shape = "{name}" is not a known shape.',
            why=f"the shapes are {', '.join(SHAPES)}",
            do=f'model.shape = "{near}"' if near else "give model.depth instead",
        )
    return SHAPES[name]


@dataclass(frozen=True)
class Sizes:
    """A decoder in plain integers. `experts` = `active` = 1 for a dense model; `balance` is then 0."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    tied: bool
    rope_theta: float
    norm_epsilon: float
    experts: int = 1
    active: int = 1
    balance: float = 0.0

    @property
    def head_size(self) -> int:
        """Columns of one attention head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Columns of all keys (or all values) of one token."""
        return self.kv_heads * self.head_size


def sizes(model: Gpt | Moe) -> Sizes:
    """The sizes of a resolved decoder. An option still None is our bug: `config.derive.resolve` comes first."""
    names = ("depth", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context", "tied")
    values: dict[str, Any] = {name: getattr(model, name) for name in names}
    unset = [name for name, value in values.items() if value is None]
    assert not unset, f"model options not resolved: {', '.join(unset)}"
    layers = values.pop("depth")
    dense = Sizes(layers=layers, rope_theta=model.rope_theta, norm_epsilon=model.norm_epsilon, **values)
    if not isinstance(model, Moe):
        return dense
    return replace(dense, experts=model.experts, active=model.active, balance=model.balance)


# --- what is left open ----------------------------------------------------------------------------------------------


def _fill(draft: Draft) -> None:
    _model(draft)
    width = draft.get("model.width")
    rate = float(f"{3e-3 * 192 / width:.3g}")
    draft.rates(rate, f"3e-3 at width 192, falling as 1/width (GPT-3's table 2.1 falls so): width {width}")
    if draft.get("model.vocabulary") is None:
        return
    parameters = active_parameter_count(_decoder(draft.recipe))
    _batch(draft, parameters)
    tokens = TOKENS_PER_PARAMETER * parameters
    steps = math.ceil(tokens / draft.get("train.batch_tokens"))
    draft.fill("train.steps", steps, f"20 tokens for each of {parameters:,} parameters (Chinchilla, arXiv 2203.15556)")


def _decoder(recipe: RecipeBase) -> Gpt | Moe:
    assert isinstance(recipe.model, Gpt | Moe)
    return recipe.model


def _validation(recipe: RecipeBase) -> float:
    """Forward only, which costs a third of training on as many tokens."""
    batch = recipe.train.batch_tokens
    return recipe.train.validate_tokens / 3 / batch if batch else 0.0


def parameter_count(model: Gpt | Moe) -> int:
    """Parameters of a resolved decoder (tied embeddings counted once)."""
    return _count(sizes(model), every_expert=True)


def active_parameter_count(model: Gpt | Moe) -> int:
    """Parameters one token passes through: `active` of the experts, everything else."""
    return _count(sizes(model), every_expert=False)


def _count(size: Sizes, every_expert: bool) -> int:
    attention = size.width * (2 * size.width + 2 * size.kv_width)
    experts = size.experts if every_expert else size.active
    router = size.experts * size.width if size.experts > 1 else 0
    feed_forward = experts * 3 * size.width * size.feed_forward + router
    embeddings = size.vocabulary * size.width * (1 if size.tied else 2)
    return size.layers * (attention + feed_forward + 2 * size.width) + embeddings + size.width


def _model(draft: Draft) -> None:
    if draft.get("model.shape") is not None:
        _shape(draft, draft.get("model.shape"))
    draft.fill("model.depth", DEPTH, "neither model.depth nor model.shape is given; small enough for a laptop")
    depth = draft.get("model.depth")
    draft.fill("model.width", HEAD_SIZE * depth, "64 x depth: width grows with depth, as in published decoders")
    width = draft.get("model.width")
    heads = _heads(width)
    draft.fill("model.heads", heads, f"heads of {width // heads} columns ({HEAD_SIZE} where it divides the width)")
    draft.fill("model.kv_heads", draft.get("model.heads"), "one key-value head per head: no grouping at this size")
    feed_forward = 64 * math.ceil(8 * width / 3 / 64)
    draft.fill("model.feed_forward", feed_forward, "8/3 x width, up to a multiple of 64: as many as 4 x width ungated")
    _vocabulary(draft)
    bound = draft.get("model.context") or LARGEST_BATCH
    sequence = min(bound, max(256, min(2048, 2 ** math.ceil(math.log2(width)))))
    draft.fill("train.sequence", sequence, "the width as a power of two, between 256 and 2048, within model.context")
    draft.fill("model.context", draft.get("train.sequence"), "as long as the sequences it is trained on")
    if draft.get("model.vocabulary") is None:
        return
    untied = msgspec.structs.replace(_decoder(draft.recipe), tied=False)
    share = draft.get("model.vocabulary") * width / parameter_count(untied)
    if share > 0.1:
        draft.fill("model.tied", True, f"a second table of tokens would be {share:.0%} of all parameters")
    else:
        draft.fill("model.tied", False, f"a head of its own costs only {share:.1%} of all parameters")


def _shape(draft: Draft, name: str) -> None:
    shape = published(name)
    for field in ("depth", "width", "heads", "kv_heads", "feed_forward"):
        given, own = draft.get(f"model.{field}"), getattr(shape, field)
        if given not in (None, own):
            raise UserError(
                f'model.{field} = {given} and model.shape = "{name}" contradict each other.',
                why=f"{name} has {own}",
                do="give one of the two",
            )
    for field in ("depth", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context", "tied"):
        draft.fill(f"model.{field}", getattr(shape, field), f"{name}: {shape.source}")


def _heads(width: int) -> int:
    """The number of heads whose size is even and nearest to 64."""
    fitting = [size for size in range(2, min(width, 1024) + 1, 2) if width % size == 0]
    if not fitting:
        why = "rotary positions turn pairs of columns"
        raise UserError(f"model.width = {width} is odd.", why=why, do="a multiple of 64")
    return width // min(fitting, key=lambda size: abs(math.log(size / HEAD_SIZE)))


def _vocabulary(draft: Draft) -> None:
    vocabulary = draft.vocabulary
    tokenizers = {data.tokenizer for data in draft.recipe.data}
    if vocabulary is None and tokenizers == {"bytes"}:
        vocabulary = 256
    if vocabulary is None:
        if not tokenizers:
            draft.fill("model.vocabulary", 256, "bytes, as nothing is said of the data")
        return
    draft.fill("model.vocabulary", vocabulary, "the tokenizer's tokens")
    if draft.get("model.vocabulary") < vocabulary:
        raise UserError(
            f"model.vocabulary = {draft.get('model.vocabulary')} is smaller than the tokenizer's {vocabulary} tokens.",
            do="leave model.vocabulary out, or give data.tokenizer a smaller one",
        )


def _batch(draft: Draft, parameters: int) -> None:
    """The best batch in tokens is 0.292 x FLOPs^0.3271 (DeepSeek LLM, arXiv 2401.02954, equation 1), FLOPs = 6 x
    parameters x tokens; with the steps given, tokens = steps x batch and the equation is solved for the batch."""
    steps, sequence = draft.get("train.steps"), draft.get("train.sequence")
    if steps is None:
        best = 0.2920 * (6 * parameters * TOKENS_PER_PARAMETER * parameters) ** 0.3271
    else:
        best = (0.2920 * (6 * parameters * steps) ** 0.3271) ** (1 / (1 - 0.3271))
    power = 2 ** round(math.log2(min(LARGEST_BATCH, max(SMALLEST_BATCH, best))))
    tokens = max(1, round(power / sequence)) * sequence
    reason = f"0.292 x FLOPs^0.3271 = {best:,.0f} (arXiv 2401.02954), to a power of two in whole sequences"
    draft.fill("train.batch_tokens", tokens, reason)


# --- what cannot be -------------------------------------------------------------------------------------------------


def _check(recipe: RecipeBase) -> None:
    model = _decoder(recipe)
    if model.width and model.heads and model.width % model.heads:
        why = f"model.width = {model.width} is not a multiple of it"
        raise UserError(f"model.heads = {model.heads} does not divide the width.", why=why, do=_divisors(model.width))
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        why = f"model.heads = {model.heads} is not a multiple of it"
        raise UserError(
            f"model.kv_heads = {model.kv_heads} does not divide the heads.",
            why=why,
            do=f"model.kv_heads = {model.heads}",
        )
    if model.width and model.heads and model.width // model.heads % 2:
        size = model.width // model.heads
        why = f"rotary positions turn pairs of columns, and {model.width} / {model.heads} = {size} is odd"
        raise UserError(f"model.heads = {model.heads} gives heads of odd size.", why=why, do=_divisors(model.width))
    if isinstance(model, Moe) and model.experts == 1:
        raise UserError("model.experts = 1 leaves nothing to choose.", do='model.kind = "gpt", or two experts or more')
    if isinstance(model, Moe) and model.active > model.experts:
        why = f"there are only model.experts = {model.experts}"
        raise UserError(
            f"model.active = {model.active} is not possible.", why=why, do=f"model.active = {model.experts}"
        )
    context, sequence = model.context, recipe.train.sequence
    if context and sequence and sequence > context:
        raise UserError(
            f"train.sequence = {sequence} is longer than the model.",
            why=f"model.context = {context}",
            do=f"train.sequence = {context}",
        )


def _divisors(width: int) -> str:
    fitting = [str(heads) for heads in range(1, min(width, 1024) + 1) if width % heads == 0 and width // heads % 2 == 0]
    if not fitting:
        return "an even model.width"
    return f"model.heads = one of {', '.join(fitting[:12])}"


KIND = Kind(
    name="a language model",
    options=(Gpt, Moe),
    row="espalier.language.workload_row",
    fill=_fill,
    check=_check,
    validation=_validation,
    unit="tokens",
)
