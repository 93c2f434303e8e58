"""Costs are what is read: expected pages against drawn rows, bytes against files, seconds exact where measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.machine.cluster import Disk
from espalier.store import RowFile, RowLayout, cost, padded

DISK = Disk(path="/", write=1e9, read=2e9, iops=10_000, iops_parallel=80_000)


@pytest.mark.parametrize("size", [4, 100, 512, 1536, 4096, 5732, 8200])
@pytest.mark.parametrize("padding", [False, True])
def test_expected_pages_are_those_of_drawn_rows(tmp_path: Path, size: int, padding: bool) -> None:
    rows, seeded = 20_000, torch.Generator().manual_seed(size)
    layout = RowLayout(rows, torch.uint8, (size,), stride=padded(size) if padding else 0)
    with open(tmp_path / "rows", "wb") as file:
        file.truncate(layout.end)
    with RowFile(tmp_path / "rows", layout) as table:
        for count in (50, 2000, 20_000):
            drawn = np.mean([table.pages(torch.randperm(rows, generator=seeded)[:count]) for _ in range(20)])
            assert cost.pages_of_rows(count, rows, size, layout.stride) == pytest.approx(drawn, rel=0.03, abs=2)


def test_pages_of_a_row_are_the_average_over_the_table() -> None:
    for size in (1, 4, 100, 512, 4096, 4097, 8200):
        for stride in (0, padded(size)):
            step = stride or size
            begins = np.arange(4096) * step
            assert cost.pages_of_row(size, stride) == np.mean((begins + size - 1) // 4096 - begins // 4096 + 1)


def test_seconds_are_exact_at_both_measured_figures() -> None:
    assert cost.read_seconds(DISK, 80_000 * 4096, 80_000) == pytest.approx(1.0)
    assert cost.read_seconds(DISK, 2e9 * 1000, 1) == pytest.approx(1000, rel=1e-4)
    assert cost.write_seconds(DISK, np.array([1e9, 3e9])).tolist() == [1, 3]
    slow = Disk(path="/", write=1e8, read=1e8, iops=100_000)
    assert cost.read_seconds(slow, 1e8, 1000) == 1.0
