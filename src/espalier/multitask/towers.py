"""Towers and heads: a model of several tasks as a graph of parts that ranks can run apart.

A task runs its towers, those that others take first, then its head, which gives its losses. A tower is `depth` equal
blocks; what makes tokens of samples belongs to the first, the norm to the last. What goes from block to block is one
tensor [samples, tokens, width], so that samples can be divided over ranks anew between any two blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from espalier.config import Recipe, TaskOptions, Tower
from espalier.config.multitask import with_inputs
from espalier.workload import HEAD, TaskNode

Fields = Mapping[str, Tensor]
"""A batch: of each field, [samples, ...]."""
Figures = dict[str, tuple[Tensor, Tensor]]
"""Of each figure of a task, (sum over the samples, weight); `loss` is one of them."""

PATCH = 4
"""Pixels of the side of an image's patch."""
TEMPERATURE = 0.07
"""Of a contrastive loss at the beginning (CLIP, arXiv 2103.00020)."""
WHOLE = "contrastive"
"""The loss that needs all samples of a batch at one place."""


class Shapes(NamedTuple):
    """Of the samples: bytes that a text may have, pixels of an image's side and its channels, columns of a node's
    features, and classes of each task that has some."""

    length: int = 64
    side: int = 28
    channels: int = 1
    columns: int = 1
    classes: Mapping[str, int] = {}


class Attention(nn.Module):
    """A pre-norm transformer block (arXiv 2002.04745), over all tokens or those before."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = max(1, width // 32), causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, tokens, width] of the same."""
        samples, tokens, width = x.shape
        split = (
            self.qkv(self.before(x)).view(samples, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Neighbours(nn.Module):
    """Each node takes the mean of all of its sample (after GraphSAGE, arXiv 1706.02216, with residuals)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(2 * width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 1 + neighbours, width] of the same."""
        own = self.norm(x)
        both = torch.cat([own, own.mean(1, keepdim=True).expand_as(own)], -1)
        return x + self.down(F.gelu(self.up(both)))


class TowerModule(nn.Module):
    """See above. `inputs`: the widths of the towers that it takes."""

    def __init__(self, options: Tower, shapes: Shapes, inputs: Sequence[int]) -> None:
        super().__init__()
        self.kind, width = options.kind, options.width
        self.adapters = nn.ModuleList(nn.Linear(one, width) for one in inputs)
        if self.kind == "text":
            self.table: nn.Module = nn.Embedding(256, width)
            self.places = nn.Parameter(0.02 * torch.randn(shapes.length, width))
        elif self.kind == "image":
            self.table = nn.Linear(shapes.channels * PATCH * PATCH, width)
            self.places = nn.Parameter(0.02 * torch.randn((shapes.side // PATCH) ** 2, width))
        else:
            self.table, self.places = nn.Linear(shapes.columns, width), nn.Parameter(torch.zeros(2, width))
        block = (lambda: Neighbours(width)) if self.kind == "graph" else (lambda: Attention(width, self.kind == "text"))
        self.blocks = nn.ModuleList(block() for _ in range(options.depth))
        self.norm = nn.LayerNorm(width)

    def tokens(self, fields: Fields, taken: Sequence[Tensor]) -> Tensor:
        """[samples, tokens, width] of what a batch has for it, after what it takes."""
        if self.kind == "text":
            own = self.table(fields["text"]) + self.places
        elif self.kind == "image":
            image = fields["image"].to(self.places.dtype)
            samples, channels, rows, columns = image.shape
            patches = image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
            count = (rows // PATCH) * (columns // PATCH)
            own = self.table(patches.reshape(samples, count, channels * PATCH * PATCH)) + self.places
        else:
            nodes = fields["nodes"].to(self.places.dtype)  # the node itself first
            first = (torch.arange(nodes.shape[1], device=nodes.device) > 0).long()
            own = self.table(nodes) + self.places[first]
        return torch.cat([*(adapt(one) for adapt, one in zip(self.adapters, taken, strict=True)), own], 1)

    def parts(self) -> Iterator[tuple[int, str]]:
        """(operator, name) of each child and parameter that belongs to it."""
        for name in ("adapters", "table", "places"):
            yield 0, name
        for number in range(len(self.blocks)):
            yield number, f"blocks.{number}"
        yield len(self.blocks) - 1, "norm"


class Head(nn.Module):
    """What makes figures of the outputs of a task's towers."""

    def __init__(self, task: TaskOptions, widths: Sequence[int], shapes: Shapes, joint: int) -> None:
        super().__init__()
        self.loss = task.loss
        columns = {"contrastive": joint, "next_token": 256}.get(task.loss) or shapes.classes[task.name]
        self.out = nn.ModuleList(nn.Linear(one, columns) for one in widths)
        if self.loss == "contrastive":
            self.temperature = nn.Parameter(torch.tensor(math.log(1 / TEMPERATURE)))

    @property
    def whole(self) -> bool:
        """Whether it needs all samples of the batch at one place."""
        return self.loss == WHOLE

    def forward(self, outputs: Sequence[Tensor], fields: Fields) -> Figures:
        """Sums over the samples; the weight is their number."""
        count = torch.tensor(float(len(outputs[0])))
        if self.loss == "next_token":
            text = fields["text"]
            scores = self.out[0](outputs[0][:, -text.shape[1] :][:, :-1])
            each = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten(), reduction="none")
            return {"loss": (each.view(len(text), -1).mean(1).sum(), count)}
        if self.loss == "classes":
            scores = self.out[0](outputs[0][:, 0] if "nodes" in fields else outputs[0].mean(1))
            right = (scores.argmax(1) == fields["label"]).sum()
            return {
                "loss": (F.cross_entropy(scores, fields["label"], reduction="sum"), count),
                "accuracy": (right, count),
            }
        one, other = self.compared(outputs)
        scores, own = self.temperature.exp() * one @ other.T, torch.arange(len(one), device=one.device)
        both = [F.cross_entropy(way, own, reduction="sum") for way in (scores, scores.T)]
        return {"loss": ((both[0] + both[1]) / 2, count), "accuracy": ((scores.argmax(1) == own).sum(), count)}

    def compared(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """[samples, joint] of each tower, rows of length one."""
        return [F.normalize(out(one.mean(1)), dim=-1) for out, one in zip(self.out, outputs, strict=True)]


class Multitask(nn.Module):
    """All towers and heads of a recipe. `forward(task, fields)` gives the task's figures."""

    def __init__(self, recipe: Recipe, shapes: Shapes) -> None:
        super().__init__()
        options, joint = {one.name: one for one in recipe.towers or ()}, getattr(recipe.model, "joint", 64)
        self.options, self.tasks = options, tuple(recipe.tasks or ())
        widths = {name: one.width for name, one in options.items()}
        self.towers = nn.ModuleDict(
            {name: TowerModule(one, shapes, [widths[other] for other in one.takes]) for name, one in options.items()}
        )
        self.heads = nn.ModuleDict(
            {one.name: Head(one, [widths[name] for name in one.towers], shapes, joint) for one in self.tasks}
        )

    def nodes(self, task: int) -> list[TaskNode]:
        """The parts of a task in the order in which they run, its head last."""
        own = self.tasks[task]
        towers = with_inputs(own.towers, list(self.options.values()))
        found = [TaskNode(name, self.options[name].depth, tuple(self.options[name].takes)) for name in towers]
        return [*found, TaskNode(HEAD, 1, own.towers, own.loss == WHOLE)]

    def compute(
        self, task: int, node: str, operators: tuple[int, int], inputs: Sequence[Tensor], fields: Fields
    ) -> Tensor | Figures:
        """Operators `[first, last)` of a node. `inputs`: what its needs give, or behind its first operator, that."""
        if node == HEAD:
            found: Figures = self.heads[self.tasks[task].name](inputs, fields)
            return found
        tower, (first, last) = self.towers[node], operators
        assert isinstance(tower, TowerModule)
        x = tower.tokens(fields, inputs) if first == 0 else inputs[0]
        for block in tower.blocks[first:last]:
            x = block(x)
        return tower.norm(x) if last == len(tower.blocks) else x

    def forward(self, task: int, fields: Fields) -> Figures:
        """The figures of a task's batch."""
        made: dict[str, Any] = {}
        for node in self.nodes(task):
            made[node.name] = self.compute(
                task, node.name, (0, node.operators), [made[need] for need in node.needs], fields
            )
        found: Figures = made[HEAD]
        return found

    def owners(self) -> dict[str, tuple[str, int]]:
        """Of each parameter, the node and the operator that it belongs to; a head is `head.TASK`."""
        places: dict[str, tuple[str, int]] = {f"heads.{one.name}": (f"{HEAD}.{one.name}", 0) for one in self.tasks}
        for name, tower in self.towers.items():
            assert isinstance(tower, TowerModule)
            places |= {f"towers.{name}.{part}": (name, operator) for operator, part in tower.parts()}
        found = {}
        for name, _ in self.named_parameters():
            found[name] = next(place for prefix, place in places.items() if f"{name}.".startswith(f"{prefix}."))
        return found
