"""DGL GraphBolt's side of bench/diskgnn.py, run by the Python of bench/peers/dgl.sh: a line with a number of batches
in, one measurement of the first so many out.

    python dgl_disk.py REQUEST.json gather | epoch

Features are a memory-mapped file, as GraphBolt's on-disk data sets have them, in a memory cgroup. `gather` reads the
features of the given batches; `epoch` samples, reads and trains three SAGE layers. Prints seconds.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl.graphbolt as gb
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import memory_cgroup

warnings.filterwarnings("ignore")


def gather(request: dict[str, Any], feature: Any) -> Callable[[range], float]:
    folder = Path(request["folder"])
    nodes, starts = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("nodes", "starts"))
    batches = [nodes[start:stop] for start, stop in zip(starts[:-1], starts[1:])]  # noqa: B905, RUF007 - Python 3.9

    def run(which: range) -> float:
        begun = time.perf_counter()
        for batch in batches[which.start : which.stop]:
            feature.read(batch)
        return time.perf_counter() - begun

    return run


class Sage(nn.Module):
    """DGL's own layers, as many and as wide as ours."""

    def __init__(self, sizes: list[int]) -> None:
        from dgl.nn import SAGEConv

        super().__init__()
        self.layers = nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(sizes[:-1], sizes[1:]))  # noqa: B905, RUF007

    def forward(self, blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for layer, block in zip(self.layers[:-1], blocks[:-1]):  # noqa: B905
            x = F.relu(layer(block, x))
        return self.layers[-1](blocks[-1], x)


def epoch(request: dict[str, Any], feature: Any) -> Callable[[range], float]:
    graph_folder = Path(request["graph"])
    indptr, indices = (torch.from_numpy(np.load(graph_folder / f"{name}.npy")) for name in ("indptr", "indices"))
    graph = gb.fused_csc_sampling_graph(indptr, indices.long())
    labels = torch.from_numpy(np.load(graph_folder / "labels.npy"))
    seeds = torch.from_numpy(np.load(Path(request["folder"]) / "seeds.npy"))
    store = gb.BasicFeatureStore({("node", None, "feat"): feature})
    model = Sage(request["sizes"])
    optimizer = torch.optim.Adam(model.parameters(), 0.001)

    def run(which: range) -> float:
        begun = time.perf_counter()
        some = seeds[which.start * request["batch"] : which.stop * request["batch"]]
        items = gb.ItemSet((some, labels[some]), names=("seed_nodes", "labels"))
        pipe = gb.ItemSampler(items, batch_size=request["batch"], shuffle=False)
        pipe = pipe.sample_neighbor(graph, request["fanouts"])
        pipe = pipe.fetch_feature(store, node_feature_keys=["feat"])
        for batch in gb.DataLoader(pipe, num_workers=0):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.blocks, batch.node_features["feat"]), batch.labels)
            loss.backward()
            optimizer.step()
        return time.perf_counter() - begun

    return run


def main(path: str, what: str) -> None:
    request = json.loads(Path(path).read_text())
    torch.set_num_threads(request["threads"])
    features = np.load(Path(request["graph"]) / "features.npy", mmap_mode="r")
    feature = gb.TorchBasedFeature(torch.from_numpy(memory_cgroup.at_random(features)))
    run = {"gather": gather, "epoch": epoch}[what](request, feature)
    memory_cgroup.join(request["limit" if what == "gather" else "epoch_limit"])
    for line in sys.stdin:
        print(run(range(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
