"""Which of four wavelengths has this image? A small convolutional network finds out."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset


def waves(count, classes, seed):
    """`count` images of 16 x 16 with plane waves of any direction and phase, noise, and the wavelength's number."""
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=seeded)
    direction, phase = 2 * math.pi * torch.rand(2, count, 1, 1, generator=seeded)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    along = x * direction.cos() + y * direction.sin()
    images = torch.sin(3 * (labels + 1).view(-1, 1, 1) * along + phase)
    images += 0.3 * torch.randn(count, 16, 16, generator=seeded)
    return TensorDataset(images.unsqueeze(1), labels)


def build(classes):
    """(model, dataset, loss, held-out dataset) of this task; called with `model.arguments`."""
    torch.manual_seed(0)  # every rank must build the same
    data, held_out = waves(2048, classes, seed=1), waves(256, classes, seed=2)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.Conv2d(16, 16, 5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )

    def loss(model, batch):  # (sum over the batch, weight), never a mean
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))

    return model, data, loss, held_out  # the held-out dataset may be left out
