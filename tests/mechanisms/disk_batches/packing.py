"""Packed sets of small graphs, for the tests of this folder."""

from __future__ import annotations

import numpy as np
import torch

from espalier.graph.data.graph import Graph
from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.mechanisms.disk_batches import manifest
from espalier.mechanisms.disk_batches.batch_pool import Draws, epoch_seeds
from espalier.mechanisms.disk_batches.features import FeatureTable, open_features
from espalier.mechanisms.disk_batches.pack import PackedSet, PackRequest, pack


def graph_of(nodes=300, width=5, edges=1200, seed=0) -> Graph:
    random = np.random.default_rng(seed)
    features = random.normal(size=(nodes, width)).astype(np.float32)
    return Graph.from_edges(
        *random.integers(0, nodes, (2, edges)), features=features, labels=random.integers(0, 3, nodes), undirected=True
    )


def request_of(graph, folder, *, batch=16, fanouts=(3, 2), memory=0, disk=None, rows="fp32", file=None):
    """A request for one epoch over all nodes."""
    seeds = epoch_seeds(np.arange(graph.nodes), batch, 1)
    draws = Draws(seeds, list(range(len(seeds))), tuple(fanouts), 1)
    features = FeatureTable(torch.from_numpy(np.asarray(graph.features))) if file is None else open_features(file)
    folders = tuple(folder) if isinstance(folder, list | tuple) else (folder,)
    return PackRequest(
        folders, Sampler(graph, Style(False, "mean")), manifest.graph_hash(graph), features, draws, memory, disk, rows
    )


def packed(graph, folder, **options) -> PackedSet:
    return pack(request_of(graph, folder, **options))
