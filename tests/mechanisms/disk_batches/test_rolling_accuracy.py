"""Accuracy on held-out nodes does not depend on the share of batches that is drawn anew for each epoch."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from espalier.graph.data import synthetic

BENCH = Path(__file__).parents[3] / "bench"


@pytest.mark.slow
def test_shares_0_a_tenth_and_1_reach_the_same_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from diskgnn_accuracy import GRAPH, accuracy

    graph = synthetic.load(GRAPH, tmp_path)
    means = [statistics.mean(accuracy(graph, share, seed) for seed in range(5)) for share in (0.0, 0.1, 1.0)]
    assert min(means) > 80
    assert max(means) - min(means) < 0.3
