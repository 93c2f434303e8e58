"""DGL's side of bench/graph.py, run by the Python of bench/peers/dgl.sh: a line in, one measurement out.

    python dgl_graph.py FILE.npz THREADS sample
    python dgl_graph.py FILE.npz THREADS KIND WIDTH DROPOUT

`sample` prints edges drawn per second; a kind of layer prints the seconds of one epoch: forward, backward, Adam. They
are CPU seconds of one thread, wall seconds of several.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def sampling(graph: Any, found: Any) -> Callable[[], float]:
    drawn = dgl.dataloading.NeighborSampler([10, 10])
    seeds = torch.from_numpy(found["seeds"])

    def run() -> float:
        begun, edges = time.perf_counter(), 0
        for batch in seeds:
            _, _, blocks = drawn.sample(graph, batch)
            edges += sum(block.num_edges() for block in blocks)
        return edges / (time.perf_counter() - begun)

    return run


class Two(nn.Module):
    """DGL's own layers, two of them, with the sizes, the nonlinearity and the dropout of ours."""

    def __init__(self, kind: str, inputs: int, width: int, outputs: int, dropout: float) -> None:
        from dgl.nn import GATConv, GraphConv, SAGEConv

        super().__init__()
        self.kind, self.dropout = kind, dropout
        if kind == "gat":
            self.first = GATConv(inputs, width // 8, 8, attn_drop=dropout)
            self.second = GATConv(width, outputs, 1, attn_drop=dropout)
        elif kind == "gcn":
            self.first, self.second = GraphConv(inputs, width), GraphConv(width, outputs)
        else:
            self.first, self.second = SAGEConv(inputs, width, "mean"), SAGEConv(width, outputs, "mean")

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        if self.kind != "sage":
            x = F.dropout(x, self.dropout, self.training)
        x = self.first(graph, x).flatten(1)
        x = F.elu(x) if self.kind == "gat" else F.relu(x)
        return self.second(graph, F.dropout(x, self.dropout, self.training)).flatten(1)


def epochs(graph: Any, found: Any, kind: str, width: int, dropout: float) -> Callable[[], float]:
    graph = graph if kind == "sage" else dgl.add_self_loop(dgl.remove_self_loop(graph))
    graph = graph.formats(["csc", "csr", "coo"])
    graph.create_formats_()
    x, labels, train = (torch.from_numpy(found[name]) for name in ("features", "labels", "train"))
    model = Two(kind, x.shape[1], width, int(labels.max()) + 1, dropout).train()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def run() -> float:
        begun = clock()
        optimizer.zero_grad()
        F.cross_entropy(model(graph, x)[train], labels[train]).backward()
        optimizer.step()
        return clock() - begun

    return run


def main(file: str, threads: str, kind: str, *options: str) -> None:
    torch.set_num_threads(int(threads))
    found = np.load(file)
    graph = dgl.graph(("csc", (found["indptr"], found["indices"], [])))
    run = sampling(graph, found) if kind == "sample" else epochs(graph, found, kind, int(options[0]), float(options[1]))
    for _ in sys.stdin:
        print(run(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
