"""Small packed sets for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tests.graph.conftest import made

from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.mechanisms.disk_batches import manifest
from espalier.mechanisms.disk_batches.batch_pool import Draws, epoch_seeds
from espalier.mechanisms.disk_batches.features import Features, FeatureTable, open_features
from espalier.mechanisms.disk_batches.pack import PackedSet, PackRequest


def read_whole(packed: PackedSet, batch: int, hot: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [input nodes, width]: the features of a batch, of whole extents; `hot`: the rows in memory."""
    hot_at, slots, shared, places, cold = (torch.from_numpy(part).long() for part in packed.split(batch))
    data = torch.empty(len(hot_at) + len(shared) + len(cold), packed.row.row_bytes, dtype=torch.uint8)
    table = packed.load_hot() if hot is None else hot
    data[hot_at] = table[slots]
    if len(shared):
        segment = packed.rows.read(f"segment/{packed.segment_of(batch)}")
        data[shared] = segment.view(-1, packed.row.row_bytes)[places]
    data[cold] = packed.rows.read(f"cold/{batch}").view(-1, packed.row.row_bytes)
    return packed.row.decode(data)


def on_disk(rows: np.ndarray, folder: Path) -> Features:
    """`rows` as a `.npy` file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "features.npy", rows)
    return open_features(folder / "features.npy", nodes=len(rows))


def request(folder: Path, **known) -> PackRequest:
    """What packs a random graph of 400 nodes whose rows have `width` values into `folder`."""
    graph = made(known.pop("nodes", 400), known.pop("edges", 1600), seed=7)
    width, seed = known.pop("width", 24), known.pop("seed", 0)
    rows = known.pop("values", None)
    if rows is None:
        rows = np.random.default_rng(1).normal(size=(graph.nodes, width)).astype(np.float32)
    features = FeatureTable(torch.from_numpy(rows)) if known.pop("table", False) else on_disk(rows, folder.parent)
    seeds = known.pop("seeds", None)
    seeds = epoch_seeds(graph.parts.train, known.pop("batch", 32), seed) if seeds is None else seeds
    draws = Draws(seeds, range(len(seeds)), known.pop("fanouts", (4, 3)), seed)
    row = features.row_bytes
    values = {
        "folders": (folder,),
        "sampler": Sampler(graph, known.pop("style", Style(loops=False, scale="mean"))),
        "graph": manifest.graph_hash(graph),
        "features": features,
        "draws": draws,
        "memory": 40 * row,
    }
    return PackRequest(**values | known)


def plain(features: Features, nodes: np.ndarray) -> torch.Tensor:
    """float32 rows of `nodes`, one by one."""
    out = torch.empty(len(nodes), *features.shape, dtype=features.dtype)
    features.read(torch.from_numpy(nodes), out)
    return out.float()
