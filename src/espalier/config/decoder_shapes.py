"""Named decoder shapes with the source of each number, and `Sizes`: a decoder's options once nothing is open.

The shapes of GPT-2 and GPT-3 are taken over into this house's decoder (RMSNorm, rotary positions, SwiGLU, no bias).
Their feed-forward has two matrices of 4 x width; SwiGLU has three, so 8/3 x width keeps the number of parameters
(Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202, section 3). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from espalier import config
from espalier.errors import UserError, nearest


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


def shape(name: str) -> Shape:
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


def sizes(model: config.Gpt | config.Moe) -> Sizes:
    """The sizes of a resolved decoder. An option still None is our bug: `config.derive.resolve` comes first."""
    names = ("depth", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context", "tied")
    values: dict[str, Any] = {name: getattr(model, name) for name in names}
    unset = [name for name, value in values.items() if value is None]
    assert not unset, f"model options not resolved: {', '.join(unset)}"
    layers = values.pop("depth")
    dense = Sizes(layers=layers, rope_theta=model.rope_theta, norm_epsilon=model.norm_epsilon, **values)
    if not isinstance(model, config.Moe):
        return dense
    return replace(dense, experts=model.experts, active=model.active, balance=model.balance)
