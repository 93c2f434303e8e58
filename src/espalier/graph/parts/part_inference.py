"""What a network says of a graph that is cut into parts, in one process: layer by layer, one part after the other.

No more than the edges of one part are in memory, beside the rows of all nodes. Rows cross as in training
(`halo_parallel`), partial sums too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data.graph import Graph
from espalier.graph.networks.base import Forms, Kept, MessageBlock, Rows, dense, joined, placement
from espalier.graph.networks.gnn import Gnn
from espalier.graph.parts import halo, partition_folder
from espalier.graph.parts.partition_folder import Part
from espalier.parallel.workload import to_device
from espalier.recipe.offsets import offsets_of


@torch.no_grad()
def infer_parts(model: Gnn, folder: Path, ranks: int, layers: int | None = None) -> Tensor:
    """[nodes, outputs] for all nodes of the graph whose parts are in `folder`; with `layers`, what the first ones give.
    Raises UserError as `partition_folder.read`."""
    placed = placement(model)
    rows: list[Rows] = []
    leaving: list[list[Rows]] = []
    owned: list[Tensor] = []
    for rank in range(ranks):
        part = partition_folder.read_alone(folder, rank)
        owned.append(part.halo.owned)
        rows.append(part.features.to(**placed))
        leaving.append(_leaving(part, rows[-1]))
    for at in range(len(model.layers) if layers is None else layers):
        before = leaving
        leaving = []
        for rank in range(ranks):
            part = partition_folder.read_alone(folder, rank, known=True)
            inputs = joined([rows[rank], *(peer_rows[rank] for peer_rows in before)])
            rows[rank] = model.step(at, to_device(part.block, placed["device"], placed["dtype"]), inputs)
            leaving.append(_leaving(part, rows[rank]))
    outputs = [dense(rank_rows) for rank_rows in rows]
    made = outputs[0].new_empty(sum(map(len, owned)), outputs[0].shape[1])
    made[torch.cat(owned)] = torch.cat(outputs)
    return made


def gathered(folder: Path, ranks: int) -> tuple[Tensor, MessageBlock]:
    """Features of all nodes, and all edges: what a network whose layers are not ours is called with. Raises UserError
    as `partition_folder.read`."""
    parts = [partition_folder.read_alone(folder, rank) for rank in range(ranks)]
    owned = torch.cat([part.halo.owned for part in parts])
    counts = torch.cat([part.block.indptr.diff() for part in parts])
    starts = torch.cat([part.block.indptr[:-1] for part in parts])
    edges = [part.block.edges for part in parts]
    begins = torch.tensor([0, *edges[:-1]]).cumsum(0)
    before = begins.repeat_interleave(torch.tensor([len(part.halo.owned) for part in parts]))
    order = torch.argsort(owned)
    lengths = counts[order]
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    place = torch.repeat_interleave((starts + before)[order] - indptr[:-1], lengths) + torch.arange(sum(edges))
    sources = torch.cat([part.halo.nodes[part.block.indices.long()] for part in parts])

    def together(name: str) -> Tensor | None:
        tensors = [getattr(part.block, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)[place]

    made = MessageBlock(indptr, sources[place].int(), len(owned), Forms())
    made = made._replace(weights=together("weights"), features=together("features"))
    return torch.cat([part.features for part in parts])[order], made


def whole_graph(outlined: Graph) -> Graph:
    """The graph whose parts `outlined.partition` names, with its edges and features in memory. Raises UserError as
    `partition_folder.read`."""
    assert outlined.partition is not None
    features, block = gathered(outlined.partition.folder, outlined.partition.ranks)
    targets = block.rows().numpy()
    sources = block.indices.numpy()
    order = np.lexsort((sources, targets))
    order = order[targets[order] != sources[order]]  # loops are those of the style
    counts = np.bincount(targets[order], minlength=outlined.nodes)
    return replace(
        outlined,
        indptr=offsets_of(counts),
        indices=sources[order],
        features=features.numpy(),
        weights=None if block.weights is None else block.weights.numpy()[order],
        edge_features=None if block.features is None else block.features.numpy()[order],
        partition=None,
    )


def _leaving(part: Part, rows: Rows) -> list[Rows]:
    """By rank, what it is sent of own rows."""
    if isinstance(rows, Kept):
        pairs = zip(_leaving(part, rows.values), _leaving(part, rows.columns), strict=True)
        return [Kept(dense(values), dense(columns), rows.width) for values, columns in pairs]
    return list(halo.leaving_rows(part.halo, rows).split([len(ids) for ids in part.halo.sends]))
