"""The decoder with a mixture of experts in place of each feed-forward (Mixtral, arXiv 2401.04088): a router picks
`active` of `experts` SwiGLU blocks for each token and weighs them by a softmax over the picked ones.

A penalty keeps the experts evenly used: Switch's E · sum_e f_e · P_e (arXiv 2101.03961, equation 4), taken over each
sequence by itself as in DeepSeek-V3 (arXiv 2412.19437, equations 17-20). Taken over a batch it would depend on how the
batch is cut into micro-batches and ranks; over sequences it is a sum over samples, like the cross entropy. Instead of
the penalty a bias of each expert may balance (loss-free balancing, arXiv 2408.15664): it counts when experts are picked
and not in their weights. There its sign steps against the load; here the load beyond an even share is its gradient, so
that it is summed over ranks, moved by the optimizer and saved like every parameter. A second penalty keeps the router's
scores small: ST-MoE's z-loss, the mean of logsumexp squared (arXiv 2202.08906, equation 5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.kernels import rtopk
from espalier.kernels.linear_cross_entropy import IGNORED
from espalier.language.attention_variants import wide
from espalier.language.gpt import GPT, DecoderBlock, FeedForward, Given, Rotary
from espalier.language.kv_cache import Past
from espalier.language.operation_counts import DecoderLoad, Feed, decoder_work
from espalier.parallel.expert_map import ExpertRoute
from espalier.parallel.local_experts import local
from espalier.recipe.cost import Anatomy, Product

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from espalier.recipe.decoder_shapes import DecoderSizes


class Router(nn.Linear):
    """Scores of experts. Its `bias`, where it has one, is not in them."""

    def __init__(self, width: int, experts: int, bias: bool) -> None:
        super().__init__(width, experts, bias=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(experts))

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch experts"]:
        """Scores before any softmax."""
        return F.linear(x, self.weight)


class Experts(nn.Module):
    """A router, its experts, and one that every token takes (`size.shared` columns of it). Two seams: `route` brings
    tokens to the experts that were chosen for them, `total` adds up what is counted of sequences over the ranks that
    share them."""

    seams: ClassVar = {"route": ("route",), "total": ("total",)}

    def __init__(self, size: DecoderSizes) -> None:
        super().__init__()
        self.active = size.active
        self.balance = size.balance
        self.z_loss = size.z_loss
        self.normalized = size.normalized
        self.max_iterations = size.max_iterations
        self.router = Router(size.width, size.experts, size.bias)
        self.experts = nn.ModuleList(FeedForward(size) for _ in range(size.experts))
        self.shared = FeedForward(replace(size, feed_forward=size.shared)) if size.shared else None
        self.shared_gate = nn.Linear(size.width, 1, bias=False) if size.shared else None
        self.route: ExpertRoute = local
        self.total: Callable[[Tensor], Tensor] = total_of_rank

    def forward(
        self, x: Float[Tensor, "batch seq width"]
    ) -> tuple[Float[Tensor, "batch seq width"], Float[Tensor, " batch"]]:
        """What the experts say of each token, and the penalties of each sequence, per token."""
        scores = wide(self.router(x))
        bias: Tensor | None = getattr(self.router, "bias", None)
        if bias is None:
            best, chosen = rtopk(scores, self.active, self.max_iterations, sorted=True)
            penalty = self.balance * imbalance(scores, chosen, self.total)
        else:
            biased = scores.detach().softmax(-1) + bias.detach()
            _, chosen = rtopk(biased, self.active, self.max_iterations, sorted=True)
            best = scores.gather(-1, chosen)
            penalty = steering(bias, chosen)
        if self.z_loss:
            penalty = penalty + self.z_loss * scores.logsumexp(-1).square().mean(-1)
        weights = best.softmax(-1) if self.normalized else scores.softmax(-1).gather(-1, chosen)
        flat = x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)
        answer = self.route(*flat, list(self.experts.children())).view_as(x)
        if self.shared is not None and self.shared_gate is not None:
            answer = answer + self.shared_gate(x).sigmoid() * self.shared(x)
        return answer, penalty


def steering(bias: Float[Tensor, " experts"], chosen: Int[Tensor, "batch seq active"]) -> Float[Tensor, " batch"]:
    """Zeros [batch], whose gradient by an expert's bias is its share of a sequence's choices beyond an even one."""
    choices = chosen.flatten(1)
    counts = bias.new_zeros(len(chosen), len(bias)).scatter_add_(1, choices, bias.new_ones(choices.shape))
    return (counts / choices.shape[1] - 1 / len(bias)) @ (bias - bias.detach())


def total_of_rank(counts: Tensor) -> Tensor:
    """The sum over the one rank that holds a sequence."""
    return counts


def imbalance(
    scores: Float[Tensor, "batch seq experts"],
    chosen: Int[Tensor, "batch seq active"],
    total: Callable[[Tensor], Tensor] = total_of_rank,
) -> Float[Tensor, " batch"]:
    """E · sum over experts of (share of a sequence's choices) x (mean probability): 1 when even, E when all one.

    Where ranks share a sequence, `total` gives the choices of all of them and the probabilities are each rank's own;
    weighted by the ranks' tokens, their answers then add up to that of the sequence.
    """
    batch, _, experts = scores.shape
    choices = chosen.flatten(1)
    counts = total(scores.new_zeros(batch, experts).scatter_add_(1, choices, scores.new_ones(choices.shape)))
    shares = counts / counts.sum(1, keepdim=True)
    return experts * (shares * scores.softmax(-1).mean(1)).sum(-1)


class MoeBlock(DecoderBlock):
    """One layer with experts. Gives the residual stream and the layer's penalties `[batch]`."""

    seams: ClassVar = {}

    def __init__(self, size: DecoderSizes, layer: int = 0) -> None:
        super().__init__(size, layer, Experts(size))

    def forward(
        self, x: Float[Tensor, "batch seq width"], turn: Rotary, past: Past | None = None
    ) -> tuple[Float[Tensor, "batch seq width"], Float[Tensor, " batch"]]:
        """The residual stream after this layer, and its penalties."""
        x = x + self.attention(self.attention_norm(x), turn, past)
        answer, penalty = self.feed_forward(self.feed_forward_norm(x))
        return x + answer, penalty


class MOE(GPT):
    """The decoder of resolved `config.Moe` options."""

    def block(self, layer: int) -> DecoderBlock:
        """A new layer."""
        return MoeBlock(self.size, layer)

    def _embedded(self, tokens: Tensor, *others: Any, **options: Any) -> Any:
        x = self.embedding(tokens)
        return x, torch.zeros((), device=x.device)

    def _passed(self, index: int, x: Any, given: Given) -> Any:
        stream, total = x
        stream, penalty = super()._passed(index, stream, given)
        return stream, total + penalty

    def _ended(self, x: Any, given: Given) -> Any:
        """While training, losses are cross entropies and penalties, summed over layers and targets.

        Each target carries the penalties of its sequence, so the whole is a sum over samples whose weight is the
        number of targets: it does not matter how a batch is cut.
        """
        stream, penalty = x
        loss = super()._ended(stream, given)
        if given.targets is None or not self.training:
            return loss
        counted = (given.targets != IGNORED).sum(1)
        return loss + (penalty * counted).sum()


def work(setting: DecoderLoad) -> Anatomy:
    """Operations and bytes of one micro-batch on one rank (see `language.operation_counts`), a share of every expert on
    each."""
    size = setting.size
    compute = setting.compute
    width, inner, experts, active = size.width, size.feed_forward, size.experts, size.active
    rows = setting.tokens * active
    cut = inner / setting.cut.tensor
    router = Product(setting.tokens, width, experts)
    combine = Product(setting.tokens, active, width)
    gate_up = Product(rows, width, cut, 2, grouped=True)
    down = Product(rows, cut, width, grouped=True)
    # Kept: the rows as sorted, gate, up and their product, the answers by token; int64 indices (picked experts, which
    # token each row is, where its answer goes); the router's two softmaxes.
    saved = active * (2 * width + 3 * inner) * compute + 3 * 8 * active + (experts + 2 * active) * setting.whole
    moved = active * (6 * width + 5 * inner) * compute
    again: tuple[Product, ...] = (router, gate_up, down)
    if shared := size.shared:
        gate = Product(setting.tokens, width, 1)
        always = shared / setting.cut.tensor
        again += (gate, Product(setting.tokens, width, always, 2), Product(setting.tokens, always, width))
        saved += (3 * shared + width + 2) * compute  # gate, up and their product; its answer, which the gate weighs
        moved += (5 * shared + 4 * width) * compute
    products = (*again[:3], combine, *again[3:])
    # Recomputation stops where the answers are combined: nothing that is kept comes after.
    return decoder_work(setting, Feed(products, again, moved, saved, working=2 * active * width * compute))
