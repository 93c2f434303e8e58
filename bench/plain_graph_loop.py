"""The loop that a user would write instead: sampling in NumPy, features by `np.memmap`, GraphSAGE in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memory_cgroup


class PlainLoop:
    def __init__(self, folder: Path, fanouts: Sequence[int], sizes: Sequence[int]) -> None:
        self.indptr, self.indices, labels = (
            np.load(folder / f"{name}.npy") for name in ("indptr", "indices", "labels")
        )
        self.features = memory_cgroup.at_random(np.load(folder / "features.npy", mmap_mode="r"))
        self.labels, self.fanouts = torch.from_numpy(labels), fanouts
        pairs = list(pairwise(sizes))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.mean = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)
        self.optimizer = torch.optim.Adam([*self.own.parameters(), *self.mean.parameters()], 0.001)

    def sample(self, targets: np.ndarray, fanout: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Sources, targets first; each edge's target and source, by position. Drawn with replacement."""
        first, degree = self.indptr[targets], self.indptr[targets + 1] - self.indptr[targets]
        some = np.flatnonzero(degree)
        drawn = first[some, None] + (random.random((len(some), fanout)) * degree[some, None]).astype(np.int64)
        heard = self.indices[drawn].reshape(-1)
        nodes, position = np.unique(np.concatenate([targets, heard]), return_inverse=True)
        order = np.full(len(nodes), -1, np.int64)
        order[position[: len(targets)]] = np.arange(len(targets))
        rest = np.flatnonzero(order < 0)
        order[rest] = len(targets) + np.arange(len(rest))
        sources = np.concatenate([targets, nodes[rest]])
        return sources, np.repeat(some, fanout), order[position[len(targets) :]]

    def step(self, seeds: Tensor, number: int) -> float:
        random, nodes, layers = np.random.default_rng(number), seeds.numpy(), []
        for fanout in self.fanouts:
            count = len(nodes)
            nodes, at, source = self.sample(nodes, fanout, random)
            layers.append((count, torch.from_numpy(at), torch.from_numpy(source)))
        x = torch.from_numpy(self.features[nodes])
        for depth, (count, at, source) in enumerate(reversed(layers)):
            sums = x.new_zeros(count, x.shape[1]).index_add(0, at, x[source])
            counts = torch.bincount(at, minlength=count).clamp(min=1)
            x = self.own[depth](x[:count]) + self.mean[depth](sums / counts[:, None])
            x = x if depth == len(layers) - 1 else F.relu(x)
        loss = F.cross_entropy(x, self.labels[seeds])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
