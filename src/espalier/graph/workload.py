"""The Workload Protocol's answer for graphs: one network, one graph (or many small ones), one of three tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from espalier import recipe as config
from espalier.graph import (
    answers,
    compiled_aggregate,
    data,
    graph_plan,
    kept_graph,
    layer_work,
    link_prediction,
    metrics,
    partition_folder,
    pyg,
    sources,
)
from espalier.graph.data import Array, Graph
from espalier.graph.gnn import Gnn, Layer, style_of
from espalier.graph.graph_classification import GraphTask
from espalier.graph.layer_work import Reach
from espalier.graph.link_prediction import Links, LinkTask
from espalier.graph.node_classification import NodeTask
from espalier.graph.subgraphs import SubgraphBatch, View, infer
from espalier.mechanisms.few_bits import quantization, quantized_networks
from espalier.mechanisms.few_bits.quantized_graph import QuantizedGraph
from espalier.mechanisms.pattern_attention import reformation
from espalier.mechanisms.pattern_attention.encodings import averaged, encoded
from espalier.mechanisms.pattern_attention.model import GraphTransformer, tokens_of
from espalier.mechanisms.pattern_attention.schedule import Schedule, schedule
from espalier.parallel.workload import ALONE, PackStart, Plain, Progress, Shard, Skeleton, to_device, whole_skeleton
from espalier.recipe import Recipe
from espalier.recipe.cost import Anatomy, Cut, Work
from espalier.recipe.errors import UserError
from espalier.recipe.graphs import Batches
from espalier.store.artifacts import Artifact, Table
from espalier.track.progress import Stages

if TYPE_CHECKING:
    from espalier.graph.halo import ForeignRows
    from espalier.mechanisms.disk_batches.cost import StoredFeatures
    from espalier.mechanisms.disk_batches.mini_batches import RunBatches
    from espalier.mechanisms.halo_exchange.halo_parallel import Halos, RankPart
    from espalier.mechanisms.pattern_attention.reformation import Reformation
    from espalier.mechanisms.pattern_attention.token_parallel import TokenCut, TokenPart

Task = NodeTask | LinkTask | GraphTask

GLIMPSES = 5
"""Held-out answers shown at the end of a run."""
FANOUT, SAMPLED = 10, 1024
"""Neighbours drawn at each layer, and targets of a batch, of the drawn batches that halos are weighed against."""
CURVED = 1 << 27
"""Edges times columns up to which packed bytes, and accuracy against them, are shown: it takes five inferences more."""


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
        said: Sequence[str] = (),
        links: Links | None = None,
    ) -> None:
        assert recipe.graph is not None
        self.recipe, self.folder = recipe, folder
        self.trained: tuple[int, Array | None] | None = None
        """Of the graph that the run was begun on, where it is another: see `kept_graph.other_nodes`."""
        self.signs: tuple[bool | None, ...] = ()
        """See `QuantizedGraph.signs`."""
        self.graph = data.scaled(graph)
        self.task = _task(recipe, self.graph, links)
        self._schedule: tuple[Schedule, str] | None = None
        whole = recipe.graph.task == "node" and not recipe.graph.fanouts
        asked = self.task.items if whole else recipe.train.batch_tokens or self.task.items
        self.global_batch = min(asked, self.task.items)
        self.nominal_weight = float(self.global_batch)
        if recipe.graph.task == "link":
            self.nominal_weight *= 1 + recipe.graph.negatives
        self._dtype, self._device = torch.float32, torch.device("cpu")
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        self._moved: dict[tuple[int, int, int, int | None], list[SubgraphBatch]] = {}
        self._reach: list[Reach] | None = None
        self._said = tuple(said)
        self._format: str | None = None
        self.part: RankPart | TokenPart | None = None
        """This rank's, where the graph is cut over ranks."""
        self.reformation: Reformation | None = None
        """Of attention, where steps leave edges out."""
        self.kept: Path | None = None
        """Where the run keeps what it made of its graph."""
        self._evaluated: Tensor | None = None
        """What the model said of all nodes, over ranks, when it was evaluated last."""
        if recipe.quant is not None and isinstance(self.task, NodeTask):
            self.task.every_node = True
        self.stored: RunBatches | None = None
        if recipe.store is not None:
            from espalier.mechanisms.disk_batches.mini_batches import RunBatches

            assert isinstance(self.task, NodeTask)
            self.stored = RunBatches(recipe, self.task, self.global_batch)
            self.task.inference = self.stored.infer
            self.meters = {"store": self.stored.moved}

    # --- the model -----------------------------------------------------------------------------------------------

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The network with its seeded weights and the kernels in its seam."""
        self.decisions()  # before ranks are forked, so that they share what was made
        self._dtype, self._device, self._moved, self.part, self.reformation = dtype, device, {}, None, None
        model = self.bare()
        if self.recipe.quant is not None:
            ids = self.task.ids(np.arange(min(self.global_batch, quantization.PROBED)))
            batch = self.task.batch(ids, 0) if self.graph.partition is None else None
            quantized_networks.built(model, self.recipe.quant, self._told, batch)
            return model.to(device=device, dtype=dtype)
        return compiled_aggregate.equip(model).to(device=device, dtype=dtype)

    def skeleton(self) -> Skeleton:
        """The model as it is built, whole."""
        return whole_skeleton(self.build(torch.device("cpu"), torch.float32))

    def bare(self) -> nn.Module:
        """The network with plain aggregation, seeded, on the CPU."""
        inputs, options = self.task.graph.features.shape[1], self.recipe.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.train.seed)
            if isinstance(options, config.Messages):
                return pyg.built(options, inputs, self._outputs(), self.folder)
            if isinstance(options, config.GraphTransformer):
                model = GraphTransformer(options, inputs, self._outputs())
                model.schedule = self._attention()[0]
                return model
            assert isinstance(options, config.Network)
            return Gnn(options, inputs, self._outputs(), self.graph.values and not isinstance(self.task, LinkTask))

    def _attention(self) -> tuple[Schedule, str]:
        """In which steps attention is full, and why; decided once."""
        if self._schedule is None:
            options, pattern, nodes = self.recipe.model, None, 0
            assert isinstance(options, config.GraphTransformer)
            if not isinstance(self.task, GraphTask) and not self.task.fanout and options.attention == "auto":
                view = self.task.view if isinstance(self.task, LinkTask) else self.task.train
                with Stages("Making the pattern of attention"):
                    pattern, nodes = tokens_of(view.block, options, options.path, full=False).pattern, view.graph.nodes
                    self._schedule = schedule(options, pattern, nodes)
            self._schedule = self._schedule or schedule(options, pattern, nodes)
        return self._schedule

    @cached_property
    def attention_plan(self) -> tuple[str, str]:
        """How attention along all edges is computed, and why; empty where nobody has measured it."""
        options, every = self.recipe.model, self._attention()[0].every
        if not isinstance(self.task, NodeTask) or self.task.fanout or every == 1:
            return "", ""
        from espalier.mechanisms.pattern_attention import plan_choice

        assert isinstance(options, config.GraphTransformer)
        known = tokens_of(self.task.train.block, options, self._attention()[0].path, full=False).pattern
        heads = options.heads or 1
        why = plan_choice.choose(known, heads, (options.width or 0) // heads, self.kept)
        return plan_choice.name(known) if why else "", why

    def _outputs(self) -> int:
        """Columns of the network's answer: classes or tasks; for links, an embedding as wide as the layers."""
        if not isinstance(self.task, LinkTask):
            return self.task.outputs
        options = self.recipe.model
        return (options.width if isinstance(options, config.Network | config.GraphTransformer) else None) or 64

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The layers; a foreign network is one."""
        return list(model.layers) if isinstance(model, Gnn | GraphTransformer) else [model]

    def embeddings(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """The matrices of the first layer and of the last: what Muon leaves to AdamW."""
        if isinstance(model, GraphTransformer):
            return [
                *(one for part in (model.embed, model.head) for one in part.parameters() if one.ndim == 2),
                *(one for name, one in model.named_parameters() if name.endswith(".gates")),
                model.virtual,
            ]
        if isinstance(model, Gnn):
            return [parameter for at in (0, -1) for parameter in model.layers[at].parameters() if parameter.ndim == 2]
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        return [*matrices[:1], *matrices[-1:]]

    def recompute(self, model: nn.Module, mode: str) -> None:
        """Only `none`."""
        if mode != "none":
            raise UserError(f"train.recompute = {mode!r} is not possible for a graph.", do='train.recompute = "none"')

    # --- the data ------------------------------------------------------------------------------------------------

    def batches(self, step: int, shard: Shard) -> list[SubgraphBatch]:
        """Targets of a seeded permutation per epoch, with what they hear from; the whole graph's stay as they are."""
        made = self._batches(step, shard) if self.part is None else [self.part.batch(step)]
        if not isinstance(self.recipe.model, config.GraphTransformer):
            return made
        full = self._attention()[0].full(step)
        return [one._replace(blocks=(one.blocks[0]._replace(full=full), *one.blocks[1:]), step=step) for one in made]

    def _batches(self, step: int, shard: Shard) -> list[SubgraphBatch]:
        if isinstance(self.task, NodeTask) and not self.task.fanout:
            return self._standing(shard)
        made = None if self.stored is None else self.stored.batches(step, shard)
        if made is None:
            step = self._drawn(step)
            made = [self.task.batch(ids, step) for ids in self._cut(step, shard)]
        return [to_device(batch, self._device, self._dtype) for batch in made]

    def pack(self, shards: Sequence[Shard], packing: PackStart = ALONE) -> None:
        """Packs the batches of `shards`, the ranks of this machine, or opens what is packed. Needs a [store]."""
        assert self.stored is not None
        self.stored.pack(shards, self._cut, packing)

    def _drawn(self, step: int) -> int:
        """The step whose targets and neighbours are drawn: with a [store], that of a batch of the pool."""
        return step if self.stored is None else self.stored.drawn(step)

    def _standing(self, shard: Shard) -> list[SubgraphBatch]:
        """On the whole graph every step is the same: its batches are made, and moved to the device, once."""
        key = (shard.start, shard.stop, shard.micro_batch, shard.rounds)
        if key not in self._moved:
            made = [self.task.batch(ids, 0) for ids in self._cut(0, shard)]
            self._moved[key] = [to_device(batch, self._device, self._dtype) for batch in made]
        return self._moved[key]

    def _cut(self, step: int, shard: Shard) -> list[Array]:
        positions = self._positions(step, shard)
        return [self.task.ids(positions[at - shard.start : end - shard.start]) for at, end in shard.cuts if end > at]

    def _positions(self, step: int, shard: Shard) -> Array:
        items = self.task.items
        if isinstance(self.task, NodeTask) and not self.task.fanout:
            return np.arange(shard.start, shard.stop)
        found = []
        at, stop = (step * self.global_batch + one for one in (shard.start, shard.stop))
        while at < stop:
            epoch, place = divmod(at, items)
            until = min(stop, (epoch + 1) * items)
            found.append(self._permutation(epoch)[place : place + until - at])
            at = until
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _permutation(self, epoch: int) -> Array:
        if self._epoch != epoch:
            self._order = np.random.default_rng([self.recipe.train.seed, epoch]).permutation(self.task.items)
            self._epoch = epoch
        return self._order

    def documents(self, step: int, shard: Shard) -> list[str]:
        """Names of the targets."""
        return [self.task.name(int(item)) for item in self.task.ids(self._positions(self._drawn(step), shard))]

    def loss(self, model: nn.Module, batch: SubgraphBatch) -> tuple[Tensor, Tensor]:
        """The task's sum of losses, and how many answers it is of."""
        if self.reformation is not None:  # here, as batches are made while the step before is under way
            fewer = batch.blocks[0]._replace(recall=self.reformation.begin(batch.step))
            loss, weight = self.task.loss(model, batch._replace(blocks=(fewer, *batch.blocks[1:])))
            self.reformation.note(loss, weight, fewer.full)
            return loss, weight
        found = quantization.quantization_of(model)
        if self.part is not None:
            told = self.part.loss(model, batch)
            return told if found is None else found.loss(told)
        if found is None:
            return self.task.loss(model, batch)
        known = (batch.labels >= 0) if batch.labels.ndim == 1 else ~batch.labels.isnan()
        found.share(float(known.sum()) / self.nominal_weight)
        return found.loss(self.task.loss(model, batch))

    @property
    def whole_task(self) -> NodeTask:
        """The task of a run that passes over the whole graph for its nodes."""
        assert isinstance(self.task, NodeTask)
        return self.task

    def validation_samples(self) -> int:
        """Held-out nodes, links or graphs."""
        return self.task.validation

    def evaluate(self, model: nn.Module, shard: Shard) -> Mapping[str, tuple[float, float]]:
        """The task's figures with all neighbours; under `test_` those of the test part, which chooses nothing."""
        if self.part is not None and self.whole_task.train is self.whole_task.held:
            logits = self._evaluated = self.part.logits(model)
            return answers.held_out_figures(self.whole_task, shard, lambda ids: logits[ids])
        return self.task.evaluate(model, shard)

    def summary(self, totals: Mapping[str, float]) -> Mapping[str, float]:
        """As people read them."""
        return metrics.summary(totals)

    def sample(self, model: nn.Module) -> list[Artifact]:
        """Some held-out answers beside the truth; with a [store], what was read from where."""
        found = self._glimpses(model)
        if (bits := quantization.quantization_of(model)) is not None:
            widest = max((one.columns for one in bits.features), default=0)
            small = isinstance(self.task, NodeTask) and self.stored is None and self._passes(widest)
            figure = answers.score_name(self.graph)
            now = partial(quantization.packed, bits, lambda: self._score(model), figure) if small and widest else None
            found += [*quantization.tables(bits, None if now is None else now()), *quantization.curves(bits, now)]
        return [*found, self.stored.table()] if self.stored is not None and self.stored.features is not None else found

    def _passes(self, width: int) -> bool:
        """Whether all edges are here, and so few that rows of `width` may pass over them several times."""
        there = self.graph.partition
        edges = self.graph.edges if there is None else there.edges
        return edges * width <= CURVED and (there is None or partition_folder.complete(there))

    @torch.no_grad()
    def _score(self, model: nn.Module) -> float:
        """Of held-out nodes, in per cent."""
        logits, shard = infer(model, self.whole_task.held), Shard(0, self.task.validation, self.task.validation)
        totals = answers.held_out_figures(self.whole_task, shard, lambda ids: logits[ids])
        return answers.score(self.summary({name: total / weight for name, (total, weight) in totals.items() if weight}))

    def _glimpses(self, model: nn.Module) -> list[Artifact]:
        ids = self.task.parts.validation[:: max(1, self.task.validation // GLIMPSES)][:GLIMPSES].tolist()
        if isinstance(self.task, LinkTask):
            pairs = [(int(head), int(tail)) for head, tail in self.task.links.pairs[:, ids].T]
            links = [[link["name"], link["probability"]] for link in self.task.answers(model, pairs)]
            return [Table(("link", "probability that it is there (it is)"), links)] if links else []
        names = [self.task.name(item) for item in ids]
        rows = self._evaluated
        answers_given = self.task.answers(model, ids) if rows is None else answers.told(rows[ids], self.graph, names)
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
        if (
            isinstance(self.recipe.model, config.GraphTransformer)
            and not isinstance(self.task, GraphTask)
            and self.task.fanout
        ):
            notes.append(
                "nodes attend to those of their micro-batch, so its size changes what is learned (graph.fanout)"
            )
        alone = 0 if self.graph.partition else int((self.graph.degrees() == 0).sum())
        if alone:
            notes.append(f"{alone:,} of {self.graph.nodes:,} nodes have no neighbour; they see only themselves")
        return notes

    def decisions(self) -> tuple[str, ...]:
        """What was decided of the graph, in sentences; makes the format on first use."""
        model = self.bare()
        bits = () if self.recipe.quant is None else (quantization.sentence(quantization.equipped(self._quantized)),)
        if isinstance(model, GraphTransformer):
            told = (self.attention_plan[1], reformation.sentence(self.recipe))
            return (*self._said, *bits, self._attention()[1], *filter(None, told))
        if not isinstance(model, Gnn):
            return bits
        layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        assert self.recipe.graph is not None
        said = (*self._said, *bits)
        k = model.options.k if model.options.activation == "maxk" else None
        if self._each or not isinstance(self.task, NodeTask):
            return (*said, *graph_plan.passes(layers, k, once=False))
        if self._format is None and self.graph.partition is not None:
            self._format = f"Format: CSR; each rank reads its part of {self.graph.partition.ranks} alone."
        if self._format is None:
            self._format = graph_plan.formatted(
                self.task.train.block, layers, self.recipe.graph.format, self.recipe.train.steps or 0
            )
        return (*said, self._format, *graph_plan.passes(layers, k, once=model.aggregates_once))

    @cached_property
    def _told(self) -> QuantizedGraph:
        nodes, places = self.trained or (None, None)
        hidden, seen, task, stored = None, None, self.task, self.stored is not None
        if isinstance(task, NodeTask) and task.train is not task.held:
            hidden, seen = np.concatenate([task.parts.validation, task.parts.test]), task.train.graph
        graph = task.graph if isinstance(self.recipe.model, config.GraphTransformer) else self.graph
        return QuantizedGraph(graph, isinstance(task, GraphTask), nodes, places, stored, hidden, seen, self.signs)

    def input_signs(self) -> tuple[bool | None, ...]:
        """See `QuantizedGraph.signs`: what a run keeps of a network with quantizers."""
        return () if self.recipe.quant is None else (self._told.input_signed(),)

    @cached_property
    def _quantized(self) -> nn.Module:
        """The network with plain aggregation and quantizers, of which plans are told; it is not trained."""
        model = self.bare()
        quantized_networks.equip(model, cast("config.Quant", self.recipe.quant), self._told)
        return model

    # --- cost ----------------------------------------------------------------------------------------------------

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """By layer from its reach: of the whole graph, or of one step's drawn neighbourhood, per target."""
        bare, reach, times = self.bare(), self.reach(), self._times(micro_batch)
        if not isinstance(bare, Gnn):
            if isinstance(bare, GraphTransformer):
                together = self._each and not isinstance(self.task, GraphTask)
                work = layer_work.transformer_work(bare, reach[0], micro_batch, times, together)
            else:
                work = layer_work.foreign_work(bare, reach[0], len(self.task.graph.features[0]), micro_batch, times)
            if self.recipe.quant is None:
                return work
            return layer_work.quantized_work(work, self._quantized, reach[:1], times, precision)
        if self._over_ranks:
            share = micro_batch / self.global_batch
            reach = [Reach(one.sources * share, one.targets * share, one.edges * share) for one in reach]
        if self.recipe.quant is None:
            return layer_work.layer_work(bare, reach, micro_batch, precision, self._each)
        work = layer_work.layer_work(cast("Gnn", self._quantized), reach, micro_batch, precision, self._each)
        each = micro_batch if self._each else micro_batch * 0 + 1.0
        return layer_work.quantized_work(work, self._quantized, reach, each, precision)

    @property
    def _over_ranks(self) -> bool:
        """Whether a rank has its share of the graph."""
        return self.recipe.graph is not None and self.recipe.graph.halo is not None

    def _times(self, micro_batch: Any) -> Any:
        """How often the reach is passed over."""
        if self._each:
            return micro_batch
        return micro_batch / self.global_batch if self._over_ranks else micro_batch * 0 + 1.0

    @property
    def _each(self) -> bool:
        """Whether work grows with the micro-batch."""
        return isinstance(self.task, GraphTask) or bool(self.task.fanout)

    def reach(self) -> list[Reach]:
        """What each layer passes over, the farthest from the targets first; per target where batches are drawn."""
        if self._reach is None and self.graph.partition is not None:
            nodes, edges = self.graph.nodes, self.graph.partition.edges
            self._reach = [Reach(nodes, nodes, edges)] * max(1, self.whole_task.train.depth)
        if self._reach is None:
            batches = self.task.batch(self.task.ids(np.arange(self.global_batch)), 0)
            share = self.global_batch if self._each else 1
            self._reach = [
                Reach(block.sources / share, block.targets / share, block.edges / share) for block in batches.blocks
            ]
        return self._reach

    def stored_features(self) -> StoredFeatures:
        """What a plan is told of features on disk. Needs a [store]."""
        from espalier.mechanisms.disk_batches import mini_batches

        assert isinstance(self.task, NodeTask), "others have no [store]"
        return mini_batches.stored_features(self.recipe, self.task, self._inputs(), self.bare())

    def halos(self) -> Halos | TokenCut | None:
        """What a plan is told of rows that cross; None where the graph is not cut."""
        options = None if self.recipe.graph is None else self.recipe.graph.halo
        if options is None:
            return None
        network = self.bare()
        if isinstance(network, GraphTransformer):
            from espalier.mechanisms.pattern_attention.token_parallel import TokenCut

            graph = self.whole_task.train.graph
            return TokenCut(network, graph.nodes, options, graph.fingerprint())
        from espalier.graph.halo import depth
        from espalier.mechanisms.halo_exchange.halo_parallel import Cutting, Halos, takes_sums

        view, sums = self.whole_task.train, False
        crossing: Gnn | ForeignRows
        if isinstance(network, Gnn):
            crossing = network if self.recipe.quant is None else cast("Gnn", self._quantized)
            sums = takes_sums(network) and self.recipe.quant is None
        else:
            from espalier.graph.foreign_network import study, study_part

            if view.graph.partition is None:
                crossing = study(network, view.graph.features.shape[1], view.block)
            else:
                crossing = study_part(network, partition_folder.any_part(view.graph.partition.folder))
        weighed = None if self.graph.partition is not None else cache(partial(self._sampled, depth(crossing)))
        return Halos(Cutting(view.graph, view.style, sums), crossing, options, weighed)

    def drawn(self) -> Batches | None:
        """The batches that a plan weighs the whole graph against; None: there are none."""
        sampled = getattr(self.halos(), "sampled", None)
        if sampled is None:
            return None
        made: GraphWorkload = sampled()
        return Batches(made.whole_task.fanout, made.global_batch, -(-self.whole_task.items // made.global_batch))

    def _sampled(self, layers: int) -> GraphWorkload:
        """The same network on drawn batches of the same graph, which ranks share."""
        recipe, few = self.recipe, min(self.recipe.train.batch_tokens or SAMPLED, self.task.items)
        assert recipe.graph is not None
        drawn = msgspec.structs.replace(recipe.graph, halo=None, fanout=(FANOUT,) * layers)
        train = msgspec.structs.replace(recipe.train, batch_tokens=few)
        return GraphWorkload(msgspec.structs.replace(recipe, graph=drawn, train=train, quant=None), self.graph)

    def _inputs(self) -> tuple[int, float]:
        """Targets of the whole batch, and the input nodes of one that was drawn."""
        return self.global_batch, self.reach()[0].sources * (self.global_batch if self._each else 1)

    def anatomy(self, micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        """All of it is one layer: a graph network is not cut."""
        nothing = Work((), 0.0, 0.0, 0.0, 0.0, 0.0, micro_batch, micro_batch)
        return Anatomy(1, self.work(micro_batch, recompute, precision), nothing)


def _task(recipe: Recipe, graph: Graph, links: Links | None) -> Task:
    options, model = recipe.graph, recipe.model
    assert options is not None
    style, depth = style_of(model), _depth(model, options)

    def placed(graph: Graph) -> Graph:
        if graph.placed or not isinstance(model, config.GraphTransformer):
            return graph
        return encoded(averaged(graph, model.local), model.encodings, model.encoding_size)

    if options.task == "graph":
        return GraphTask(placed(graph), style, depth, summed=isinstance(model, config.Gin))
    if graph.starts is not None:
        raise UserError(
            f"{graph.origin} holds many graphs, and graph.task is {options.task!r}.", do='graph.task = "graph"'
        )
    if options.task == "link":
        links = links or link_prediction.split(graph, options.split, recipe.train.seed)
        return LinkTask(
            View(placed(links.rest), style, depth), links, options.fanouts, recipe.train.seed, options.negatives
        )
    seen = data.seen_in_training(graph) if options.inductive else graph
    held = View(placed(graph), style, depth)
    return NodeTask(
        View(placed(seen), style, depth) if options.inductive else held, held, options.fanouts, recipe.train.seed
    )


def _depth(model: config.Model, options: config.GraphOptions) -> int:
    if isinstance(model, config.Network):
        assert model.depth is not None
        return model.depth
    return len(options.fanouts)


def open_graph(
    recipe: Recipe,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    kept: kept_graph.KeptGraph | None = None,
) -> GraphWorkload:
    """Reads the graph that `[data]` names and divides it, as `kept` says where the run has begun. `recipe` must be
    resolved. Raises UserError."""
    assert recipe.graph is not None
    if not recipe.data:
        raise UserError("The recipe has no [data].", do='[data] path = "python:imports"')
    asked, seed, links = recipe.graph, recipe.train.seed, None
    before = None if kept is None or asked.task == "link" else kept.graph.kind
    graph = sources.load(recipe.data[0], msgspec.structs.replace(asked, target=asked.target or before), progress)
    graph = partition_folder.checked_for(recipe, graph, style_of(recipe.model))
    if kept is not None:
        graph = kept_graph.mapped(graph, kept)
    if asked.task != "link":
        graph = kept_graph.divided(graph, kept, asked.split, seed) if kept else data.divided(graph, asked.split, seed)
    said: list[str] = []
    if graph.partition is not None:
        said.append(f"Order: that in which {graph.origin} was cut.")
    elif recipe.graph.task != "graph" and not recipe.graph.fanouts and graph.starts is None:
        graph, sentence = graph_plan.ordered(graph, recipe.graph.order)
        said.append(sentence)
    if asked.task == "link" and kept is not None:
        links = kept_graph.split(graph, kept, asked.split, seed)
    found = GraphWorkload(recipe, graph, folder, said, links)
    if kept is not None and recipe.quant is not None:
        found.trained = kept_graph.other_nodes(graph, kept.graph, recipe)
    return found
