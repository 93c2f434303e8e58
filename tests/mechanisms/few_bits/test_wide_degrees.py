"""Sums over a planted graph whose in-degrees are far apart: at as many bytes, a bit-width and a step for each node keep
what one step for all loses."""

from __future__ import annotations

import pytest
import torch

from espalier.mechanisms.few_bits.a2q import FeatureQuantizer, Rule
from espalier.mechanisms.few_bits.bit_allocator import BitAllocator, MemoryTarget, NodeBits, UniformBits
from espalier.mechanisms.few_bits.mega import package

NODES, CLASSES, COLUMNS = 240, 4, 64


def sums_of_neighbours() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows float32 [nodes, columns] and classes int64 [nodes]: each of 1 to 512 neighbours adds to a sixth of the
    columns of its class, and three in four are of the node's own class."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (NODES,), generator=generator)
    degrees = torch.linspace(0, 9, NODES).exp2().long()
    targets = torch.repeat_interleave(torch.arange(NODES), degrees)
    alike = torch.rand(len(targets), generator=generator) < 0.75
    others = torch.randint(CLASSES, (len(targets),), generator=generator)
    classes = torch.where(alike, labels[targets], others)
    blocks = torch.arange(COLUMNS) // (COLUMNS // CLASSES) == classes[:, None]
    messages = blocks * (torch.rand(len(targets), COLUMNS, generator=generator) < 1 / 6)
    return torch.zeros(NODES, COLUMNS).index_add(0, targets, messages.float()), labels


def stored(rows: torch.Tensor, allocator: BitAllocator, target: int | None = None) -> tuple[torch.Tensor, int]:
    """The rows as they are stored after 40 steps on their own error, and the bytes of their package."""
    quantizer = FeatureQuantizer(allocator, COLUMNS, Rule(signed=False, local=1.0))
    memory = MemoryTarget([quantizer.layer], target)
    quantizer.shift = memory.shift
    quantizer.begin(rows)
    optimizer = torch.optim.Adam([each for each in quantizer.parameters() if each.requires_grad], lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        quantizer(rows).sum().backward()
        optimizer.step()
    quantizer.eval()
    return quantizer(rows).detach(), package.encode(quantizer.codes(rows)).nbytes


def right(rows: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of nodes whose class has the largest sum of columns, by more than any other."""
    totals = rows.view(NODES, CLASSES, -1).sum(2)
    own = totals.gather(1, labels[:, None])[:, 0]
    largest = totals.scatter(1, labels[:, None], -1.0).amax(1)
    return float((own > largest).float().mean())


@pytest.mark.parametrize(("bits", "share"), [(2, 0.8), (3, 1.04)])
def test_widths_by_node_beat_one_width_where_degrees_are_far_apart(bits, share):
    rows, labels = sums_of_neighbours()
    alike, uniform_bytes = stored(rows, UniformBits(NODES, bits + 1))
    by_node, node_bytes = stored(rows, NodeBits(NODES, bits + 1), target=round(share * NODES * COLUMNS / 8))
    assert node_bytes <= uniform_bytes
    assert right(by_node, labels) > right(alike, labels) + 0.1

    def error(values: torch.Tensor) -> float:
        return float(((values - rows).norm(dim=1) / rows.norm(dim=1).clamp(min=1)).mean())

    assert error(by_node) < 0.7 * error(alike)
