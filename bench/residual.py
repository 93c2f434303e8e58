"""A residual network for images of 224 x 224 pixels, as docs/advice.md asks about: four stages of bottleneck blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and blocks of each stage: those of ResNet-50 (arXiv 1512.03385, table 1)."""


class Noise(Dataset[tuple[torch.Tensor, int]]):
    """Images that are made when they are asked for, and their classes."""

    def __init__(self, count: int, classes: int) -> None:
        self.count, self.classes = count, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        seeded = torch.Generator().manual_seed(index)
        return torch.randn(3, 224, 224, generator=seeded), index % self.classes


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.spatial = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.widen = nn.Sequential(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both ways, rectified."""
        return torch.relu(self.shortcut(x) + self.widen(self.spatial(self.narrow(x))))


def build(classes: int) -> tuple[nn.Module, Dataset[Any], Any]:
    """(model, dataset, loss) as docs/module.md asks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for width, blocks in STAGES:
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 and width > 64 else 1))
            inputs = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))

    return model, Noise(4096, classes), loss
