"""Partition folder: a graph that is cut over ranks, written once; each rank then reads its own part alone.

`manifest.json` names the graph, the cut and the checksum of every file. `part-N.safetensors` is what rank N sees: its
edges with the scales of the whole graph, its halo lists, and the features and labels of its own nodes.
`nodes.safetensors` has the names, numbers (in the data), labels, split and degrees of all nodes and the names of their
features, so that a run can be opened without edges and features (`outlined`): a machine then needs the manifest, this
file, and the parts of its own ranks.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy import sparse
from torch import Tensor

from espalier.comm.base import Traffic, traffic
from espalier.comm.plain_collectives import RankGroup
from espalier.graph.data.graph import DataSplit, Graph, Partition, signed
from espalier.graph.networks.base import Forms, MessageBlock, MessageBlocks
from espalier.graph.parts.halo import Boundary, Halo, checked
from espalier.graph.parts.partial_sums import Covers, crossing_rows, summing
from espalier.graph.sampling.neighbor_sampler import Style, symmetric_root, whole
from espalier.recipe import Network, Recipe, cache_dir, data_hash, serialization
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing
from espalier.recipe.graphs import MessagesModel
from espalier.track.progress import Waiting

MANIFEST = "manifest.json"
FORMAT = 4
NODES = "nodes.safetensors"
SCALES = ("weights", "left", "right", "features")
"""Of a block."""
MATRIX = ("data", "indices", "indptr")
"""Of a sparse matrix by rows."""
AGAIN = "write the partition again"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder holds. `rows`: of `Boundary`; `checksums`: of the parts, in order of rank; `nodes_checksum`: of
    `nodes.safetensors`; `cut`: see `cut_hash`. The rest is of the whole graph: `width` of its features, `outputs` of a
    network for its labels, names of the classes, where it came from, and whether labels are values.
    """

    format: int
    graph: str
    nodes: int
    style: Style
    rows: list[list[int]]
    checksums: list[str]
    nodes_checksum: str
    edges: int
    width: int
    classes: tuple[str, ...]
    origin: str
    cut: str = ""
    values: bool = False


class Part(NamedTuple):
    """What one rank has of a graph.

    Attributes:
        halo: its nodes and its exchange; block: the edges into its nodes, for a network of `style`.
        features: [owned, width]; labels: of its own nodes, where the graph has labels.
        rows: int64 [ranks, ranks], what crosses before a layer aggregates.
    """

    halo: Halo
    block: MessageBlock
    features: Tensor
    labels: Tensor | None
    style: Style
    rows: np.ndarray

    def inputs(self, depth: int) -> tuple[Tensor, MessageBlocks]:
        """What a network of `depth` layers is called with at every step. Halo features cross here, once; all ranks
        call it alike."""
        return self.halo.exchange(self.features), self.halo.by_layer(self.block, depth)


def write(folder: str | Path, graph: Graph, style: Style, cut: Boundary, every: Covers | None = None) -> None:
    """Writes the parts of `graph` that `cut` makes, for networks of `style`, whole or not at all. An older partition is
    replaced. `every`: partial sums cross too (`partial_sums.covers`). Raises UserError when `cut` is of another graph,
    or `folder` is something else or cannot be written."""
    if len(cut.parts) != graph.nodes:
        raise UserError(
            f"The cut is of {len(cut.parts):,} nodes, and {graph.origin} has {graph.nodes:,}.",
            do="boundary(graph.indptr, graph.indices, parts, ranks) of this graph",
        )
    block = whole(graph, style)

    def fill(target: Path) -> None:
        with Waiting("Writing the parts of the graph", cut.ranks, out=sys.stderr) as bar:
            for rank in range(cut.ranks):
                save_file(_tensors(graph, block, (cut, every), rank), target / _name(rank))
                bar.advance()
        save_file(_nodes(graph), target / NODES)
        rows = cut.rows if every is None else crossing_rows(every, cut.ranks)
        sums = [data_hash.of_file(target / _name(rank)) for rank in range(cut.ranks)], data_hash.of_file(target / NODES)
        made = Manifest(
            FORMAT,
            graph.fingerprint(),
            graph.nodes,
            style,
            rows.tolist(),
            *sums,
            edges=graph.edges,
            width=graph.features.shape[1],
            classes=graph.classes,
            origin=graph.origin,
            cut=cut_hash(cut.parts),
            values=graph.values,
        )
        (target / MANIFEST).write_bytes(msgspec.json.encode(made))

    cache_dir.export(Path(folder), MANIFEST, fill)


def checked_for(recipe: Recipe, graph: Graph, style: Style) -> Graph:
    """`graph` for a recipe whose network is of `style`, with the parts that the recipe gives. Raises UserError as
    `check` and `given`."""
    if graph.partition is not None:
        check(recipe, graph.partition, style)
    elif recipe.graph is not None and recipe.graph.halo is not None and recipe.graph.halo.parts:
        return replace(graph, cut=given(recipe, graph))
    return graph


def check(recipe: Recipe, partition: Partition, style: Style) -> None:
    """Raises UserError where a recipe, whose network is of `style`, cannot train on parts that were cut before."""
    options = recipe.graph
    ranks = partition.ranks
    assert options is not None
    there = _manifest(partition.folder)[0].style
    what = f"data.path = {str(partition.folder)!r} is a graph that is cut into {ranks} parts"
    if options.halo is None or options.inductive or not isinstance(recipe.model, Network | MessagesModel):
        raise UserError(
            f"{what}; this recipe needs the whole graph.",
            why="each rank reads the edges and features of its own part alone",
            do="[graph.halo], a network such as sage or your own, without graph.inductive; or the graph itself as "
            "data.path",
        )
    if options.halo.parts:
        raise UserError(f"{what}, and graph.halo.parts says how to cut one.", do='graph.halo.parts = ""')
    if recipe.plan.pin.ranks != ranks:
        raise UserError(f"{what}, for as many ranks.", do=f"plan.pin.ranks={ranks}, or the graph itself as data.path")
    if style != there:
        raise UserError(
            f"{what} for networks whose loops and scales are others.",
            why=f"loops {there.loops}, scale {there.scale}",
            do="the model.kind that it was cut for, or the graph itself as data.path",
        )


def given(recipe: Recipe, graph: Graph) -> np.ndarray:
    """int32 [nodes]: what `graph.halo.parts` names. Raises UserError for a file that has no array, parts that do not
    cover the graph, and a plan for another number of ranks."""
    assert recipe.graph is not None
    assert recipe.graph.halo is not None
    path = recipe.graph.halo.parts
    ranks = recipe.plan.pin.ranks
    what = f"graph.halo.parts = {path!r}"
    with parsing(path, "numpy.save(path, parts), with a whole number for each node"):
        parts = np.load(path, allow_pickle=False)
    if not isinstance(parts, np.ndarray):
        raise UserError(f"{what} has several arrays.", do="numpy.save(path, parts), one array")
    if not ranks and parts.size:
        raise UserError(
            f"{what} is for {int(parts.max()) + 1} ranks, and the number of ranks is open.",
            do=f"plan.pin.ranks={int(parts.max()) + 1}",
        )
    rank_of_node = checked(parts, graph.nodes, ranks or 1)
    if (least := int(rank_of_node.max(initial=-1)) + 1) < (ranks or 1):
        raise UserError(
            f"{what} is for {least} ranks, and plan.pin.ranks = {ranks}.",
            why=f"ranks {least} to {(ranks or 1) - 1} would train on nothing",
            do=f"plan.pin.ranks={least}, or parts for {ranks} ranks",
        )
    return rank_of_node


def _nodes(graph: Graph) -> dict[str, Tensor]:
    tensors = {"degrees": torch.from_numpy(graph.degrees()), "root": torch.from_numpy(symmetric_root(graph))}
    if (has := signed(graph.features)) is not None:
        tensors["signed"] = torch.tensor(has)
    arrays = {"labels": graph.labels, "column scales": graph.column_scales, "numbers": graph.numbers}
    arrays |= graph.parts._asdict() if graph.parts is not None else {}
    tensors |= {name: torch.from_numpy(np.array(array)) for name, array in arrays.items() if array is not None}
    for name, each in (("names", graph.names), ("columns", graph.columns), ("edge columns", graph.edge_columns)):
        tensors |= _joined(name, each) if len(each) else {}
    return tensors


def _joined(name: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Names as bytes, one behind the other, and where each ends."""
    each = [text.encode("utf-8", "surrogatepass") for text in names]
    ends = np.cumsum([len(encoded) for encoded in each], dtype=np.int64)
    joined = np.frombuffer(b"".join(each), np.uint8).copy()
    return {name: torch.from_numpy(joined), f"{name} ends": torch.from_numpy(ends)}


def _names(nodes: Mapping[str, np.ndarray], name: str) -> list[str]:
    """What `_joined` was given under `name`; none where the graph has none."""
    if name not in nodes:
        return []
    joined = nodes[name].tobytes()
    ends = nodes[f"{name} ends"].tolist()
    return [joined[at:end].decode("utf-8", "surrogatepass") for at, end in itertools.pairwise([0, *ends])]


def is_partition(folder: Path) -> bool:
    """Whether `folder` is meant to hold the parts of a graph."""
    return (folder / MANIFEST).exists() and ((folder / NODES).exists() or any(folder.glob(_name("*"))))


def complete(partition: Partition) -> bool:
    """Whether all parts are on this machine."""
    return all((partition.folder / _name(rank)).exists() for rank in range(partition.ranks))


def outlined(folder: Path) -> tuple[Graph, Style]:
    """The graph whose parts are in `folder`, with names, labels and split, but without edges, and with features that
    are zeros without memory; and the style of the networks that it was cut for. Raises UserError as `read`."""
    manifest, _ = _manifest(folder)
    nodes = {name: tensor.numpy() for name, tensor in _load(folder / NODES, manifest.nodes_checksum).items()}
    split = [nodes[name] for name in DataSplit._fields if name in nodes]
    graph = Graph(
        indptr=np.zeros(manifest.nodes + 1, np.int64),
        indices=np.zeros(0, np.int32),
        features=np.broadcast_to(np.float32(0), (manifest.nodes, manifest.width)),
        labels=nodes.get("labels"),
        parts=DataSplit(*split) if split else None,
        classes=manifest.classes,
        names=_names(nodes, "names"),
        columns=tuple(_names(nodes, "columns")),
        edge_columns=tuple(_names(nodes, "edge columns")),
        numbers=nodes.get("numbers"),
        origin=manifest.origin,
        identity=manifest.graph,
        column_scales=nodes.get("column scales"),
        values=manifest.values,
        partition=Partition(
            folder,
            len(manifest.checksums),
            manifest.edges,
            nodes["degrees"],
            nodes["root"],
            bool(nodes["signed"]) if "signed" in nodes else None,
        ),
    )
    return graph, manifest.style


def _tensors(graph: Graph, block: MessageBlock, cut: tuple[Boundary, Covers | None], rank: int) -> dict[str, Tensor]:
    if cut[1] is None:
        halo = Halo.of(block.indptr, block.indices, cut[0], rank)
        local = halo.block(block)
    else:
        halo, local = summing(block, cut[0], rank, every=cut[1])
    ids = halo.owned.numpy()
    tensors = {
        "owned": halo.owned,
        "outer": halo.outer,
        "edges": halo.edges,
        "indptr": halo.indptr,
        "indices": halo.indices,
    }
    tensors |= {"sends": torch.cat(halo.sends), "features": torch.from_numpy(np.asarray(graph.features[ids]))}
    tensors |= {f"block {name}": scale for name in SCALES if (scale := getattr(local, name)) is not None}
    if halo.sums is not None:
        tensors |= {f"sums {name}": torch.from_numpy(getattr(halo.sums, name)) for name in MATRIX}
    if halo.degrees is not None:
        tensors["degrees"] = halo.degrees
    if graph.labels is not None:
        tensors["labels"] = torch.from_numpy(np.asarray(graph.labels[ids]))
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}  # tensors of a file share no memory


def read(folder: str | Path, rank: int, group: RankGroup = None, graph: str = "") -> Part:
    """The part of `rank`; no other part is opened. All ranks of `group` call it alike, and compare what they cut.

    `graph`: the fingerprint that the partition must be of. Raises UserError for a folder without a partition, of
    another graph or for another number of ranks, for a part that is missing or damaged, and for ranks with different
    cuts.
    """
    folder = Path(folder)
    manifest, digest = _manifest(folder)
    ranks = len(manifest.checksums)
    size = 1 if group is None else group.size()
    if ranks != size:
        raise UserError(f"{folder} holds {ranks} parts, and there are {size} ranks.", do=f"{AGAIN} for {size} ranks")
    if graph and graph != manifest.graph:
        raise UserError(f"{folder} is of another graph, or of this one before it changed.", do=AGAIN)
    if group is not None:
        _compare(folder, digest, group)
    return _part(folder, manifest, rank, group)


def any_part(folder: Path) -> Part:
    """The first of the parts that this machine has. Raises UserError as `read`."""
    ranks = len(_manifest(folder)[0].checksums)
    return read_alone(folder, next((rank for rank in range(ranks) if (folder / _name(rank)).exists()), 0))


def read_alone(folder: Path, rank: int, known: bool = False) -> Part:
    """The part of `rank`, for one process that reads all of them in turn. `known`: it was read before, and its checksum
    was right. Raises UserError as `read`."""
    return _part(folder, _manifest(folder)[0], rank, None, known)


def _part(folder: Path, manifest: Manifest, rank: int, group: RankGroup, known: bool = False) -> Part:
    ranks = len(manifest.checksums)
    tensors = _load(folder / _name(rank), "" if known else manifest.checksums[rank])
    rows = np.asarray(manifest.rows, np.int64).reshape(ranks, ranks)
    lists = tuple(tensors["sends"].split(rows[rank].tolist()))
    edges = (tensors["edges"], tensors["indptr"], tensors["indices"])
    halo = Halo(tensors["owned"], tensors["outer"], lists, tuple(rows[:, rank].tolist()), *edges, group)
    halo = replace(halo, mention=partial(_mention, folder))
    if "sums data" in tensors:
        parts = tuple(tensors[f"sums {name}"].numpy() for name in MATRIX)
        shape = (int(rows[rank].sum()), len(halo.owned))
        halo = replace(halo, sums=sparse.csr_array(parts, shape=shape), degrees=tensors.get("degrees"))
    scales: dict[str, Any] = {name: tensors.get(f"block {name}") for name in SCALES}
    block = MessageBlock(halo.indptr, halo.indices.int(), halo.sources, Forms(), **scales)
    return Part(halo, block, tensors["features"], tensors.get("labels"), manifest.style, rows)


def _load(path: Path, checksum: str) -> dict[str, Tensor]:
    """The file at `path`, whose checksum must be that one; empty: it was compared before."""
    there = "" if path.name == NODES else "start a rank where it is (torchrun, srun, mpiexec), or "
    with parsing(path, f"copy it here, or {there}{AGAIN}"):
        if checksum and data_hash.of_file(path) != checksum:
            raise UserError(f"{path} is damaged.", why="its checksum does not match", do=f"copy it anew, or {AGAIN}")
        return load_file(path)


def _mention(folder: Path, node: int) -> str:
    """See `Graph.mention`; names and numbers are read when a message needs them."""
    try:
        return outlined(folder)[0].mention(node)
    except (OSError, SafetensorError, UserError):
        return f"node {node}"


def intact(folder: Path, rank: int, graph: str) -> int | None:
    """A number that is the same where the manifest is; None where the part of `rank` is not there, of another graph, or
    damaged."""
    try:
        manifest, digest = _manifest(folder)
        same = manifest.graph == graph and data_hash.of_file(folder / _name(rank)) == manifest.checksums[rank]
    except (UserError, OSError, IndexError):
        return None
    return digest if same else None


def cut_hash(parts: np.ndarray) -> str:
    """Of `parts` int32 [nodes]: which cut it is."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(parts, np.int32).tobytes())


def holds(folder: Path, parts: np.ndarray, graph: str) -> bool:
    """Whether all parts of that cut of that graph are there, and not damaged."""
    try:
        manifest, _ = _manifest(folder)
    except UserError:
        return False
    every = range(len(manifest.checksums))
    return manifest.cut == cut_hash(parts) and all(intact(folder, rank, graph) is not None for rank in every)


def rows_of(folder: Path) -> np.ndarray | None:
    """int64 [ranks, ranks], what crosses between the parts of a folder; None where there is none."""
    try:
        rows = _manifest(folder)[0].rows
    except UserError:
        return None
    return np.asarray(rows, np.int64).reshape(len(rows), len(rows))


def _manifest(folder: Path) -> tuple[Manifest, int]:
    """And a number that is the same where the manifest is."""
    with parsing(folder / MANIFEST, AGAIN):
        text = (folder / MANIFEST).read_bytes()
        manifest = serialization.from_json(text, Manifest)
    if manifest.format != FORMAT or [len(row) for row in manifest.rows] != [len(manifest.checksums)] * len(
        manifest.checksums
    ):
        raise UserError(f"{folder / MANIFEST} is of another version of espalier.", do=AGAIN)
    return manifest, xxhash.xxh3_64_intdigest(text) >> 1


def _compare(folder: Path, digest: int, group: dist.ProcessGroup) -> None:
    each = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    with traffic(Traffic.CONTROL):
        dist.all_gather(each, torch.tensor([digest]), group=group)
    other = [rank for rank, peer_digest in enumerate(each) if int(peer_digest) != int(each[0])]
    if other:
        raise UserError(
            f"{folder}: rank {other[0]} has another partition than rank 0.",
            why="halo lists of different cuts do not fit together",
            do="copy one folder to every machine",
        )


def _name(rank: int | str) -> str:
    return f"part-{rank}.safetensors"
