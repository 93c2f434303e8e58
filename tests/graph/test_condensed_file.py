"""Condensed edges order a disk layout and the halo messages: each outside source once, in one read of a part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.errors import UserError
from espalier.graph.condensed_file import sums_from, write_condensed
from espalier.graph.halo import boundary
from espalier.quant.mega.condense import Condensed, condense
from espalier.store.cost import PAGE
from espalier.store.direct_io import DirectFile
from espalier.store.extents import DamagedExtent

NODES, PARTS = 600, 7


@pytest.fixture(scope="module")
def graph() -> tuple[np.ndarray, np.ndarray, Condensed]:
    random = np.random.default_rng(0)
    counts = random.integers(0, 12, NODES)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = random.integers(0, NODES, int(indptr[-1])).astype(np.int32)
    return indptr, indices, condense(indptr, indices, random.integers(0, PARTS, NODES).astype(np.int32))


def test_sums_from_disk_are_those_in_memory_with_one_read_a_part(graph, tmp_path: Path, monkeypatch) -> None:
    indptr, indices, plan = graph
    rows = torch.randint(-99, 99, (NODES, 16), dtype=torch.int32)
    write_condensed(plan, rows, tmp_path / "rows")
    read: list[int] = []
    real = DirectFile.read_into

    def counted(self: DirectFile, buffer: torch.Tensor, offset: int, needed: int | None = None) -> None:
        read.append(buffer.nbytes)
        real(self, buffer, offset, needed)

    monkeypatch.setattr(DirectFile, "read_into", counted)
    found = sums_from(tmp_path / "rows", plan, indptr, indices, torch.empty(NODES, 16, dtype=torch.int32))
    targets = torch.from_numpy(np.repeat(np.arange(NODES), np.diff(indptr)))
    whole = torch.zeros(NODES, 16, dtype=torch.int32).index_add(0, targets, rows[torch.from_numpy(indices).long()])
    assert torch.equal(found, whole)
    assert len(read) == PARTS, "one read for each part"
    assert 4 * len(read) <= len(plan.regions), "a fourth of the reads of outside sources one by one, at most"
    stored = (NODES + len(plan.regions)) * rows[0].nbytes
    assert stored <= sum(read) <= stored + PARTS * PAGE, "rows and the rest of a page"


def test_a_region_is_what_a_halo_message_brings(graph) -> None:
    indptr, indices, plan = graph
    cut = boundary(indptr, indices, plan.labels, PARTS)
    for part in range(PARTS):
        assert np.array_equal(np.sort(cut.node[cut.receiver == part]), plan.region(part))
    key = (cut.receiver * PARTS + cut.owner) * NODES + cut.node
    assert bool((np.diff(key) > 0).all()), "by receiver, owner and node, each once"


def test_other_rows_and_other_plans_are_refused(graph, tmp_path: Path) -> None:
    indptr, indices, plan = graph
    with pytest.raises(UserError, match="600 nodes have 3 rows"):
        write_condensed(plan, torch.zeros(3, 2), tmp_path / "rows")
    write_condensed(plan, torch.zeros(NODES, 2), tmp_path / "rows")
    other = condense(indptr, indices, np.zeros(NODES, np.int32))
    with pytest.raises(UserError, match="holds 7 parts, and the plan has 1"):
        sums_from(tmp_path / "rows", other, indptr, indices, torch.zeros(NODES, 2))


def test_damaged_rows_are_named(graph, tmp_path: Path) -> None:
    indptr, indices, plan = graph
    write_condensed(plan, torch.ones(NODES, 2), tmp_path / "rows")
    with (tmp_path / "rows").open("r+b") as file:
        file.seek(8)
        file.write(b"\xff")
    with pytest.raises(DamagedExtent, match="checksum"):
        sums_from(tmp_path / "rows", plan, indptr, indices, torch.zeros(NODES, 2))
