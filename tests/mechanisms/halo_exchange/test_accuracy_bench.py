"""The peers of bench/sylvie.py's rows at convergence: what crosses is what their papers say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from espalier.mechanisms.halo_exchange.quantized_exchange import Every
from espalier.sparse import CSR

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return importlib.import_module("sylvie_accuracy")


def parts_of(bench, nodes=60):
    """A drawn graph in two parts."""
    random = torch.Generator().manual_seed(0)
    targets, sources = (torch.rand(nodes, nodes, generator=random) < 0.1).nonzero(as_tuple=True)
    owner = torch.arange(nodes) % 2
    crosses = owner[targets] != owner[sources]
    copied, copy = (owner[targets] * nodes + sources)[crosses].unique(return_inverse=True)
    share = 1 / torch.bincount(targets, minlength=nodes).clamp(min=1)[targets]
    inside = CSR.from_edges(torch.stack([sources, targets])[:, ~crosses], (nodes, nodes), share[~crosses])
    between = CSR.from_edges(torch.stack([copy, targets[crosses]]), (nodes, len(copied)), share[crosses])
    features = torch.randn(nodes, 8, generator=random)
    split = (torch.arange(30), torch.arange(30, 45), torch.arange(45, 60))
    return bench.Parts(inside, between, copied % nodes, features, torch.arange(nodes) % 3, split)


def test_rows_that_cross_fresh_and_exact_are_those_of_one_rank(bench):
    parts = parts_of(bench)
    network = bench.Network(parts, 3)
    gradients = []
    for crossing in (None, bench.Crossing(Every(32, 1))):
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(parts, crossing), parts.labels).backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    for whole, crossed in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, crossed)


def test_late_rows_and_gradients_are_those_of_the_epoch_before(bench):
    crossing = bench.Crossing(Every(32, 3))
    read = []
    for epoch in range(6):
        read.append([float(crossing.read(torch.tensor([[float(epoch)]]), 1, backward)) for backward in (False, True)])
        crossing.heard(1.0)
    assert read == [[0, 0], [0, 0], [2, 2], [2, 2], [3, 3], [5, 5]], "every third is fresh"


def test_smoothing_is_the_average_of_the_paper(bench):
    """h <- 0.95 h + 0.05 m, of messages that are an epoch late."""
    crossing = bench.CONTESTANTS["PipeGCN, smoothed"]()
    expected = 1.0
    for epoch, message in enumerate((1.0, 2.0, 4.0, 8.0)):
        late = (1.0, 1.0, 2.0, 4.0)[epoch]
        expected = 0.95 * expected + 0.05 * late
        assert float(crossing.read(torch.tensor([[message]]), 1, False)) == pytest.approx(expected)
        crossing.heard(1.0)
    assert expected != late


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_rounding_has_the_right_mean_and_no_error_above_half_a_step(bench, bits):
    torch.manual_seed(0)
    row = torch.randn(1, 16)
    step = (row.max() - row.min()) / (2**bits - 1)
    errors = bench.rounded(row.expand(4000, 16), bits) - row
    assert errors.abs().max() <= 0.5001 * step
    assert errors.mean(0).abs().max() < 5 * step / (12 * 4000) ** 0.5


def test_every_contestant_learns(bench):
    parts = parts_of(bench)
    for name in bench.CONTESTANTS:
        learned = bench.learn(parts, name, 0, 10)
        assert learned.epochs == 10
        assert 0 < learned.best_at <= 10
    rows = bench.compared("g", "1 bit", [learned._replace(accuracy=50.0)] * 2, [learned._replace(accuracy=51.0)] * 2)
    assert "-1.00 points (standard error 0.00)" in rows.spread
