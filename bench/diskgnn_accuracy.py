"""Accuracy of a network that trains on a rolling pool, by the share of its batches drawn anew for each epoch."""

from __future__ import annotations

import numpy as np
import torch

from espalier import recipe as config
from espalier.graph.data.graph import Graph
from espalier.graph.networks import compiled_aggregate, gnn
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.graph.sampling.subgraphs import View, infer
from espalier.kernels.cross_entropy import cross_entropy
from espalier.mechanisms.disk_batches.batch_pool import epoch_seeds
from espalier.mechanisms.disk_batches.rolling_pool import ResampleSchedule

GRAPH = "planted:nodes=60000,degree=12,features=16,classes=8,signal=2,homophily=0.5,train=0.15"
EPOCHS, BATCH, FANOUTS = 8, 256, (5, 5)
STYLE = Style(False, "mean")


def accuracy(graph: Graph, share: float, seed: int) -> float:
    """Of all nodes held out, after training on the batches that a rolling pool holds in each epoch."""
    assert graph.parts is not None
    torch.manual_seed(seed)
    options = config.Sage(depth=2, width=32, activation="relu", dropout=0.2)
    model = compiled_aggregate.equip(gnn.Gnn(options, graph.features.shape[1], graph.outputs))
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    view, labels = View(graph, STYLE, 2), torch.from_numpy(np.array(graph.labels))
    seeds = epoch_seeds(graph.parts.train, BATCH, seed)
    schedule = ResampleSchedule(len(seeds), share, seed)
    for epoch in range(EPOCHS):
        seeds = schedule.dealt(seeds, epoch)
        for batch in np.random.default_rng([seed, epoch]).permutation(len(seeds)):
            step = int(schedule.sources(epoch)[batch]) * len(seeds) + int(batch)
            features, drawn = view.around(seeds[batch], FANOUTS, seed, step)
            optimizer.zero_grad()
            (cross_entropy(model(features, drawn.blocks), labels[seeds[batch]]) / len(seeds[batch])).backward()
            optimizer.step()
    held = np.concatenate([graph.parts.validation, graph.parts.test])
    return 100 * float((infer(model.eval(), view)[held].argmax(1) == labels[held]).double().mean())
