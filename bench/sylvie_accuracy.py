"""Accuracy to convergence of full-graph training over four parts, by what crosses between them and when.

One process computes what four ranks would: edges inside a part read rows as they are; edges between parts read copies
that cross as each contestant sends them, one for each part that reads a node, and gradients of copies go back the same
way. Bits are rounded at random per row, with the random number taken off again, as in `kernels.quantize_rows` (of rows
of fewer than 64 values some share a scale there, none here). Features are exact: they cross once.

PipeGCN (arXiv 2203.10428): every row and gradient is one epoch late; with its smoothing (PipeGCN-GF) what is read is
the average h <- g h + (1 - g) m of the messages m, g = 0.95. Its first epoch reads zeros there, fresh rows here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import real_graphs
from espalier.graph.data import array_file
from espalier.mechanisms.halo_exchange.quantized_exchange import Adaptive, Every
from espalier.sparse import CSR, matmul
from espalier.sparse.partition import clusters
from table import Row

PARTS = 4
SMOOTHING = 0.95
DIRECTIONS = 64
"""Of the features, those of the largest singular values: a quarter of the time of an epoch, the same for all."""
WIDTH, DEPTH, RATE = 32, 3, 0.01
EVERY = 5
"""Epochs between looks at the accuracy."""
PATIENCE, MOST = 60, 300
"""Epochs without a better validation accuracy after which a contestant has converged; epochs at most."""
CONTESTANTS: dict[str, Callable[[], Any]] = {
    "fp32 synchronous": lambda: Crossing(Every(32, 1)),
    "1 bit": lambda: Crossing(Every(1, 1)),
    "1 bit, late": lambda: Crossing(Every(1, 5)),
    "1 bit, adapt": lambda: Crossing(Adaptive(1, 5)),
    "PipeGCN": lambda: Crossing(Every(32, 0)),
    "PipeGCN, smoothed": lambda: Crossing(Every(32, 0), SMOOTHING),
}


class Parts(NamedTuple):
    """A graph in parts: mean over the neighbours inside a part [nodes, nodes], and over copies [nodes, copies];
    `sources` [copies], whose row each copy is; features, labels, and the nodes to train, validate and test on."""

    inside: CSR
    between: CSR
    sources: Tensor
    features: Tensor
    labels: Tensor
    split: tuple[Tensor, Tensor, Tensor]


class Crossing:
    """What crosses at each layer and direction. Has state: the epoch, the messages of the one before, averages."""

    def __init__(self, policy: Every | Adaptive, smoothing: float = 0.0) -> None:
        self.policy, self.smoothing = policy, smoothing
        self.epoch = 0
        self.messages: dict[tuple[int, bool], Tensor] = {}
        self.averages: dict[tuple[int, bool], Tensor] = {}

    def read(self, rows: Tensor, layer: int, backward: bool) -> Tensor:
        """What arrives in place of `rows` [copies, width]."""
        synchronous, bits = self.policy.next(self.epoch)
        message = rounded(rows, bits)
        key = layer, backward
        before = self.messages.get(key)
        self.messages[key] = message
        arrived = message if synchronous or before is None else before
        if not self.smoothing:
            return arrived
        average = self.averages.get(key, arrived)
        self.averages[key] = self.smoothing * average + (1 - self.smoothing) * arrived
        return self.averages[key]

    def heard(self, loss: float) -> None:
        """At the end of an epoch."""
        self.epoch += 1
        if isinstance(self.policy, Adaptive):
            self.policy = self.policy.heard([loss]).turned({})


def rounded(rows: Tensor, bits: int) -> Tensor:
    """`rows` in codes of `bits` between the least and the largest of each, rounded at random; 32: as they are."""
    if bits == 32:
        return rows
    low = rows.amin(1, keepdim=True)
    step = (rows.amax(1, keepdim=True) - low) / (2**bits - 1)
    drawn = torch.rand_like(rows)
    codes = ((rows - low) / step.clamp(min=1e-30) + drawn - 0.5).round()
    return low + step * (codes - drawn + 0.5)


class Copies(torch.autograd.Function):
    """Rows of copies, as they cross; their gradients cross too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, crossing: Crossing, layer: int) -> Tensor:
        ctx.crossing, ctx.layer = crossing, layer
        return crossing.read(rows, layer, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.crossing.read(gradients[0], ctx.layer, True), None, None


class Network(nn.Module):
    """GraphSAGE with a norm behind each hidden layer, over parts."""

    def __init__(self, parts: Parts, classes: int) -> None:
        super().__init__()
        sizes = [parts.features.shape[1], *[WIDTH] * (DEPTH - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(2 * a, b) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in sizes[1:-1])
        self.first = torch.cat([parts.features, mean(parts, parts.features, parts.features[parts.sources])], 1)

    def forward(self, parts: Parts, crossing: Crossing | None) -> Tensor:
        """[nodes, classes]; without `crossing` all rows are fresh and exact."""
        x = self.layers[0](self.first)
        for at, layer in enumerate(self.layers[1:], 1):
            x = self.norms[at - 1](x).relu()
            copies = x[parts.sources]
            copies = copies if crossing is None else Copies.apply(copies, crossing, at)
            x = layer(torch.cat([x, mean(parts, x, copies)], 1))
        return x


def mean(parts: Parts, rows: Tensor, copies: Tensor) -> Tensor:
    """Over the neighbours of each node."""
    return matmul(parts.inside, rows) + matmul(parts.between, copies)


def opened(name: str, most: int = 0) -> Parts:
    """The graph `name` in four parts; `most`: its first nodes alone."""
    graph = array_file.load(Path(real_graphs.path_of(name)), undirected=True)
    targets = np.repeat(np.arange(graph.nodes), np.diff(graph.indptr))
    sources = np.asarray(graph.indices, np.int64)
    nodes = most or graph.nodes
    stays = (targets < nodes) & (sources < nodes)
    targets, sources = targets[stays], sources[stays]
    indptr = np.concatenate([[0], np.bincount(targets, minlength=nodes).cumsum()])
    owner = np.asarray(clusters(indptr, sources, PARTS), np.int64)
    share = torch.from_numpy((1 / np.maximum(1, np.diff(indptr)))[targets]).float()
    crosses = owner[targets] != owner[sources]
    copied, copy = np.unique(owner[targets[crosses]] * nodes + sources[crosses], return_inverse=True)
    ends = lambda a, b: torch.from_numpy(np.stack([a, b]))  # noqa: E731
    inside = CSR.from_edges(ends(sources[~crosses], targets[~crosses]), (nodes, nodes), share[~crosses])
    between = CSR.from_edges(ends(copy, targets[crosses]), (nodes, len(copied)), share[crosses])
    features = torch.from_numpy(np.array(graph.features[:nodes]))
    torch.manual_seed(0)
    left, values, _ = torch.svd_lowrank(features, DIRECTIONS, niter=2)
    features = left * values
    features /= features.std()
    labels = torch.from_numpy(np.asarray(graph.labels, np.int64)[:nodes])
    known = np.random.default_rng(0).permutation(np.flatnonzero(labels.numpy() >= 0))
    cuts = int(0.6 * len(known)), int(0.8 * len(known))
    split = tuple(torch.from_numpy(np.sort(part)) for part in np.split(known, cuts))
    between_parts = f"{crosses.mean():.1%} between parts, {len(copied):,} copies"
    print(f"{name}: {nodes:,} nodes, {len(sources):,} edges, {between_parts}", flush=True)
    return Parts(inside, between, torch.from_numpy(copied % nodes), features, labels, split)  # type: ignore[arg-type]


class Learned(NamedTuple):
    """Test accuracy where validation was best, in percent, the epochs until then, and all epochs."""

    accuracy: float
    best_at: int
    epochs: int


def learn(parts: Parts, name: str, seed: int, most: int) -> Learned:
    """Trains a contestant until it has converged, `most` epochs at most."""
    torch.manual_seed(seed)
    network = Network(parts, int(parts.labels.max()) + 1)
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    crossing = CONTESTANTS[name]()
    train, validation, test = parts.split
    best = Learned(0.0, 0, 0)
    highest = -1.0
    for epoch in range(1, most + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(parts, crossing)[train], parts.labels[train])
        loss.backward()
        optimizer.step()
        crossing.heard(float(loss.detach()))
        if epoch % EVERY == 0:
            with torch.no_grad():
                right = network(parts, None).argmax(1) == parts.labels
            figures = [100 * float(right[part].double().mean()) for part in (validation, test)]
            if figures[0] > highest:
                highest = figures[0]
                best = Learned(figures[1], epoch, epoch)
        if epoch - best.best_at >= PATIENCE:
            break
    return best._replace(epochs=epoch)


def rows(graph: str, seeds: int, most: int) -> list[Row]:
    """Test accuracy of each contestant beside fresh rows in fp32, over the same seeds."""
    torch.set_num_threads(1)
    parts = opened(graph)
    learned = {name: [learn(parts, name, seed, most) for seed in range(seeds)] for name in CONTESTANTS}
    fresh, *others = CONTESTANTS
    return [compared(graph, name, learned[name], learned[fresh]) for name in others]


def compared(graph: str, name: str, ours: list[Learned], fresh: list[Learned]) -> Row:
    """The means, and the points between them with their standard error over the seeds."""
    points = [mine.accuracy - theirs.accuracy for mine, theirs in zip(ours, fresh, strict=True)]
    error = f" (standard error {np.std(points, ddof=1) / len(points) ** 0.5:.2f})" if len(points) > 1 else ""
    best = [np.mean([each.best_at for each in some]) for some in (ours, fresh)]
    means = [float(np.mean([each.accuracy for each in some])) for some in (fresh, ours)]
    spread = (
        f"{np.mean(points):+.2f} points{error}, best after {best[0]:.0f} and {best[1]:.0f} epochs (n={len(points)})"
    )
    case = f"{graph}, {PARTS} parts: accuracy at convergence, {name}"
    return Row(case, "fp32 synchronous", *means, means[1] / means[0], "%", spread)
