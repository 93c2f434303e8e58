"""Models nobody here wrote, and plans for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.plan.base import Plan, Rank, Unit

BATCH, STEPS = 12, 6
Made = tuple[nn.Module, Callable[[nn.Module, range, int], Tensor]]


def plan_of(n: int, shard: tuple[int, int, int] = (1, 1, 1), cuts: Any = None, **more: Any) -> Plan:
    """`n` ranks; `cuts`: where each rank's share of the batch begins."""
    cuts = cuts or [BATCH * rank // n for rank in range(n + 1)]
    groups = [tuple(range(size)) if size > 1 else () for size in shard]
    unit = Unit(params=groups[0], grads=groups[1], optimizer=groups[2])
    shares = tuple(Rank(share=(cuts[rank], cuts[rank + 1])) for rank in range(n))
    return Plan(ranks=shares, units=(unit,), micro_batch=BATCH, **more)


# --- models nobody here wrote ---


class Residual(nn.Module):
    """A block of a residual net: two convolutions of odd sizes."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, outer)
        self.short = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.two(torch.relu(self.one(x)))) + self.short(x))


def resnet() -> Made:
    torch.manual_seed(1)
    body = nn.Sequential(Residual(3, 5), Residual(5, 7), Residual(7, 7))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 4)).double()
    images, labels = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64), torch.arange(BATCH) % 4

    def loss(model: nn.Module, rows: range, step: int) -> Tensor:
        chosen = [(row + step) % BATCH for row in rows]
        return nn.functional.cross_entropy(model(images[chosen]), labels[chosen])

    return model, loss


def llama() -> Made:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3, "vocab_size": 53}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double()
    tokens = torch.randint(53, (BATCH, 9))

    def loss(model: nn.Module, rows: range, step: int) -> Tensor:
        chosen = tokens[[(row + step) % BATCH for row in rows]]
        found: Tensor = model(input_ids=chosen, labels=chosen).loss
        return found

    return model, loss


MODELS = {"resnet": resnet, "llama": llama}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
