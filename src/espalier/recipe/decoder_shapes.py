"""Language decoders: options, published shapes by name (`llama-7b`), sizes, numbers of parameters. No torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from espalier.recipe.base import Model
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.sections import Options

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"]


class Rope(Options, frozen=True):
    """How rotary positions are stretched beyond the `original` context, by `factor`: all rates alike (`linear`); the
    slow ones (`llama3`, arXiv 2407.21783, as in its release: `low`, `high` are turns in the original context); or by a
    ramp between `high` and `low` turns, attention sharpened by `attention` (`yarn`, arXiv 2309.00071)."""

    kind: Literal["linear", "llama3", "yarn"] = "yarn"
    factor: float = 1.0
    original: int | None = None
    low: float = 1.0
    high: float | None = None
    attention: float | None = None


class Decoder(Model, frozen=True):
    """What the language decoders share. Give `depth`, or `shape`, or the numbers themselves.

    `family`: whose blocks these are: Qwen 2 adds biases to query, key and value, Qwen 3 norms of queries and keys;
    Gemma counts norms from 1, multiplies embeddings by sqrt(width) and uses GELU, Gemma 2 also norms what is added to
    the stream. `head_size`: where it is not width / heads; `window`: tokens a query sees (of Gemma 2 in even layers);
    `attention_cap`, `logit_cap`: c tanh(x / c) of attention's scores and of logits; `attention_scale`: of scores, where
    it is not 1 / sqrt(head_size).
    """

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
    family: Family = "llama"
    head_size: int | None = None
    window: int | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    attention_scale: float | None = None
    rope: Rope | None = None


class Gpt(Decoder, frozen=True, tag="gpt"):
    """A dense decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU)."""


class Moe(Decoder, frozen=True, tag="moe"):
    """The same decoder with a mixture of experts in place of each feed-forward block.

    `balancing`: what keeps experts evenly used, a `"loss"` with the weight `balance`, or a `"bias"` of each expert
    when they are picked (auxiliary-loss-free); `z_loss`: weight of the penalty of large router scores. `normalized`:
    whether the weights of a token's experts add up to 1 (else they are probabilities among all experts); `shared`:
    columns of an expert that every token takes too, by a gate of its own (Qwen 2 MoE; 0: there is none).
    """

    experts: int = 8
    active: int = 2
    balance: float = 0.01
    balancing: Literal["loss", "bias"] = "loss"
    z_loss: float = 0.0
    normalized: bool = True
    shared: int = 0


# --- published shapes ----------------------------------------------------------------------------------------------


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


SHAPES = {name: Shape(**row) for name, row in data_table(__file__).items()}


def published(name: str) -> Shape:
    """The published shape called `name`. Raises UserError naming the nearest one."""
    if name not in SHAPES:
        near = nearest(name, SHAPES) or next((shape for shape in SHAPES if shape.startswith(name)), None)
        raise UserError(
            f'model.shape = "{name}" is not a known shape.',
            why=f"the shapes are {', '.join(SHAPES)}",
            do=f'model.shape = "{near}"' if near else "give model.depth instead",
        )
    return SHAPES[name]


ROUTING = ("experts", "active", "balance", "z_loss", "normalized", "shared")
"""Options of a mixture that `DecoderSizes` takes over as they are."""


@dataclass(frozen=True)
class DecoderSizes:
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
    family: Family = "llama"
    head: int | None = None
    window: int | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    attention_scale: float | None = None
    rope: Rope | None = None
    z_loss: float = 0.0
    bias: bool = False
    normalized: bool = True
    shared: int = 0

    @property
    def head_size(self) -> int:
        """Columns of one attention head."""
        return self.head or self.width // self.heads

    @property
    def query_width(self) -> int:
        """Columns of all queries of one token."""
        return self.heads * self.head_size

    @property
    def gemma(self) -> bool:
        """Norms count from 1, embeddings are scaled, GELU."""
        return self.family in ("gemma", "gemma2")

    @property
    def kv_width(self) -> int:
        """Columns of all keys (or all values) of one token."""
        return self.kv_heads * self.head_size


def sizes(model: Decoder) -> DecoderSizes:
    """The sizes of a resolved decoder. An option still None is our bug: `recipe.defaults.resolve` comes first."""
    sizes_of_model = {field.name: field for field in fields(DecoderSizes) if field.name in model.__struct_fields__}
    values: dict[str, Any] = {name: getattr(model, name) for name in sizes_of_model}
    unset = [name for name, field in sizes_of_model.items() if values[name] is None and field.default is MISSING]
    assert not unset, f"model options not resolved: {', '.join(unset)}"
    assert model.depth is not None, "model options not resolved: depth"
    bias = isinstance(model, Moe) and model.balancing == "bias"
    return DecoderSizes(layers=model.depth, head=model.head_size, bias=bias, **values)


def parameter_count(model: Decoder) -> int:
    """Parameters of a resolved decoder (tied embeddings counted once)."""
    return _count(sizes(model), every_expert=True)


def active_parameter_count(model: Decoder) -> int:
    """Parameters one token passes through: `active` of the experts, everything else."""
    return _count(sizes(model), every_expert=False)


def _count(size: DecoderSizes, every_expert: bool) -> int:
    attention = size.width * (2 * size.query_width + 2 * size.kv_width)
    attention += (size.query_width + 2 * size.kv_width) * (size.family == "qwen2")
    attention += 2 * size.head_size * (size.family == "qwen3") + 2 * size.width * (size.family == "gemma2")
    experts = size.experts if every_expert else size.active
    router = size.experts * (size.width + size.bias) if size.experts > 1 else 0
    shared = size.width * (3 * size.shared + 1) if size.shared else 0
    feed_forward = experts * 3 * size.width * size.feed_forward + router + shared
    embeddings = size.vocabulary * size.width * (1 if size.tied else 2)
    return size.layers * (attention + feed_forward + 2 * size.width) + embeddings + size.width


def limited(model: Any) -> bool:
    """Whether the model attends with a window, a cap or a scale of its own."""
    return any(getattr(model, name, None) for name in ("window", "attention_cap", "attention_scale"))
