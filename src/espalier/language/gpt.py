"""A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no bias (Llama 2, arXiv 2307.09288), and what
other families have besides (`block_variants`). It knows nothing of ranks: what `attend` does, and what stands in the
place of a block's feed-forward, is replaced from outside.

Query, key, value, gate and up are matrices of their own, as in Hugging Face's Llama. Joined into `qkv` and `gate_up`
they ran no faster on the CPU (within 2 % at width 192); Muon would take several matrices for one; and tensor
parallelism could not split the columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from espalier import recipe as config
from espalier.kernels.linear_cross_entropy import IGNORED, HeadWords, linear_cross_entropy
from espalier.language.attention_variants import attention_of, capped, geglu, rates, wide
from espalier.language.elementwise import rms_norm, rotate, swiglu
from espalier.language.kv_cache import Cache, Past
from espalier.language.operation_counts import DecoderLoad, Feed, decoder_work
from espalier.parallel.attend import CORES, Attend, Where
from espalier.parallel.whole_attention import causal
from espalier.parallel.workload import Pieces, Role
from espalier.recipe.cost import Anatomy, Product
from espalier.recipe.decoder_shapes import DecoderSizes, sizes

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Rotary(NamedTuple):
    """Cosines and sines `[*batch, seq, head / 2]` of the positions at hand, and where these tokens stand.

    `local`: of layers with a window, where they turn otherwise; `sharper`: what queries are multiplied by,
    `[*batch, 1, seq, 1]`.
    """

    cos: Tensor
    sin: Tensor
    where: Where
    local: Rotary | None = None
    sharper: Tensor | None = None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * (offset + weight) over the last dim (arXiv 1910.07467; Gemma's offset is 1)."""

    def __init__(self, width: int, epsilon: float, offset: float = 0.0) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.offset = offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The normalised x, in the dtype of the products that follow (under autocast: cast once, not for each)."""
        weight = self.offset + self.weight if self.offset else self.weight
        normal = rms_norm(x, weight, self.epsilon)
        device = x.device.type
        return normal.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else normal


class Rotation(nn.Module):
    """Cosines and sines of every position up to the context. Not state: filled again after every move or cast."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: DecoderSizes) -> None:
        super().__init__()
        self.size = size
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(size.context, size.head_size // 2), persistent=False)
        local = replace(size, rope=None, rope_theta=size.local_theta or size.rope_theta, window=None)
        self.local = Rotation(local) if size.window and size.blocks.local_positions else None
        self._fill()

    def forward(self, where: Where) -> Rotary:
        """The turns of its positions, and those of layers with a window where they are others."""
        positions = where.positions
        local = None if self.local is None else self.local(where)
        turn = Rotary(self.cos[positions], self.sin[positions], where, local)
        rope = self.size.rope
        if rope is None or not rope.query:
            return turn
        laps = positions // (rope.original or self.size.context)
        return turn._replace(sharper=(1 + rope.query * torch.log1p(laps))[..., None, :, None])

    @torch.no_grad()
    def _fill(self) -> None:
        if self.cos.is_meta:
            return
        turning, sharper = rates(self.size)
        turning = F.pad(turning, (0, self.cos.shape[1] - len(turning)))  # columns that do not turn
        angles = torch.outer(torch.arange(self.cos.shape[0], dtype=torch.float64), turning).to(self.cos.device)
        self.cos.copy_(sharper * angles.cos())
        self.sin.copy_(sharper * angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotation:
        super()._apply(fn, recurse)
        self._fill()
        return self


class CausalAttention(nn.Module):
    """Causal self-attention with `kv_heads` keys and values shared by groups of query heads (arXiv 2305.13245)."""

    seams: ClassVar = {"attend": ("attend",)}

    def __init__(self, size: DecoderSizes, layer: int = 0) -> None:
        super().__init__()
        self.head_size = size.head_size
        biased = size.blocks.biased if size.attention_bias else ()
        self.query = nn.Linear(size.width, size.query_width, bias="query" in biased)
        self.key = nn.Linear(size.width, size.kv_width, bias="key" in biased)
        self.value = nn.Linear(size.width, size.kv_width, bias="value" in biased)
        self.out = nn.Linear(size.query_width, size.width, bias="out" in biased)
        norms = size.blocks.head_norms
        self.whole_norms = norms == "all"
        self.query_norm, self.key_norm = (
            norm_of(size, width if self.whole_norms else size.head_size, bool(norms))
            for width in (size.query_width, size.kv_width)
        )
        differs = size.differs(layer)
        self.turns = not (differs and size.blocks.plain_positions)
        self.local = size.blocks.local_positions and not differs
        self.attend: Attend = attention_of(size, layer) or causal

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key-value heads that are here."""
        return self.query.weight.shape[0] // self.head_size, self.key.weight.shape[0] // self.head_size

    def forward(
        self, x: Float[Tensor, "batch seq width"], turn: Rotary, past: Past | None = None
    ) -> Float[Tensor, "batch seq width"]:
        """Attention over x, and over what `past` remembers of earlier positions."""
        query = self._heads(self.query(x), self.query_norm, turn)
        key = self._heads(self.key(x), self.key_norm, turn)
        value = self.value(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        if turn.sharper is not None:
            query = query * turn.sharper.to(query.dtype)
        if past is not None:
            key, value = past.extend(key, value)
        mixed = self.attend(query, key, value, turn.where)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, columns: Tensor, norm: nn.Module, turn: Rotary) -> Float[Tensor, "batch heads seq head"]:
        """Queries or keys, normalised and turned."""
        if self.whole_norms:
            columns = norm(columns)
        heads = columns.unflatten(-1, (-1, self.head_size))
        heads = heads if self.whole_norms else norm(heads)
        if self.turns:
            angles = turn.local if self.local and turn.local is not None else turn
            heads = rotate(heads, angles.cos, angles.sin)
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, size: DecoderSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.feed_forward, bias=False)
        self.up = nn.Linear(size.width, size.feed_forward, bias=False)
        self.down = nn.Linear(size.feed_forward, size.width, bias=False)
        self.joined = geglu if size.blocks.gemma else swiglu

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Each token by itself."""
        return self.down(self.joined(self.gate(x), self.up(x)))


class DecoderBlock(nn.Module):
    """One layer: attention, then feed-forward, each on the residual stream and added to it; normalised before, after,
    or both."""

    seams: ClassVar = {"feed_forward": ("feed_forward",)}

    def __init__(self, size: DecoderSizes, layer: int = 0, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        blocks = size.blocks
        self.scale = size.residual_scale
        self.attention_norm = norm_of(size, size.width, blocks.input_norms)
        self.attention = CausalAttention(size, layer)
        self.feed_forward_norm = norm_of(size, size.width, blocks.input_norms)
        self.feed_forward = feed_forward or FeedForward(size)
        self.attention_end, self.feed_forward_end = (norm_of(size, size.width, blocks.output_norms) for _ in range(2))

    def forward(self, x: Float[Tensor, "batch seq width"], turn: Rotary, past: Past | None = None) -> Any:
        """The residual stream after this layer."""
        x = x + scaled(self.attention_end(self.attention(self.attention_norm(x), turn, past)), self.scale)
        return x + scaled(self.feed_forward_end(self.feed_forward(self.feed_forward_norm(x))), self.scale)


def scaled(x: Tensor, scale: float) -> Tensor:
    """`scale` times `x`."""
    return x if scale == 1.0 else scale * x


def norm_of(size: DecoderSizes, width: int, there: bool = True) -> nn.Module:
    """A norm of the residual stream, or of heads; nothing where it is not `there`."""
    return RMSNorm(width, size.norm_epsilon, 1.0 if size.blocks.gemma else 0.0) if there else nn.Identity()


Through = Callable[[nn.Module, Tensor, Rotary, Past | None], Any]
"""How a block is run; `recompute` puts checkpointing here."""


def plainly(block: nn.Module, x: Tensor, turn: Rotary, past: Past | None) -> Any:
    """Runs `block`; autograd keeps what it needs."""
    return block(x, turn, past)


class Given(NamedTuple):
    """What pieces take beside the residual stream."""

    turn: Rotary
    pasts: Sequence[Past | None]
    targets: Tensor | None
    last: int


class GPT(nn.Module):
    """The decoder of `options` (resolved). Weights are those of `nn.Linear` until `initialise` is called."""

    def __init__(self, options: config.Decoder) -> None:
        super().__init__()
        self.size = size = sizes(options)
        # Given empty: on the meta device torch's own filling would first import a second of decompositions.
        table = torch.empty(size.vocabulary, size.width)
        self.embedding = nn.Embedding(size.vocabulary, size.width, _weight=table)
        self.rotation = Rotation(size)
        self.blocks = nn.ModuleList(self.block(layer) for layer in range(size.layers))
        self.norm = norm_of(size, size.width)
        # Tied: no second name for the table, so that moving from the meta device cannot tear the two apart.
        self.head = None if size.tied else nn.Linear(size.width, size.vocabulary, bias=False)
        self.scale = size.logit_scale
        self.through: Through = plainly
        self.predict: Callable[[Tensor, Tensor, int], Tensor] = predict
        self.score: Callable[..., Tensor] = partial(score, cap=size.logit_cap)
        self.loss_chunk = 0
        """Tokens whose logits are there at a time while the loss is computed; 0: all."""

    def block(self, layer: int) -> DecoderBlock:
        """A new layer."""
        return DecoderBlock(self.size, layer)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        where: Where | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
        last: int = 0,
    ) -> Float[Tensor, "batch seq vocabulary"] | Float[Tensor, ""]:
        """Logits of the token after each of the `last` of `tokens` (0: of all), or with `targets` the sum of the losses
        of all. With a cache, `tokens` continue what it remembers. `where`: None for rows that are a document each, and
        whole."""
        return self.pieces()(tokens, cache, where, targets, last)

    def loss_sum(
        self, tokens: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], where: Where | None = None
    ) -> Float[Tensor, ""]:
        """Sum of the cross entropies (nats) of `targets`; those equal to -100 are left out."""
        return self(tokens, where=where, targets=targets)

    def pieces(self) -> Pieces:
        """Of what `forward` takes and gives."""
        blocks = [partial(self._passed, index) for index in range(len(self.blocks))]
        table = self.embedding if self.head is None else self.head
        modules: list[list[nn.Module]] = [[self.embedding], *([block] for block in self.blocks), [self.norm, table]]
        return Pieces(self._embedded, blocks, self._ended, modules, self._given)

    def _embedded(self, tokens: Tensor, *others: Any, **options: Any) -> Any:
        embedded = self.embedding(tokens)
        scale = self.size.width**0.5 if self.size.blocks.gemma else self.size.embedding_scale
        return scaled(embedded, scale)

    def _given(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        where: Where | None = None,
        targets: Tensor | None = None,
        last: int = 0,
    ) -> Given:
        pasts = [None] * len(self.blocks) if cache is None else cache.layers
        return Given(self.turn(tokens, cache, where), pasts, targets, last)

    def _passed(self, index: int, x: Any, given: Given) -> Any:
        return self.through(self.blocks[index], x, given.turn, given.pasts[index])

    def _ended(self, x: Any, given: Given) -> Any:
        return self.logits(x, given.last) if given.targets is None else self.losses(x, given.targets)

    def logits(self, x: Float[Tensor, "batch seq width"], last: int) -> Float[Tensor, "batch seq vocabulary"]:
        """Logits from the residual stream after the last block; `last`: of so many tokens at its end (0: of all)."""
        logits = self.predict(self.norm(x), self.words, last)
        return capped(scaled(logits, self.scale), self.size.logit_cap)

    def losses(self, x: Float[Tensor, "batch seq width"], targets: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
        """Sum of the cross entropies of `targets`, from the residual stream after the last block."""
        options = {"chunk": self.loss_chunk} if self.loss_chunk else {}
        return self.score(scaled(self.norm(x), self.scale), self.words, targets, **options)

    @property
    def words(self) -> Float[Tensor, "vocabulary width"]:
        """The matrix of the head: its own, or the token table."""
        return self.embedding.weight if self.head is None else self.head.weight

    def turn(self, tokens: Tensor, cache: Cache | None, where: Where | None) -> Rotary:
        """Where `tokens` stand."""
        if where is None:
            start = 0 if cache is None else cache.length
            stop = start + tokens.shape[1]
            assert stop <= self.size.context, f"{stop} positions, but the context is {self.size.context}"
            padding = None if cache is None else cache.padding
            positions = torch.arange(start, stop, device=tokens.device)
            positions = positions if padding is None else (positions - padding[:, None]).clamp_(min=0)
            where = Where(positions, padding=padding)
        return self.rotation(where)


def predict(
    x: Float[Tensor, "batch seq width"], words: Float[Tensor, "vocabulary width"], last: int
) -> Float[Tensor, "batch seq vocabulary"]:
    """Logits by the head `words`, which may be stored in fewer bits, of the `last` tokens (0: of all)."""
    return F.linear(x[:, -last:], words.to(x.dtype))


def score(
    x: Float[Tensor, "batch seq width"],
    words: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, "batch seq"],
    cap: float | None = None,
    chunk: int = 0,
) -> Float[Tensor, ""]:
    """Sum of the cross entropies of `targets` by the head `words`, from the normalised residual stream. `cap`: of the
    logits; `chunk`: tokens whose logits are there at a time, 0: all."""
    if chunk:
        return linear_cross_entropy(x.flatten(0, -2), HeadWords(words, cap), targets.flatten(), chunk)
    return cross_entropy_sum(capped(F.linear(x, words), cap), targets)


def cross_entropy_sum(
    logits: Float[Tensor, "batch seq vocabulary"], targets: Int[Tensor, "batch seq"]
) -> Float[Tensor, ""]:
    """Sum of cross entropies, in at least fp32."""
    return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def initialise(model: GPT, seed: int, values: Mapping[str, Tensor] | None = None) -> None:
    """Fills the weights: normal with deviation 0.02, matrices that write into the residual stream 0.02 / sqrt(2 layers)
    (GPT-2), norms 1, biases 0. Each weight has a generator of its own on the CPU, from `seed` and its name: the same
    values on every device, and whatever else the model holds. `values`: fills these, by name, and not the model."""
    for name, parameter in (dict(model.named_parameters()) if values is None else values).items():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") or model.size.blocks.gemma else 1.0)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        residual = name.endswith((".out.weight", ".down.weight"))
        deviation = 0.02 / (2 * model.size.layers) ** 0.5 if residual else 0.02
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(drawn.normal_(0.0, deviation, generator=generator))


# --- shared by ranks ---------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """Query heads and the key-value heads that runs of them share, of `size` columns each. Ranks take whole heads: of
    fewer key-value heads than ranks each is on several, which divide its queries."""

    query: int
    kv: int
    size: int

    def queries(self, rank: int, ranks: int) -> tuple[int, int]:
        """Columns of the query (and rows of the output) that a rank has; none where heads do not suffice."""
        each = self.query // self.kv
        copies = self.copies(ranks)
        first, last = self.keys(rank, ranks)
        if copies == 1 or first == last:
            return first * each, last * each
        begin, end = (each * number // copies for number in (rank % copies, rank % copies + 1))
        return first * each + begin * self.size, first * each + end * self.size

    def keys(self, rank: int, ranks: int) -> tuple[int, int]:
        """Columns of key and value that a rank has; none where ranks are no multiple of fewer heads."""
        copies = self.copies(ranks)
        if ranks > self.kv and ranks % self.kv:
            return 0, 0
        first, last = (self.kv * number // (ranks // copies) for number in (rank // copies, rank // copies + 1))
        return first * self.size, last * self.size

    def copies(self, ranks: int) -> int:
        """Neighbouring ranks that hold the same keys and values."""
        return max(1, ranks // self.kv)


def roles(model: GPT) -> dict[str, Role]:
    """What the decoder's modules are where ranks share its matrices."""
    size = model.size
    heads = Heads(size.heads, size.kv_heads, size.head_size)
    unit = f"query heads ({size.heads}) and key-value heads ({size.kv_heads})"
    keys = Role("column", heads.keys, heads.copies, unit)
    roles_by_name = {
        "": Role("head", unit="words of the vocabulary"),
        "embedding": Role("table", unit="words of the vocabulary"),
        "head": Role("table", unit="words of the vocabulary"),
        "norm": Role("partial"),
        "blocks.*_norm": Role("partial"),  # of queries and keys too: each rank has its own heads
        "blocks.*_end": Role("partial"),
        "blocks.*.attention.query": Role("column", heads.queries, unit=unit),
        "blocks.*.attention.key": keys,
        "blocks.*.attention.value": keys,
        "blocks.*.attention.out": Role("row", heads.queries, unit=unit),
    }
    mixed = size.experts > 1
    parts = ("feed_forward.experts.*", "feed_forward.shared") if mixed else ("feed_forward",)
    for name, kind in {"gate": "column", "up": "column", "down": "row"}.items():
        role = Role(f"{kind}s" if mixed else kind, unit="columns of the feed-forward")
        roles_by_name |= {f"blocks.*.{part}.{name}": role for part in parts}
    if mixed:
        whole = ("blocks.*.feed_forward.router", "blocks.*.feed_forward.shared_gate")
        roles_by_name |= {"blocks.*.feed_forward": Role("region"), **dict.fromkeys(whole, Role("partial"))}
    return roles_by_name


# --- activation recomputation ------------------------------------------------------------------------------------

_aten = torch.ops.aten
ATTENTION_CORES = [
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""What PyTorch's fused attention becomes on each device: it runs once a step."""


def recompute(model: GPT, mode: str) -> None:
    """Sets what the blocks of `model` keep for backward; the gradients are the same in every mode.

    `none`: everything; `block`: their inputs (Chen et al., arXiv 1604.06174); `selective`: their inputs and the
    output of the attention core, the one thing that is dear to compute and cheap to keep.
    """
    model.through = _MODES[mode]


def _again(block: nn.Module, x: Tensor, turn: Rotary, past: Past | None, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return block(x, turn, past)
    return checkpoint(block, x, turn, past, use_reentrant=False, preserve_rng_state=False, **options)


def _kept() -> Any:
    return create_selective_checkpoint_contexts([*ATTENTION_CORES, *CORES])


_MODES: dict[str, Through] = {"none": plainly, "block": _again, "selective": partial(_again, context_fn=_kept)}


# --- cost --------------------------------------------------------------------------------------------------------


def work(setting: DecoderLoad) -> Anatomy:
    """Operations and bytes of one micro-batch on one rank (see `language.operation_counts`)."""
    size = setting.size
    compute = setting.compute
    inner = size.feed_forward / setting.cut.tensor
    gate_up = Product(setting.tokens, size.width, inner, 2)
    down = Product(setting.tokens, inner, size.width)
    # swiglu keeps gate and up, `down` keeps their product; recomputation stops where `down` would begin.
    product = size.feed_forward * compute
    return decoder_work(
        setting,
        Feed(
            (gate_up, down),
            (gate_up,),
            moved=5 * product,
            saved=3 * product,
            working=2 * product,
            matrices=3 * size.width * size.feed_forward,
        ),
    )
