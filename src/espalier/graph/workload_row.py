"""Graphs in the table of kinds: the planner's questions and answers for nodes, links and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from espalier.graph import lookup
from espalier.graph.data import kept_graph
from espalier.graph.networks import graph_plan
from espalier.graph.networks.gnn import Gnn
from espalier.graph.networks.network import quantizers_of
from espalier.graph.parts import partition_folder
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.tasks.answers import AnswerForm, Answers, lines, table_rows, told
from espalier.graph.tasks.graph_classification import GraphTask
from espalier.graph.tasks.link_prediction import LinkTask
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.parallel.workload import PackStart, Shard
from espalier.recipe import Recipe, cache_dir, data_hash
from espalier.recipe.cost import Profile
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches, with_batches
from espalier.train.workload_row import (
    Answer,
    CountsEnergy,
    CutsIntoParts,
    EnergyTables,
    Exports,
    Freezes,
    LoadsPacked,
    Opening,
    Packs,
    Predicts,
    Row,
    Sampling,
)
from espalier.train.wrap_policy import profile

LIBRARIES = 45 * 2**20
"""Bytes of Numba, SciPy and compiled kernels in a rank: 44 to 59 MiB measured, graphs of 10,000 to 50,000 nodes
included."""


LINKS = 10
"""Links that are shown of one node unless another number is asked for."""


def answers(workload: GraphWorkload, model: nn.Module, text: str | None, count: int | None = None) -> Answers:
    """One answer for each thing that `text` names, by name or number.

    Nodes and graphs are separated by commas or line ends; a pair is `a,b`, and pairs by line ends or semicolons. None:
    every node or graph; all links that were held out. Where links are predicted, one node is answered by the `count`
    likeliest new links that it has.
    """
    return list(_each(workload, model, text, count))


def _each(
    workload: GraphWorkload,
    model: nn.Module,
    text: str | None,
    count: int | None,
    form: AnswerForm = told,
) -> Iterable[dict[str, Any]]:
    """As `answers`, one by one: there may be more than memory holds. `form`: of answers for nodes and graphs."""
    if (bits := quantizers_of(model)) is not None:
        bits.packed = next(model.parameters()).device.type == "cpu"
    task = workload.task
    if isinstance(task, LinkTask):
        if text is not None and text.strip() and not {",", ";", "\n"} & set(text.strip()):
            return task.likeliest(model, task.graph.find(text.strip()), count or LINKS)
        return task.answers(model, _pairs(task, text))
    if text is None:
        return task.each(model, range(workload.graph.items), form)
    words = [word.strip() for line in text.splitlines() for word in line.split(",")]
    named = [word for word in words if word]
    if not named:
        raise UserError("The input is empty.", do="a node's name or number, such as 0")
    find = partial(_graph, task) if isinstance(task, GraphTask) else workload.graph.find
    return task.each(model, [find(word) for word in named], form)


def _graph(task: GraphTask, word: str) -> int:
    if not word.isdecimal() or int(word) >= task.graph.items:
        raise UserError(f"There is no graph {word!r}.", do=f"a number up to {task.graph.items - 1}")
    return int(word)


def _pairs(task: LinkTask, text: str | None) -> list[tuple[int, int]]:
    if text is None:
        ids = np.concatenate([task.parts.validation, task.parts.test])
        return [(int(head), int(tail)) for head, tail in task.links.pairs[:, ids].T]
    pairs = []
    for pair in filter(None, (part.strip() for line in text.splitlines() for part in line.split(";"))):
        ends = [word.strip() for word in pair.split(",")]
        if len(ends) != 2:
            raise UserError(f"{pair!r} is no pair of nodes.", do="two names or numbers with a comma, such as 0,1")
        pairs.append((task.graph.find(ends[0]), task.graph.find(ends[1])))
    if not pairs:
        raise UserError("The input is empty.", do="two nodes, such as 0,1")
    return pairs


def _embeddings(workload: GraphWorkload, model: nn.Module, folder: Path) -> str:
    """`embeddings.npy`, float32 [nodes, width], and `names.txt`: of links what is multiplied, of nodes what the last
    layer reads."""
    if isinstance(workload.task, GraphTask) or not isinstance(model, Gnn) or workload.recipe.store is not None:
        raise UserError(
            "This run has no embeddings to export.",
            why="they are of nodes, of our own networks, of a graph in memory",
            do="--to safetensors, and the model of espalier.open(RUN).model()",
        )
    linked = isinstance(workload.task, LinkTask)
    view = workload.task.view
    names = [workload.graph.called(node) for node in range(workload.graph.nodes)]

    def fill(place: Path) -> None:
        with torch.no_grad():
            rows = infer(model, view, len(model.layers) - (not linked)).float().cpu().numpy()
        np.save(place / "embeddings.npy", rows)
        (place / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")

    cache_dir.export(folder, "embeddings.npy", fill)
    shape = np.load(folder / "embeddings.npy", mmap_mode="r").shape
    return f"numpy.load({str(folder / 'embeddings.npy')!r})  # float32 {list(shape)}"


def _packed(workload: GraphWorkload, model: nn.Module, folder: Path) -> str:
    return lookup.named(f"{lookup.PACKED}:write")(workload, model, folder)


class GraphRow(Row, Freezes, Packs, Predicts, Exports, LoadsPacked, CountsEnergy, CutsIntoParts):
    """Networks on graphs: for nodes, links, and graphs."""

    reading = "Reading the graph"
    exports: ClassVar = {"embeddings": _embeddings, "packed": _packed}

    def open(self, recipe: Recipe, opening: Opening) -> GraphWorkload:
        """Reads the graph, or what the run has frozen of it."""
        if recipe.graph is not None and recipe.graph.fanout == "auto":  # what its plan weighs drawn batches against
            recipe = with_batches(recipe, Batches())
        frozen = None if opening.frozen is None else kept_graph.read(opening.frozen)
        if opening.frozen is not None and "quant" in recipe.mechanisms:
            frozen = lookup.named(f"{lookup.PACKED}:with_features")(frozen, opening.frozen.parent)
        if frozen is not None and not opening.reads:
            graph = frozen.graph if frozen.whole else frozen.outlined()
            workload = GraphWorkload(recipe, graph, opening.folder, links=frozen.links)
        else:
            workload = open_graph(recipe, opening.folder, opening.progress, frozen)
        workload.frozen = opening.frozen
        workload.signs = () if frozen is None else frozen.signs
        return workload

    def profile(self, recipe: Recipe, opened: Callable[[], GraphWorkload]) -> Profile:
        """Of the network on the graph."""
        workload = opened()
        model = profile(workload, workload.decisions())
        on_gpus = graph_plan.on_gpus(model.remarks)
        return replace(model, loaded=LIBRARIES, facts=workload.batching.facts(), on_gpus=on_gpus)

    def contents(self, recipe: Recipe, workload: GraphWorkload) -> Mapping[str, str]:
        """Of each file of the graph; of a graph without files, of its content in whatever order."""
        path = recipe.data[0].path
        place = Path(path).expanduser()
        if place.is_dir() and partition_folder.is_partition(place):  # the manifest has the checksums of the parts
            files = [place / partition_folder.MANIFEST, place / partition_folder.NODES]
        elif place.exists():
            return data_hash.below(place)
        else:
            files = sorted(place.parent.glob(f"*.{place.name}.*"))  # a graph among several in a folder
        if not files:
            return {path: workload.graph.identity or workload.fingerprint()}
        return data_hash.hashes({str(file): file for file in files})

    def freeze(self, workload: GraphWorkload, folder: Path) -> None:
        """The graph or its outline, the split, and what the network needs."""
        workload.freeze(folder, workload.graph)

    def suffices(self, frozen: Path, evaluation: bool) -> bool:
        """A graph that is frozen whole does."""
        return not kept_graph.lacks(frozen)

    def pack(self, workload: GraphWorkload, shards: Sequence[Shard], packing: PackStart) -> None:
        """Rows of features, batch by batch."""
        workload.pack(shards, packing)

    def answer(self, workload: GraphWorkload, model: nn.Module, text: str | None, sampling: Sampling) -> Answer:
        """For each node, link or graph that `text` names."""
        if text is None and not isinstance(workload.task, LinkTask):
            each = _each(workload, model, text, None)
            return Answer(lines(each), lambda: {"answers": list(each)})
        records = answers(workload, model, text, sampling.top_k)
        return Answer(lines(records), lambda: {"answers": records})

    def rows(
        self, workload: GraphWorkload, model: nn.Module, text: str | None, sampling: Sampling
    ) -> Iterable[dict[str, Any]]:
        """A row for each node, link or graph that `text` names, with the probability of each class."""
        for row in _each(workload, model, text, sampling.top_k, table_rows):
            row.pop("name", None)  # of links, whose ends are in columns
            yield row

    def load_packed(self, model: nn.Module, folder: Path) -> bool:
        """Codes of few bits."""
        return lookup.named(f"{lookup.PACKED}:load")(model, folder)

    def energy(self, workload: GraphWorkload, model: nn.Module) -> EnergyTables:
        """Of all nodes."""
        return lookup.named(lookup.ENERGY)(workload, model)

    def cut(self, workload: GraphWorkload, shares: Sequence[int], folder: Path) -> None:
        """As training over parts cuts it."""
        workload.batching.write_parts(folder, shares)


ROW = GraphRow()
