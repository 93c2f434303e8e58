"""Graph transformers as the workload and the planner ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from espalier import recipe as config
from espalier.graph.run import GraphRun, NetworkAdapter
from espalier.graph.tasks.graph_classification import GraphTask
from espalier.graph.tasks.link_prediction import LinkTask
from espalier.graph.tasks.node_classification import NodeTask
from espalier.mechanisms.pattern_attention import edge_dropping as reformation
from espalier.mechanisms.pattern_attention import plan_choice
from espalier.mechanisms.pattern_attention.encodings import averaged, encoded
from espalier.mechanisms.pattern_attention.model import GraphTransformer, tokens_of
from espalier.mechanisms.pattern_attention.schedule import Schedule, bias_bytes, schedule
from espalier.recipe.cost import Product, Work
from espalier.track.progress import Stages

if TYPE_CHECKING:
    from pathlib import Path

    from espalier.graph.data.graph import Graph
    from espalier.graph.networks.layer_work import Reach
    from espalier.graph.sampling.subgraphs import SubgraphBatch
    from espalier.recipe import Recipe


class TransformerAdapter(NetworkAdapter):
    """Of graph transformers. Has state: what was decided of attention, once."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert isinstance(recipe.model, config.GraphTransformer)
        self.options = recipe.model
        self.width = recipe.model.width
        self._schedule: tuple[Schedule, str] | None = None
        self._plan: tuple[str, str] | None = None

    def placed(self, graph: Graph) -> Graph:
        """With averages over hops and encodings of each node's place."""
        if graph.placed:
            return graph
        return encoded(averaged(graph, self.options.local), self.options.encodings, self.options.encoding_size)

    def told(self, run: GraphRun) -> Graph:
        """That with encodings."""
        return run.task.graph

    def build(self, run: GraphRun, inputs: int, outputs: int) -> nn.Module:
        """With the schedule of attention."""
        model = GraphTransformer(self.options, inputs, outputs)
        model.schedule = self.schedule(run)[0]
        return model

    def schedule(self, run: GraphRun) -> tuple[Schedule, str]:
        """In which steps attention is full, and why; decided once."""
        if self._schedule is None:
            task, options, pattern, nodes = run.task, self.options, None, 0
            if not isinstance(task, GraphTask) and not task.fanout and options.attention == "auto":
                view = task.view if isinstance(task, LinkTask) else task.train
                with Stages("Making the pattern of attention"):
                    pattern = tokens_of(view.block, options, options.path, full=False).pattern
                    nodes = view.graph.nodes
                    self._schedule = schedule(options, pattern, nodes)
            self._schedule = self._schedule or schedule(options, pattern, nodes)
        return self._schedule

    def plan(self, run: GraphRun) -> tuple[str, str]:
        """How attention along all edges is computed, and why; empty where nobody has measured it."""
        if self._plan is None:
            self._plan = self._planned(run)
        return self._plan

    def _planned(self, run: GraphRun) -> tuple[str, str]:
        options = self.options
        chosen = self.schedule(run)[0]
        if not isinstance(run.task, NodeTask) or run.task.fanout or chosen.every == 1:
            return "", ""
        pattern = tokens_of(run.task.train.block, options, chosen.path, full=False).pattern
        heads = options.heads or 1
        why = plan_choice.choose(pattern, heads, (options.width or 0) // heads, run.frozen)
        return plan_choice.name(pattern) if why else "", why

    def embeddings(self, model: Any) -> Sequence[nn.Parameter]:
        """Of what embeds and of the head, gates and virtual tokens."""
        matrices = [
            parameter for part in (model.embed, model.head) for parameter in part.parameters() if parameter.ndim == 2
        ]
        gates = [parameter for name, parameter in model.named_parameters() if name.endswith(".gates")]
        return [*matrices, *gates, model.virtual]

    def at_step(self, run: GraphRun, batches: list[SubgraphBatch], step: int) -> list[SubgraphBatch]:
        """Whose attention is full or not."""
        full = self.schedule(run)[0].full(step)
        return [
            batch._replace(blocks=(batch.blocks[0]._replace(full=full), *batch.blocks[1:]), step=step)
            for batch in batches
        ]

    def notes(self) -> list[str]:
        """Of drawn batches."""
        if not self.depth:
            return []
        return ["nodes attend to those of their micro-batch, so its size changes what is learned (graph.fanout)"]

    def decisions(self, run: GraphRun, sentences: tuple[str, ...], bits: tuple[str, ...]) -> tuple[str, ...]:
        """When attention is full, how it is computed, and which edges are left out."""
        more = self.plan(run)[1], reformation.sentence(self.recipe)
        return (*sentences, *bits, self.schedule(run)[1], *filter(None, more))

    def work(self, run: GraphRun, micro_batch: Any, precision: str) -> Work:
        """By tokens and pairs of them."""
        model = run.bare()
        reach = run.batching.reach()
        times = run.batching.times(micro_batch)
        assert isinstance(model, GraphTransformer)
        together = run.batching.each and not isinstance(run.task, GraphTask)
        work = transformer_work(model, reach[0], micro_batch, times, together)
        return run.rounding.work(work, run.rounding.network, reach[:1], times, precision)

    def freeze(self, run: GraphRun, folder: Path) -> None:
        """How attention is computed."""
        if plan := self.plan(run)[0]:
            (folder / plan_choice.KEPT).write_text(plan, encoding="utf-8")


def transformer_work(model: GraphTransformer, reach: Reach, micro_batch: Any, times: Any, together: bool) -> Work:
    """Of a transformer whose tokens are passed over `times`; `together`: in full steps those of a micro-batch attend to
    one another."""
    pairs = reach.sources**2 * times * (times if together else 1)
    entries = (reach.edges + reach.sources) * times
    products, attention, moved, saved = model.work(reach.sources * times, entries, pairs)
    biases = bias_bytes(model.options, pairs if model.schedule.every else entries)
    made = tuple(Product(rows, inner, columns, leaf=at == 0) for at, (rows, inner, columns) in enumerate(products))
    return Work(made, attention, moved, saved + biases.saved, biases.transient, 0.0, micro_batch, micro_batch)
