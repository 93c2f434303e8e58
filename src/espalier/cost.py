"""What a mechanism costs: seconds, bytes held, bytes sent. The currency in which parts are compared.

Every number may be a NumPy array: one call then prices a whole grid of layouts. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Number = Any  # float or numpy array of floats, broadcast together
Terms = Mapping[str, Number]


@dataclass(frozen=True)
class Product:
    """A dense matrix product [rows, inner] x [inner, columns], done `count` times in one forward pass."""

    rows: Number
    inner: Number
    columns: Number
    count: Number = 1

    @property
    def flops(self) -> Number:
        """Multiplications and additions of all `count` products."""
        return 2.0 * self.rows * self.inner * self.columns * self.count


@dataclass(frozen=True)
class Work:
    """What one micro-batch asks of a device, before the device is named.

    Attributes:
        products: dense products of the forward pass; the backward pass does each of them twice.
        attention: FLOPs of the attention core in the forward pass (causal: half of the square); backward 2.5 times.
        moved: bytes read and written in the forward pass by everything else (norms, elementwise, softmax of the head).
        kept: bytes of activations kept until backward.
        transient: further bytes at the worst moment (logits and their gradient).
        again: products and attention run once more in backward because of recomputation, as a share of forward (0..1).
        samples: samples (sequences) in the micro-batch; tokens: tokens (or nodes, rays) in it.
    """

    products: tuple[Product, ...]
    attention: Number
    moved: Number
    kept: Number
    transient: Number
    again: Number
    samples: Number
    tokens: Number

    @property
    def forward_flops(self) -> Number:
        """FLOPs of one forward pass."""
        return sum((product.flops for product in self.products), 0.0) + self.attention

    @property
    def model_flops(self) -> Number:
        """FLOPs that count for MFU: forward and backward once, recomputation not counted (attention 2x in backward)."""
        return 3.0 * self.forward_flops


@dataclass(frozen=True)
class Cost:
    """Costs of one part of one step on one rank, by name of the part.

    Attributes:
        seconds: part of the step (`forward`, `backward`, `all_reduce` …) to seconds.
        held: kind of memory (`params`, `grads`, `optimizer`, `activations` …) to bytes.
        sent: traffic class (`gradients`, `params` …) to payload bytes that leave the rank.
        sources: any of those names to where its number comes from.
    """

    seconds: Terms = field(default_factory=dict)
    held: Terms = field(default_factory=dict)
    sent: Terms = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            _sum(self.seconds, other.seconds),
            _sum(self.held, other.held),
            _sum(self.sent, other.sent),
            {**self.sources, **other.sources},
        )

    def times(self, factor: Number) -> Cost:
        """The cost of doing the same `factor` times: seconds and bytes sent grow, bytes held do not."""
        return Cost(_scale(self.seconds, factor), self.held, _scale(self.sent, factor), self.sources)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of all `costs`."""
    result = Cost()
    for cost in costs:
        result = result + cost
    return result


def _sum(left: Terms, right: Terms) -> Terms:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *(k for k in right if k not in left))}


def _scale(terms: Terms, factor: Number) -> Terms:
    return {key: value * factor for key, value in terms.items()}
