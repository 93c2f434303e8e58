"""What families of decoders do otherwise than Llama: stretched and partial rotary positions, windows and caps of
attention, GELU.

These are plain PyTorch forms; Llama's blocks have fast ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.parallel.whole_attention import visible

if TYPE_CHECKING:
    from jaxtyping import Float, Float64

    from espalier.parallel.attend import Where
    from espalier.recipe.decoder_shapes import DecoderSizes, Rope

FAST, SLOW = 32.0, 1.0
"""Turns in the original context between which YaRN's ramp lies (arXiv 2309.00071, section 3.2)."""


def rates(size: DecoderSizes) -> tuple[Float64[Tensor, " turning"], float]:
    """The rates of rotary positions (radians per token) as `size.rope` stretches them, and what cosines and sines are
    multiplied by."""
    rope = size.rope
    columns = int(size.head_size * size.rotary)
    plain = size.rope_theta ** -(torch.arange(0, columns, 2, dtype=torch.float64) / columns)
    if rope is None:
        return plain, 1.0
    slow = plain / rope.factor
    if rope.kind == "linear":
        return slow, 1.0
    original = rope.original or size.context
    if rope.kind == "llama3":
        turns = original * plain / (2 * math.pi)
        high = 4.0 if rope.high is None else rope.high
        ramp = ((turns - rope.low) / (high - rope.low)).clamp(0, 1)
        return slow * (1 - ramp) + plain * ramp, 1.0
    sharper = (
        (0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0) if rope.attention is None else rope.attention
    )
    return _ramp(plain, slow, size, rope), sharper


def _ramp(plain: Tensor, slow: Tensor, size: DecoderSizes, rope: Rope) -> Tensor:
    """YaRN's rates: those of many turns as they are, of few turns slowed down, in between a mixture (section 3.2)."""

    def column(turns: float) -> float:
        original = rope.original or size.context
        return 2 * len(plain) * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(size.rope_theta))

    low = max(math.floor(column(FAST if rope.high is None else rope.high)), 0)
    high = min(math.ceil(column(rope.low)), 2 * len(plain) - 1)
    columns = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    share = ((columns - low) / max(high - low, 1e-3)).clamp(0, 1)
    return slow * share + plain * (1 - share)


class LimitedAttention(NamedTuple):
    """An `attend` whose queries see the last `window` tokens, themselves among them (None: all), with scores of
    `scale` (None: 1 / sqrt(head)) that `cap` keeps within c tanh(x / c) (None: it does not)."""

    window: int | None
    cap: float | None
    scale: float | None

    def __call__(
        self,
        query: Float[Tensor, "batch heads seq head"],
        key: Float[Tensor, "batch kv_heads keys head"],
        value: Float[Tensor, "batch kv_heads keys head"],
        where: Where,
    ) -> Float[Tensor, "batch heads seq head"]:
        seen = visible(query.shape[2], key.shape[2], where, self.window)
        if self.cap is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale, enable_gqa=True)
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = capped(scale * query @ key.transpose(-1, -2), self.cap)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def attention_of(size: DecoderSizes, layer: int) -> LimitedAttention | None:
    """What `layer` attends with; None: all earlier tokens, plainly."""
    window = None if size.differs(layer) else size.window
    if window is None and size.attention_cap is None and size.attention_scale is None:
        return None
    return LimitedAttention(window, size.attention_cap, size.attention_scale)


def capped(x: Float[Tensor, "*batch"], cap: float | None) -> Float[Tensor, "*batch"]:
    """cap tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2)."""
    return x if cap is None else cap * torch.tanh(x / cap)


def wide(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """`x` in at least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def geglu(gate: Float[Tensor, "*batch inner"], up: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch inner"]:
    """gelu(gate) * up, GELU by its approximation with tanh, as Gemma has it."""
    return F.gelu(gate, approximate="tanh") * up
