"""Condensed edges order a disk layout and the halo messages: each outside source once, in one read of a part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.graph.data.condensed_file import CondensedLayout, CondensedRows, outside_sources, write_at
from espalier.graph.data.graph import Graph
from espalier.graph.parts.halo import boundary
from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.sparse.condense import condense
from espalier.store.cost import PAGE

NODES = 600


def sampler_of(seed: int) -> Sampler:
    random = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(random.integers(0, 12, NODES))])
    indices = random.integers(0, NODES, int(indptr[-1])).astype(np.int32)
    return Sampler(Graph(indptr, indices, np.zeros((NODES, 1), np.float32)), Style(False, "sum"))


def laid_out(sampler: Sampler, starts: np.ndarray, path: Path, row_bytes: int) -> CondensedLayout:
    ranges = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    CondensedLayout.write(path, starts, (outside_sources(sampler, *one) for one in ranges))
    return CondensedLayout.read(path, row_bytes)


@settings(deadline=None, max_examples=20)
@given(
    st.sets(st.integers(1, NODES - 1), max_size=12), st.sets(st.integers(1, NODES - 1), max_size=12),
    st.sampled_from([1, 3, 16, 1030]), st.integers(0, 3),
)  # fmt: skip
def test_rows_written_as_they_are_produced_are_there_for_every_edge(
    tmp_path_factory: pytest.TempPathFactory, cuts: set[int], produced: set[int], columns: int, seed: int
) -> None:
    """Whatever the ranges of those who write; regions are those of Condense-Edge; each range is read in sequence."""
    folder, sampler = tmp_path_factory.mktemp("condensed"), sampler_of(seed)
    starts, rows = np.array([0, *sorted(cuts), NODES]), torch.randn(NODES, columns)
    layout = laid_out(sampler, starts, folder / "layout", 4 * columns)
    labels = np.repeat(np.arange(len(starts) - 1), np.diff(starts)).astype(np.int32)
    plan = condense(sampler.indptr, sampler.indices, labels)
    assert np.array_equal(layout.sources, plan.regions)
    assert np.array_equal(layout.bounds, plan.bounds)
    each = np.diff(starts) + np.diff(plan.bounds)
    assert layout.offsets[-1] == (-(-each * 4 * columns // PAGE) * PAGE).sum()
    written = 0
    with (folder / "rows").open("wb") as file:
        file.truncate(int(layout.offsets[-1]))
        for first, last in zip([0, *sorted(produced)], [*sorted(produced), NODES], strict=True):
            for offset, chosen in layout.pieces(first, last - first):
                write_at(file.fileno(), rows[first:last][torch.from_numpy(np.array(chosen))], offset)
                written += len(chosen)
    assert written == NODES + len(plan.regions), "each row once for its range, and once for every other that needs it"
    read: list[int] = []
    with CondensedRows(folder / "rows", layout, torch.float32) as found:
        plain = found.queue.read_runs
        found.queue.read_runs = lambda file, runs, *rest: (
            read.append(int(runs[:, 1].sum())),
            plain(file, runs, *rest),
        )[1]
        for at, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            ids = torch.from_numpy(np.concatenate([np.arange(start, stop), plan.region(at)[::-1]]))
            out = torch.empty(len(ids), columns)
            found.read(ids, out)
            assert torch.equal(out, rows[ids])
        assert sum(read) == layout.offsets[-1]


def test_rows_of_another_range_are_not_found(tmp_path: Path) -> None:
    sampler = sampler_of(0)
    layout = laid_out(sampler, np.array([0, 200, NODES]), tmp_path / "layout", 8)
    strange = np.setdiff1d(np.arange(200, NODES), layout.outside(0))
    with pytest.raises(AssertionError, match="no edge from there"):
        layout.places(0, np.array([0, int(strange[0])]))


def test_a_region_is_what_a_halo_message_brings() -> None:
    sampler, parts = sampler_of(1), 7
    labels = np.random.default_rng(0).integers(0, parts, NODES).astype(np.int32)
    plan = condense(sampler.indptr, sampler.indices, labels)
    cut = boundary(sampler.indptr, sampler.indices, plan.labels, parts)
    for part in range(parts):
        assert np.array_equal(np.sort(cut.node[cut.receiver == part]), plan.region(part))
    key = (cut.receiver * parts + cut.owner) * NODES + cut.node
    assert bool((np.diff(key) > 0).all()), "by receiver, owner and node, each once"


def test_a_region_is_the_sources_of_edges_from_other_parts() -> None:
    """Edge by edge."""
    sampler, parts = sampler_of(2), 5
    labels = np.random.default_rng(1).integers(0, parts, NODES).astype(np.int32)
    regions: list[set[int]] = [set() for _ in range(parts)]
    for target in range(NODES):
        sources = sampler.indices[sampler.indptr[target] : sampler.indptr[target + 1]].tolist()
        regions[labels[target]].update(source for source in sources if labels[source] != labels[target])
    plan = condense(sampler.indptr, sampler.indices, labels)
    assert [plan.region(part).tolist() for part in range(parts)] == [sorted(region) for region in regions]
