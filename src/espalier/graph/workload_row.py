"""Graphs in the table of kinds: the planner's questions and answers for nodes, links and graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from espalier.graph import kept_graph, lookup, partition_folder
from espalier.graph.answers import lines
from espalier.graph.gnn import Gnn
from espalier.graph.graph_classification import GraphTask
from espalier.graph.link_prediction import LinkTask
from espalier.graph.network import quantizers_of
from espalier.graph.node_classification import NodeTask
from espalier.graph.subgraphs import infer
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.parallel.workload import PackStart, Shard, Workload
from espalier.recipe import Recipe, cache_dir, data_hash
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches, with_batches
from espalier.train.workload_row import Answer, Opening, Profile, Row, Sampling
from espalier.train.wrap_policy import profile

LIBRARIES = 45 * 2**20
"""Bytes of Numba, SciPy and compiled kernels in a rank: 44 to 59 MiB measured, graphs of 10,000 to 50,000 nodes
included."""


LINKS = 10
"""Links that are shown of one node unless another number is asked for."""


def answers(
    workload: GraphWorkload, model: nn.Module, text: str | None, count: int | None = None
) -> list[dict[str, Any]]:
    """One answer for each thing that `text` names, by name or number.

    Nodes and graphs are separated by commas or line ends; a pair is `a,b`, and pairs by line ends or semicolons. None:
    every node or graph; all links that were held out. Where links are predicted, one node is answered by the `count`
    likeliest new links that it has.
    """
    task = workload.task
    if isinstance(task, LinkTask):
        if text is not None and text.strip() and not {",", ";", "\n"} & set(text.strip()):
            return task.likeliest(model, task.graph.find(text.strip()), count or LINKS)
        return task.answers(model, _pairs(task, text))
    if text is None:
        return task.answers(model, range(workload.graph.items))
    words = [word.strip() for line in text.splitlines() for word in line.split(",")]
    found = [word for word in words if word]
    if not found:
        raise UserError("The input is empty.", do="a node's name or number, such as 0")
    if isinstance(task, GraphTask):
        return task.answers(model, [_graph(task, word) for word in found])
    return task.answers(model, [workload.graph.find(word) for word in found])


def _graph(task: GraphTask, word: str) -> int:
    if not word.isdecimal() or int(word) >= task.graph.items:
        raise UserError(f"There is no graph {word!r}.", do=f"a number up to {task.graph.items - 1}")
    return int(word)


def _pairs(task: LinkTask, text: str | None) -> list[tuple[int, int]]:
    if text is None:
        ids = np.concatenate([task.parts.validation, task.parts.test])
        return [(int(head), int(tail)) for head, tail in task.links.pairs[:, ids].T]
    found = []
    for pair in filter(None, (part.strip() for line in text.splitlines() for part in line.split(";"))):
        ends = [word.strip() for word in pair.split(",")]
        if len(ends) != 2:
            raise UserError(f"{pair!r} is no pair of nodes.", do="two names or numbers with a comma, such as 0,1")
        found.append((task.graph.find(ends[0]), task.graph.find(ends[1])))
    if not found:
        raise UserError("The input is empty.", do="two nodes, such as 0,1")
    return found


def _open(recipe: Recipe, opening: Opening) -> GraphWorkload:
    if recipe.graph is not None and recipe.graph.fanout == "auto":  # what its plan weighs drawn batches against
        recipe = with_batches(recipe, Batches())
    kept = None if opening.kept is None else kept_graph.read(opening.kept)
    if opening.kept is not None and recipe.quant is not None:
        kept = lookup.named(f"{lookup.PACKED}:with_features")(kept, opening.kept.parent)
    if kept is not None and not opening.reads:
        graph = kept.graph if kept.whole else kept.outlined()
        made = GraphWorkload(recipe, graph, opening.folder, links=kept.links)
    else:
        made = open_graph(recipe, opening.folder, opening.progress, kept)
    made.kept, made.signs = opening.kept, () if kept is None else kept.signs
    return made


def _freeze(workload: Workload, folder: Path) -> None:
    assert isinstance(workload, GraphWorkload)
    workload.freeze(folder, workload.graph)


def _pack(workload: Workload, shards: Sequence[Shard], packing: PackStart) -> None:
    assert isinstance(workload, GraphWorkload)
    workload.pack(shards, packing)


def _contents(recipe: Recipe, workload: Workload) -> Mapping[str, str]:
    """Of each file of the graph; a graph that has none is one by what is in it, in whatever order."""
    assert isinstance(workload, GraphWorkload)
    path = recipe.data[0].path
    place = Path(path).expanduser()
    if place.is_dir() and partition_folder.is_partition(place):  # the manifest has the checksums of the parts
        return data_hash.hashes(
            {str(one): one for one in (place / partition_folder.MANIFEST, place / partition_folder.NODES)}
        )
    if place.exists():
        return data_hash.below(place)
    found = {str(one): one for one in sorted(place.parent.glob(f"*.{place.name}.*"))}  # one of several in a folder
    return data_hash.hashes(found) if found else {path: workload.graph.identity or workload.fingerprint()}


def _profile(recipe: Recipe, opened: Callable[[], Workload]) -> Profile:
    workload = opened()
    assert isinstance(workload, GraphWorkload)
    model = profile(workload, workload.anatomy, workload.decisions())
    return replace(model, loaded=LIBRARIES, facts=workload.batching.facts())


def _cut(workload: Workload, shares: Sequence[int], folder: Path) -> None:
    assert isinstance(workload, GraphWorkload)
    workload.batching.write_parts(folder, shares)


def _answer(workload: Workload, model: nn.Module, text: str | None, sampling: Sampling) -> Answer:
    assert isinstance(workload, GraphWorkload)
    task = workload.task
    if (bits := quantizers_of(model)) is not None:
        bits.packed = next(model.parameters()).device.type == "cpu"
    if text is None and isinstance(task, NodeTask):  # one by one: there may be more than memory holds
        each = task.each(model, range(workload.graph.items))
        return Answer(lines(each), lambda: {"answers": list(each)})
    found = answers(workload, model, text, sampling.top_k)
    return Answer(lines(found), lambda: {"answers": found})


def _embeddings(workload: Workload, model: nn.Module, folder: Path) -> str:
    """`embeddings.npy`, float32 [nodes, width], and `names.txt`: of links what is multiplied, of nodes what the last
    layer reads."""
    assert isinstance(workload, GraphWorkload)
    if isinstance(workload.task, GraphTask) or not isinstance(model, Gnn) or workload.recipe.store is not None:
        raise UserError(
            "This run has no embeddings to export.",
            why="they are of nodes, of our own networks, of a graph in memory",
            do="--to safetensors, and the model of espalier.open(RUN).model()",
        )
    linked = isinstance(workload.task, LinkTask)
    view = workload.task.view if isinstance(workload.task, LinkTask) else workload.task.held
    names = [workload.graph.called(node) for node in range(workload.graph.nodes)]

    def fill(place: Path) -> None:
        with torch.no_grad():
            rows = infer(model, view, len(model.layers) - (not linked)).float().cpu().numpy()
        np.save(place / "embeddings.npy", rows)
        (place / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")

    cache_dir.export(folder, "embeddings.npy", fill)
    shape = np.load(folder / "embeddings.npy", mmap_mode="r").shape
    return f"numpy.load({str(folder / 'embeddings.npy')!r})  # float32 {list(shape)}"


ROW = Row(
    open=_open,
    profile=_profile,
    contents=_contents,
    reading="Reading the graph",
    answer=_answer,
    exports={"embeddings": _embeddings, "packed": lookup.calling(f"{lookup.PACKED}:write")},
    freeze=_freeze,
    evaluates=True,
    lacks=kept_graph.lacks,
    pack=_pack,
    energy=lookup.calling(lookup.ENERGY),
    cut=_cut,
    packed=lookup.calling(f"{lookup.PACKED}:load"),
)
