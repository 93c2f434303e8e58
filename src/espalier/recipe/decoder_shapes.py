"""Language decoders: options, published shapes by name (`llama-7b`), sizes, numbers of parameters. No torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from espalier.recipe.base import Model
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.sections import Options

Family = Literal[
    "llama", "mistral", "ministral3", "granite", "phi3", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text",
    "olmo2", "olmo3", "glm4",
]  # fmt: skip


class Rope(Options, frozen=True):
    """How rotary positions are stretched beyond the `original` context, by `factor`: all rates alike (`linear`); the
    slow ones (`llama3`, arXiv 2407.21783, as in its release: `low`, `high` are turns in the original context); or by a
    ramp between `high` and `low` turns, attention sharpened by `attention` (`yarn`, arXiv 2309.00071). Queries at
    `position` are multiplied by 1 + `query` x log(1 + floor(position / original)), as Llama 4's and Ministral 3's."""

    kind: Literal["linear", "llama3", "yarn"] = "yarn"
    factor: float = 1.0
    original: int | None = None
    low: float = 1.0
    high: float | None = None
    attention: float | None = None
    query: float = 0.0


class Decoder(Model, frozen=True):
    """What the language decoders share. Give `depth`, or `shape`, or the numbers themselves.

    `family`: whose blocks these are (`Blocks`). `layers`: "first N", of `initial`; the others are left out.
    `head_size`: where it is not width / heads; `window`: tokens a query sees, but for one layer of each period of
    the family. `local_theta`: base of the rotary positions of layers with a window (None: `rope_theta`), which are not
    stretched. `rotary`: share of the columns
    of a head that turn. `attention_cap`, `logit_cap`: c tanh(x / c) of attention's scores and of logits;
    `attention_scale`: of scores, where it is not 1 / sqrt(head_size); `embedding_scale`, `residual_scale`,
    `logit_scale`: what embeddings, what a layer adds to the stream, and logits are multiplied by.
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
    layers: str | None = None
    family: Family = "llama"
    head_size: int | None = None
    window: int | None = None
    local_theta: float | None = None
    rotary: float = 1.0
    attention_bias: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    rope: Rope | None = None


class Gpt(Decoder, frozen=True, tag="gpt"):
    """A dense decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU)."""


class Moe(Decoder, frozen=True, tag="moe"):
    """The same decoder with a mixture of experts in place of each feed-forward block.

    `balancing`: what keeps experts evenly used, a `"loss"` with the weight `balance`, or a `"bias"` of each expert
    when they are picked (auxiliary-loss-free); `z_loss`: weight of the penalty of large router scores. `normalized`:
    whether the weights of a token's experts add up to 1 (else they are probabilities among all experts); `shared`:
    columns of an expert that every token takes too, by a gate of its own (Qwen 2 MoE; 0: there is none);
    `max_iterations`: bisections after which the search for a token's experts ends (RTop-K's early stop; None: exactly).
    """

    experts: int = 8
    active: int = 2
    balance: float = 0.01
    balancing: Literal["loss", "bias"] = "loss"
    z_loss: float = 0.0
    normalized: bool = True
    shared: int = 0
    max_iterations: int | None = None


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


# --- families ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """What the blocks of a family have otherwise than Llama's.

    Attributes:
        biased: projections of attention that have a bias with `attention_bias`, or `always_biased`.
        head_norms: norms of queries and keys, of each `head` or of `all` their columns.
        input_norms, output_norms: of what attention and feed-forward read; of what they add to the stream.
        period: each layer of that number sees all tokens, or has no positions (`plain_positions`); 0: all are alike.
        local_positions: layers with a window have rotary positions of their own.
        gemma: norms count from 1, embeddings are multiplied by sqrt(width), GELU.
    """

    biased: tuple[str, ...] = ("query", "key", "value", "out")
    always_biased: bool = False
    head_norms: Literal["", "head", "all"] = ""
    input_norms: bool = True
    output_norms: bool = False
    period: int = 0
    plain_positions: bool = False
    local_positions: bool = False
    gemma: bool = False


FAMILIES = {
    name: msgspec.convert(row, Blocks)
    for name, row in data_table(str(Path(__file__).with_name("decoder_families"))).items()
}
WHOLE_NORMS = {name for name, blocks in FAMILIES.items() if blocks.head_norms == "all"}
"""Families that normalise queries and keys over all heads together."""
MIXTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that have mixtures of experts."""

ROUTING = ("experts", "active", "balance", "z_loss", "normalized", "shared", "max_iterations")
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
    local_theta: float | None = None
    rotary: float = 1.0
    attention_bias: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    rope: Rope | None = None
    z_loss: float = 0.0
    bias: bool = False
    normalized: bool = True
    shared: int = 0
    max_iterations: int | None = None
    blocks: Blocks = Blocks()

    @property
    def head_size(self) -> int:
        """Columns of one attention head."""
        return self.head or self.width // self.heads

    @property
    def query_width(self) -> int:
        """Columns of all queries of one token."""
        return self.heads * self.head_size

    @property
    def rotary_columns(self) -> int:
        """Columns of a head that turn."""
        return int(self.head_size * self.rotary)

    def differs(self, layer: int) -> bool:
        """Whether `layer` is one of each period: it sees all tokens, or has no positions."""
        period = self.blocks.period
        return period > 0 and (layer + 1) % period == 0

    @property
    def kv_width(self) -> int:
        """Columns of all keys (or all values) of one token."""
        return self.kv_heads * self.head_size


def sizes(model: Decoder) -> DecoderSizes:
    """The sizes of a resolved decoder. An option still None is our bug: `recipe.defaults.resolve` comes first."""
    sizes_of_model = {field.name: field for field in fields(DecoderSizes) if field.name in model.__struct_fields__}
    values: dict[str, Any] = {name: getattr(model, name) for name in sizes_of_model} | {"layers": model.depth}
    unset = [name for name, field in sizes_of_model.items() if values[name] is None and field.default is MISSING]
    assert not unset, f"model options not resolved: {', '.join(unset)}"
    bias = isinstance(model, Moe) and model.balancing == "bias"
    blocks = FAMILIES[model.family]
    values["attention_bias"] |= blocks.always_biased
    return DecoderSizes(head=model.head_size, bias=bias, blocks=blocks, **values)


def parameter_count(model: Decoder) -> int:
    """Parameters of a resolved decoder (tied embeddings counted once)."""
    return _count(sizes(model), every_expert=True)


def active_parameter_count(model: Decoder) -> int:
    """Parameters one token passes through: `active` of the experts, everything else."""
    return _count(sizes(model), every_expert=False)


def _count(size: DecoderSizes, every_expert: bool) -> int:
    attention = size.width * (2 * size.query_width + 2 * size.kv_width)
    columns = {"query": size.query_width, "key": size.kv_width, "value": size.kv_width, "out": size.width}
    blocks = size.blocks
    attention += sum(columns[name] for name in blocks.biased) * size.attention_bias
    attention += {"": 0, "head": 2 * size.head_size, "all": size.query_width + size.kv_width}[blocks.head_norms]
    norms = 2 * size.width * (blocks.input_norms + blocks.output_norms)
    experts = size.experts if every_expert else size.active
    router = size.experts * (size.width + size.bias) if size.experts > 1 else 0
    shared = size.width * (3 * size.shared + 1) if size.shared else 0
    feed_forward = experts * 3 * size.width * size.feed_forward + router + shared
    embeddings = size.vocabulary * size.width * (1 if size.tied else 2)
    return size.layers * (attention + feed_forward + norms) + embeddings + size.width


def limited(model: Any) -> bool:
    """Whether the model attends with a window, a cap or a scale of its own."""
    return any(getattr(model, name, None) for name in ("window", "attention_cap", "attention_scale"))
