"""Towers and heads: a model of several tasks as a graph of parts that ranks can run apart.

A task runs its towers, those that others take first, then its head, which gives its losses. A tower is `depth` equal
blocks; what makes tokens of samples belongs to the first, the norm to the last. What goes from block to block is one
tensor [samples, tokens, width], so that samples can be divided over ranks anew between any two blocks. A radiance field
is a tower of one block, whose samples are rays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from espalier.kernels.ragged import Ragged
from espalier.parallel.workload import HEAD, TaskNode
from espalier.radiance.rays import Rays
from espalier.radiance.scenes import Scene
from espalier.radiance.volume_rendering import SceneBox
from espalier.radiance.voxels import ColourNetwork, Field, ray_losses, sample_losses
from espalier.radiance.workload import LOSSES, THIN
from espalier.recipe import Recipe, TaskOptions, Tower
from espalier.recipe.multitask import with_inputs

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
    features, classes of each task that has some, and scenes of towers that are fields."""

    length: int = 64
    side: int = 28
    channels: int = 1
    columns: int = 1
    classes: Mapping[str, int] = {}
    scenes: Mapping[str, Scene] = {}


class Attention(nn.Module):
    """A pre-norm transformer block (arXiv 2002.04745), over all tokens or those before."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.causal = causal
        self.before = nn.LayerNorm(width)
        self.between = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, tokens, width] of the same."""
        samples, tokens, width = x.shape
        split = (
            self.qkv(self.before(x)).view(samples, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class NeighbourMean(nn.Module):
    """Each node takes the mean of all of its sample (after GraphSAGE, arXiv 1706.02216, with residuals)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(2 * width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 1 + neighbours, width] of the same."""
        normed = self.norm(x)
        both = torch.cat([normed, normed.mean(1, keepdim=True).expand_as(normed)], -1)
        return x + self.down(F.gelu(self.up(both)))


class TowerModule(nn.Module):
    """See above. `inputs`: the widths of the towers that it takes."""

    def __init__(self, options: Tower, shapes: Shapes, inputs: Sequence[int]) -> None:
        super().__init__()
        self.kind = options.kind
        width = options.width
        self.adapters = nn.ModuleList(nn.Linear(columns_in, width) for columns_in in inputs)
        if self.kind == "text":
            self.table: nn.Module = nn.Embedding(256, width)
            self.places = nn.Parameter(0.02 * torch.randn(shapes.length, width))
        elif self.kind == "image":
            self.table = nn.Linear(shapes.channels * PATCH * PATCH, width)
            self.places = nn.Parameter(0.02 * torch.randn((shapes.side // PATCH) ** 2, width))
        else:
            self.table = nn.Linear(shapes.columns, width)
            self.places = nn.Parameter(torch.zeros(2, width))
        block = (
            (lambda: NeighbourMean(width)) if self.kind == "graph" else (lambda: Attention(width, self.kind == "text"))
        )
        self.blocks = nn.ModuleList(block() for _ in range(options.depth))
        self.norm = nn.LayerNorm(width)

    def run(self, operators: tuple[int, int], inputs: Sequence[Tensor], fields: Fields) -> Tensor:
        """Blocks `[first, last)`. `inputs`: what it takes, or behind the first block, what the one before gave."""
        first, last = operators
        x = self.tokens(fields, inputs) if first == 0 else inputs[0]
        for block in self.blocks[first:last]:
            x = block(x)
        return self.norm(x) if last == len(self.blocks) else x

    def tokens(self, fields: Fields, taken: Sequence[Tensor]) -> Tensor:
        """[samples, tokens, width] of what a batch has for it, after what it takes."""
        if self.kind == "text":
            tokens = self.table(fields["text"]) + self.places
        elif self.kind == "image":
            image = fields["image"].to(self.places.dtype)
            samples, channels, rows, columns = image.shape
            patches = image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
            count = (rows // PATCH) * (columns // PATCH)
            tokens = self.table(patches.reshape(samples, count, channels * PATCH * PATCH)) + self.places
        else:
            nodes = fields["nodes"].to(self.places.dtype)  # the node itself first
            first = (torch.arange(nodes.shape[1], device=nodes.device) > 0).long()
            tokens = self.table(nodes) + self.places[first]
        return torch.cat([*(adapt(value) for adapt, value in zip(self.adapters, taken, strict=True)), tokens], 1)

    def parts(self) -> Iterator[tuple[int, str]]:
        """(operator, name) of each child and parameter that belongs to it."""
        for name in ("adapters", "table", "places"):
            yield 0, name
        for number in range(len(self.blocks)):
            yield number, f"blocks.{number}"
        yield len(self.blocks) - 1, "norm"


FEATURES = 12
"""Columns of a cell of a field, as scenes have by default."""


class FieldTower(nn.Module):
    """A radiance field on voxels: of a ray its colour, what passes all samples, and the error of single ones. It is
    trained in one stage: no coarse field comes before, so that no cell is known to be empty. Its box is the scene's."""

    def __init__(self, options: Tower, scene: Scene) -> None:
        super().__init__()
        box = SceneBox(scene.box[0], scene.box[1])
        self.field = Field(box, options.resolution, FEATURES, THIN, ColourNetwork(FEATURES, options.width))
        self.field.background = scene.background
        for module in self.field.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=False)  # said by the scene, and no state of the run

    def run(self, operators: tuple[int, int], inputs: Sequence[Tensor], fields: Fields) -> Tensor:
        """[rays, 1, 5]. `fields`: `rays` [rays, 9], origins, directions and views; `colour` [rays, 3]."""
        dtype = self.field.density.values.dtype
        rendered = self.field(Rays(*(part.contiguous() for part in fields["rays"].to(dtype).split(3, 1))))
        single = Ragged(sample_losses(rendered, fields["colour"].to(dtype))[:, None], rendered.offsets).sums()
        return torch.cat([rendered.colours, rendered.rest[:, None], single], 1)[:, None]

    def parts(self) -> Iterator[tuple[int, str]]:
        """All of it is one operator."""
        yield 0, "field"


class Head(nn.Module):
    """What makes figures of the outputs of a task's towers."""

    def __init__(self, task: TaskOptions, widths: Sequence[int], shapes: Shapes, joint: int) -> None:
        super().__init__()
        self.loss = task.loss
        columns = {"contrastive": joint, "next_token": 256}.get(task.loss) or shapes.classes.get(task.name, 0)
        self.out = nn.ModuleList(nn.Linear(columns_in, columns) for columns_in in (widths if columns else ()))
        if self.loss == "contrastive":
            self.temperature = nn.Parameter(torch.tensor(math.log(1 / TEMPERATURE)))

    @property
    def whole(self) -> bool:
        """Whether it needs all samples of the batch at one place."""
        return self.loss == WHOLE

    def forward(self, outputs: Sequence[Tensor], fields: Fields) -> Figures:
        """Sums over the samples; the weight is their number."""
        count = torch.tensor(float(len(outputs[0])))
        if self.loss == "colours":
            return colour_figures(outputs[0], fields)
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
        first_side, other = self.compared(outputs)
        scores = self.temperature.exp() * first_side @ other.T
        labels = torch.arange(len(first_side), device=first_side.device)
        both = [F.cross_entropy(way, labels, reduction="sum") for way in (scores, scores.T)]
        return {"loss": ((both[0] + both[1]) / 2, count), "accuracy": ((scores.argmax(1) == labels).sum(), count)}

    def compared(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """[samples, joint] of each tower, rows of length one."""
        return [F.normalize(out(value.mean(1)), dim=-1) for out, value in zip(self.out, outputs, strict=True)]


def colour_figures(output: Tensor, fields: Fields) -> Figures:
    """Of rays, from what a field gives. There are no parameters: a rank that runs nothing else holds nothing."""
    colours, rest, single = output[:, 0].split([3, 1, 1], 1)
    (entropy, weight), true = LOSSES["fine"], fields["colour"].to(colours.dtype)
    loss = ray_losses(colours, rest[:, 0], true, entropy).sum()
    count = torch.tensor(float(len(output)))
    error = (colours.detach() - true).square().mean(1).sum()
    return {"loss": (loss + weight * single.sum(), count), "error": (error, count)}


class MultitaskModel(nn.Module):
    """All towers and heads of a recipe. `forward(task, fields)` gives the task's figures."""

    def __init__(self, recipe: Recipe, shapes: Shapes) -> None:
        super().__init__()
        options = {tower.name: tower for tower in recipe.towers or ()}
        joint = getattr(recipe.model, "joint", 64)
        self.options = options
        self.tasks = tuple(recipe.tasks or ())
        widths = {name: option.width for name, option in options.items()}
        self.towers = nn.ModuleDict(
            {
                name: FieldTower(option, shapes.scenes[name])
                if option.kind == "voxels"
                else TowerModule(option, shapes, [widths[other] for other in option.takes])
                for name, option in options.items()
            }
        )
        self.heads = nn.ModuleDict(
            {task.name: Head(task, [widths[name] for name in task.towers], shapes, joint) for task in self.tasks}
        )

    def nodes(self, task: int) -> list[TaskNode]:
        """The parts of a task in the order in which they run, its head last."""
        task_options = self.tasks[task]
        towers = with_inputs(task_options.towers, list(self.options.values()))
        depths = {name: 1 if self.options[name].kind == "voxels" else self.options[name].depth for name in towers}
        towers_nodes = [TaskNode(name, depths[name], tuple(self.options[name].takes)) for name in towers]
        return [*towers_nodes, TaskNode(HEAD, 1, task_options.towers, task_options.loss == WHOLE)]

    def compute(
        self, task: int, node: str, operators: tuple[int, int], inputs: Sequence[Tensor], fields: Fields
    ) -> Tensor | Figures:
        """Operators `[first, last)` of a node. `inputs`: what its needs give, or behind its first operator, that."""
        if node == HEAD and self.tasks[task].loss == "colours":
            return colour_figures(inputs[0], fields)
        if node == HEAD:
            return self.heads[self.tasks[task].name](inputs, fields)
        tower = self.towers[node]
        assert isinstance(tower, TowerModule | FieldTower)
        return tower.run(operators, inputs, fields)

    def run(self, task: int, nodes: Sequence[TaskNode], fields: Fields) -> dict[str, Any]:
        """What `nodes` of a task give for a batch, by name."""
        outputs: dict[str, Any] = {}
        for node in nodes:
            inputs = [outputs[need] for need in node.needs]
            outputs[node.name] = self.compute(task, node.name, (0, node.operators), inputs, fields)
        return outputs

    def forward(self, task: int, fields: Fields) -> Figures:
        """The figures of a task's batch."""
        return self.run(task, self.nodes(task), fields)[HEAD]

    def owners(self) -> dict[str, tuple[str, int]]:
        """Of each parameter, the node and the operator that it belongs to; a head is `head.TASK`."""
        places = {f"heads.{task.name}": (f"{HEAD}.{task.name}", 0) for task in self.tasks}
        for name, tower in self.towers.items():
            assert isinstance(tower, TowerModule | FieldTower)
            places |= {f"towers.{name}.{part}": (name, operator) for operator, part in tower.parts()}
        owners = {}
        for name, _ in self.named_parameters():
            owners[name] = next(place for prefix, place in places.items() if f"{name}.".startswith(f"{prefix}."))
        return owners
