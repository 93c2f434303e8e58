"""The Workload Protocol's answer for graphs: one network, one graph (or many small ones), one of three tasks.

How a step trains (`batching`), what is asked of the kind of network (`network`) and what rounds its values (`rounding`)
are three objects of their own, which `lookup` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier import recipe as config
from espalier.graph import lookup
from espalier.graph.data import kept_graph, sources
from espalier.graph.data.column_scales import with_scales
from espalier.graph.data.graph import Graph, Signs, scaled, seen_in_training
from espalier.graph.data.kept_graph import OtherNodes
from espalier.graph.data.text_columns import with_text
from espalier.graph.networks import graph_plan
from espalier.graph.networks.layer_work import Reach
from espalier.graph.parts import partition_folder
from espalier.graph.run import NetworkAdapter, Task
from espalier.graph.sampling.subgraphs import SubgraphBatch, View
from espalier.graph.tasks import answers, link_prediction, metrics
from espalier.graph.tasks.graph_classification import GraphTask
from espalier.graph.tasks.link_prediction import Links, LinkTask
from espalier.graph.tasks.node_classification import NodeTask
from espalier.parallel.workload import ALONE, Averages, PackStart, Plain, Progress, Shard, SummedLoss, Sums, to_device
from espalier.recipe import Recipe
from espalier.recipe.cost import Work
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches
from espalier.store.artifacts import Artifact, Table

GLIMPSES = 5
"""Held-out answers shown at the end of a run."""
LINK_WIDTH = 64
"""Columns of an embedding where the network does not say how wide its layers are."""


class GraphWorkload(Plain):
    """One network on one graph. `train.batch_tokens` counts targets (nodes, links, graphs) here.

    Has state: where the model was built, so that what every step reads lies there too.
    """

    whole_evaluation = True

    def __init__(
        self,
        recipe: Recipe,
        graph: Graph,
        folder: str | Path | None = None,
        sentences: Sequence[str] = (),
        links: Links | None = None,
    ) -> None:
        assert recipe.graph is not None
        self.recipe = recipe
        self.folder = folder
        self.sentences = tuple(sentences)
        self.trained: OtherNodes = None
        """Of the graph that the run was begun on, where it is another: see `kept_graph.other_nodes`."""
        self.signs: Signs = ()
        """See `Rounding.signs`; of the run, where it was begun before."""
        self.frozen: Path | None = None
        """Where the run keeps what it made of its graph."""
        self.graph = scaled(graph)
        self.network = lookup.network(recipe)
        self.task = _task(recipe, self.network, self.graph, links)
        way = lookup.batching(recipe)
        asked = self.task.items if way.stands else recipe.train.batch_tokens or self.task.items
        self.global_batch = min(asked, self.task.items)
        self.nominal_weight = float(self.global_batch)
        if recipe.graph.task == "link":
            self.nominal_weight *= 1 + recipe.graph.negatives
        self._dtype = torch.float32
        self.device = torch.device("cpu")
        self.rounding = lookup.rounding(recipe)(self)
        self.batching = way(self)
        self.meters = self.batching.meters
        self.step_loss: Callable[[nn.Module, SubgraphBatch], SummedLoss] = self._step_loss
        """Of a batch; a mechanism may have another."""

    def like(self, recipe: Recipe) -> GraphWorkload:
        """Of another recipe, on the same graph."""
        return GraphWorkload(recipe, self.graph)

    # --- the model -----------------------------------------------------------------------------------------------

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The network with its seeded weights and the kernels in its seam."""
        self.decisions()  # before ranks are forked, so that they share what was made
        self._dtype, self.device, self.step_loss = dtype, device, self._step_loss
        self.batching.begin()
        model = self.bare()
        self.rounding.equip(model)
        return model.to(device=device, dtype=dtype)

    def bare(self) -> nn.Module:
        """The network with plain aggregation, seeded, on the CPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.train.seed)
            return self.network.build(self, self.task.graph.features.shape[1], self._outputs())

    def _outputs(self) -> int:
        """Columns of the network's answer: classes or tasks; for links, an embedding as wide as the layers."""
        return self.network.width or LINK_WIDTH if isinstance(self.task, LinkTask) else self.task.outputs

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The layers; a foreign network is one."""
        return self.network.blocks(model)

    def embeddings(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """The matrices of the first layer and of the last: what Muon leaves to AdamW."""
        return self.network.embeddings(model)

    def recompute(self, model: nn.Module, mode: str) -> None:
        """Only `none`."""
        if mode != "none":
            raise UserError(f"train.recompute = {mode!r} is not possible for a graph.", do='train.recompute = "none"')

    # --- the data ------------------------------------------------------------------------------------------------

    def batches(self, step: int, shard: Shard) -> list[SubgraphBatch]:
        """Targets of a seeded permutation per epoch, with what they hear from; the whole graph's stay as they are."""
        batches = [batch._replace(step=step) for batch in self.batching.batches(step, shard)]
        return self.network.at_step(self, batches, step)

    def placed(self, batch: SubgraphBatch) -> SubgraphBatch:
        """`batch` where the model is."""
        return to_device(batch, self.device, self._dtype)

    def pack(self, shards: Sequence[Shard], packing: PackStart = ALONE) -> None:
        """Packs the batches of `shards`, the ranks of this machine, or opens what is packed. Needs a [store]."""
        self.batching.pack(shards, packing)

    def documents(self, step: int, shard: Shard) -> list[str]:
        """Names of the targets."""
        return [self.task.name(int(item)) for item in self.batching.targets(step, shard)]

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """The task's sum of losses, and how many answers it is of."""
        return self.step_loss(model, batch)

    def _step_loss(self, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        self.rounding.at_step(model, batch.step)
        return self.rounding.loss(model, self.batching.loss(model, batch))

    @property
    def whole_task(self) -> NodeTask:
        """The task of a run that passes over the whole graph for its nodes."""
        assert isinstance(self.task, NodeTask)
        return self.task

    def validation_samples(self) -> int:
        """Held-out nodes, links or graphs."""
        return self.task.validation

    def evaluate(self, model: nn.Module, shard: Shard) -> Sums:
        """The task's figures with all neighbours; under `test_` those of the test part, which chooses nothing."""
        return self.batching.evaluate(model, shard)

    def summary(self, totals: Averages) -> Averages:
        """As people read them."""
        return metrics.summary(totals)

    def sample(self, model: nn.Module) -> list[Artifact]:
        """Some held-out answers beside the truth; with a [store], what was read from where."""
        return [*self._glimpses(model), *self.rounding.artifacts(model), *self.batching.artifacts()]

    def _glimpses(self, model: nn.Module) -> list[Artifact]:
        ids = self.task.parts.validation[:: max(1, self.task.validation // GLIMPSES)][:GLIMPSES].tolist()
        if isinstance(self.task, LinkTask):
            pairs = [(int(head), int(tail)) for head, tail in self.task.links.pairs[:, ids].T]
            links = [[link["name"], link["probability"]] for link in self.task.answers(model, pairs)]
            return [Table(("link", "probability that it is there (it is)"), links)] if links else []
        rows = self.batching.evaluated
        answers_given = self.task.answers(model, ids) if rows is None else answers.told(rows[ids], self.graph, ids)
        return answers.truth_table(self.graph, ids, answers_given)

    def fingerprint(self) -> str:
        """Of the graph, its split included."""
        return self.graph.fingerprint()

    def notes(self) -> list[str]:
        """What was mended in the graph, and what of it cannot be learned."""
        notes = list(self.graph.notes)
        if isinstance(self.task, LinkTask) and self.graph.labels is not None:
            unread = "not used: labels (graph.task = 'link')"
            notes = [unread, *(note for note in notes if not note.startswith("targets:"))]
        notes += self.network.notes()
        alone = 0 if self.graph.partition else int((self.graph.degrees() == 0).sum())
        if alone:
            notes.append(f"{alone:,} of {self.graph.nodes:,} nodes have no neighbour; they see only themselves")
        return notes

    def decisions(self) -> tuple[str, ...]:
        """What was decided of the graph, in sentences; makes the format on first use."""
        return self.network.decisions(self, self.sentences, self.rounding.sentences)

    def freeze(self, folder: Path, graph: Graph) -> None:
        """Keeps in `folder` what a run on `graph` is opened with."""
        links = self.task.links if isinstance(self.task, LinkTask) else None
        kept_graph.write(folder, graph, links, self.rounding.signs)
        self.network.freeze(self, folder)

    # --- cost ----------------------------------------------------------------------------------------------------

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """By layer from its reach: of the whole graph, or of one step's drawn neighbourhood, per target."""
        return self.network.work(self, micro_batch, precision)

    def reach(self) -> list[Reach]:
        return self.batching.reach()

    def halos(self) -> Any:
        """What a plan is told of rows that cross; None where the graph is not cut."""
        return self.batching.halos()

    def drawn(self) -> Batches | None:
        """The batches that a plan weighs the whole graph against; None: there are none."""
        return self.batching.drawn()


def _task(recipe: Recipe, network: NetworkAdapter, graph: Graph, links: Links | None) -> Task:
    options = recipe.graph
    placed = network.placed
    assert options is not None
    style = network.style
    depth = network.depth

    if options.task == "graph":
        return GraphTask(placed(graph), style, depth, summed=isinstance(recipe.model, config.Gin))
    if graph.starts is not None:
        raise UserError(
            f"{graph.origin} holds many graphs, and graph.task is {options.task!r}.", do='graph.task = "graph"'
        )
    if options.task == "link":
        links = links or link_prediction.split(graph, options.shares, recipe.train.seed)
        return LinkTask(
            View(placed(links.rest), style, depth), links, options.fanouts, recipe.train.seed, options.negatives
        )
    seen = seen_in_training(graph) if options.inductive else graph
    view = View(placed(graph), style, depth)
    return NodeTask(
        View(placed(seen), style, depth) if options.inductive else view, view, options.fanouts, recipe.train.seed
    )


def open_graph(
    recipe: Recipe,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    run_graph: kept_graph.KeptGraph | None = None,
) -> GraphWorkload:
    """Reads the graph that `[data]` names and divides it, as in `run_graph` where the run has begun. `recipe` must be
    resolved. Raises UserError."""
    assert recipe.graph is not None
    if not recipe.data:
        raise UserError("The recipe has no [data].", do='[data] path = "python:imports"')
    asked = recipe.graph
    seed = recipe.train.seed
    links = None
    before = None if run_graph is None or asked.task == "link" else run_graph.graph.kind
    graph = sources.load(recipe.data[0], asked.changed(target=asked.target or before), progress)
    graph = partition_folder.checked_for(recipe, graph, lookup.network(recipe).style)
    if run_graph is not None:
        graph = with_text(graph, asked.text, known=run_graph.graph.columns)
        graph = kept_graph.mapped(graph, run_graph)
    if asked.task != "link":
        graph = kept_graph.divided(graph, run_graph, asked.shares, seed)
    if run_graph is None and graph.partition is None:
        graph = with_scales(graph) if asked.standardise else graph
        graph = with_text(graph, asked.text)
    sentences = []
    if graph.partition is not None:
        sentences.append(f"Order: that in which {graph.origin} was cut.")
    elif recipe.graph.task != "graph" and not recipe.graph.fanouts and graph.starts is None:
        graph, sentence = graph_plan.ordered(graph, recipe.graph.order)
        sentences.append(sentence)
    if asked.task == "link" and run_graph is not None:
        links = kept_graph.split(graph, run_graph, asked.shares, seed)
    workload = GraphWorkload(recipe, graph, folder, sentences, links)
    if run_graph is not None and "quant" in recipe.mechanisms:
        workload.trained = kept_graph.other_nodes(graph, run_graph.graph, recipe)
    return workload
