"""The bench of Sylvie in its smallest form: every contestant trains, says its bytes, and rows are of what ran."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from espalier.graph.data import synthetic
from espalier.sparse.partition import clusters
from many_ranks import ranks


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    import sylvie
    import sylvie_rank

    monkeypatch.setattr(sylvie_rank, "stock", lambda: dist.group.WORLD)
    monkeypatch.setattr(sylvie_rank, "late", lambda begun, limit: False)
    return sylvie, sylvie_rank


def test_every_contestant_trains_and_says_its_bytes(bench, tmp_path):
    sylvie, sylvie_rank = bench
    made = synthetic.parse("planted:nodes=200,degree=6,classes=3,features=8,homophily=0.6")
    synthetic.write(made, tmp_path / "graph")
    graph = synthetic.opened(tmp_path / "graph")
    np.save(tmp_path / "parts.npy", clusters(graph.indptr, graph.indices, 2))
    case = sylvie.CASES["1 Gbit/s"]
    paths = str(tmp_path / "graph"), str(tmp_path / "parts.npy")
    task = sylvie_rank.Task(case.contestants, 1, 1, *paths, 200, degree=6, width=64, depth=2)
    found, other = ranks(2, lambda channel: sylvie_rank.measure(task, channel))
    assert found.sent == other.sent
    assert found.seconds.keys() == set(case.contestants)
    whole, bits = found.sent[sylvie.FP32][0], found.sent["sylvie 1 bit"][0]
    assert whole > 10 * bits > 0
    assert found.sent[sylvie.BATCHES][0] == found.sent[sylvie.DRAWN_INT8][0] == 0
    assert found.sent[sylvie.BATCHES][1] > 3 * found.sent[sylvie.DRAWN_INT8][1] > 0
    rows = [*sylvie.rows_of("case", found), *sylvie.bytes_of("case", found)]
    assert {row.peer for row in rows} >= {*case.contestants} - {sylvie.ours(found)}
