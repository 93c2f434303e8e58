"""`[quant]` of a run: quantizers in its networks, what plans are told of them, and what a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from espalier.graph.data.graph import Signs
from espalier.graph.networks.base import placement
from espalier.graph.networks.gnn import Gnn
from espalier.graph.parts import partition_folder
from espalier.graph.run import GraphRun, Rounding
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.tasks import answers
from espalier.graph.tasks.graph_classification import GraphTask
from espalier.graph.tasks.node_classification import NodeTask
from espalier.mechanisms.few_bits import a2q, quantization, quantized_networks
from espalier.mechanisms.few_bits.cost import cost
from espalier.mechanisms.few_bits.options import Quant
from espalier.mechanisms.few_bits.quantized_graph import QuantizedGraph
from espalier.optim import adamw, schedules
from espalier.optim.base import owned_by
from espalier.parallel.workload import Shard, SummedLoss, to_device
from espalier.recipe import Adamw
from espalier.recipe.cost import VALUE_BYTES, Work
from espalier.train.trainer import seed_step

if TYPE_CHECKING:
    from espalier.graph.networks.layer_work import Reach
    from espalier.graph.sampling.subgraphs import SubgraphBatch
    from espalier.store.artifacts import Artifact

CURVED = 1 << 27
"""Edges times columns up to which packed bytes, and accuracy against them, are shown: it takes five inferences more."""
MOST_FLOPS = 2e11
"""Of training, up to which the network without `[quant]` is trained unasked: about ten seconds on one core."""


class QuantizedRounding(Rounding):
    """Quantizers in the networks of a run."""

    def __init__(self, run: GraphRun) -> None:
        super().__init__(run)
        if isinstance(run.task, NodeTask):
            run.task.every_node = True

    @property
    def options(self) -> Any:
        """`[quant]`."""
        return self.run.recipe.options(Quant)

    @cached_property
    def graph(self) -> QuantizedGraph:
        """What quantizers are told."""
        run = self.run
        task = self.run.task
        nodes, places = run.trained or (None, None)
        hidden = None
        seen = None
        if isinstance(task, NodeTask) and task.train is not task.view:
            hidden = np.concatenate([task.parts.validation, task.parts.test])
            seen = task.train.graph
        classified = isinstance(task, GraphTask)
        stored = run.recipe.store is not None
        steps = run.recipe.train.steps or 0
        return QuantizedGraph(run.network.told(run), classified, nodes, places, stored, hidden, seen, run.signs, steps)

    @property
    def signs(self) -> Signs:
        return (self.graph.input_signed,)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Bits of what, and bytes."""
        return (quantization.sentence(quantization.equipped(self.network)),)

    def equip(self, model: nn.Module) -> None:
        """Kernels, quantizers round them, and steps that fit the first targets."""
        run = self.run
        batch = None
        if run.graph.partition is None:
            batch = run.task.batch(run.task.ids(np.arange(min(run.global_batch, quantization.PROBED))), 0)
        quantized_networks.built(model, self.options, self.graph, batch)

    @cached_property
    def network(self) -> nn.Module:
        """With plain aggregation and quantizers."""
        model = self.run.bare()
        quantized_networks.equip(model, self.options, self.graph)
        return model

    def at_step(self, model: nn.Module, step: int) -> None:
        """Bit-widths come down by steps, however many passes each has."""
        for quantizer in a2q.quantizers_of(model):
            quantizer.step = step

    def begin(self, model: nn.Module, batch: SubgraphBatch) -> None:
        """Errors of rows count by the answers of the batch."""
        known = (batch.labels >= 0) if batch.labels.ndim == 1 else ~batch.labels.isnan()
        quantization.equipped(model).share(float(known.sum()) / self.run.nominal_weight)

    def loss(self, model: nn.Module, outcome: SummedLoss) -> SummedLoss:
        """With the penalty of a target."""
        return quantization.equipped(model).loss(outcome)

    def artifacts(self, model: nn.Module) -> Sequence[Artifact]:
        """Bits by degree, bytes, and accuracy against them where few inferences take little."""
        quantizers = quantization.equipped(model)
        run = self.run
        widest = max((feature.columns for feature in quantizers.features), default=0)
        small = isinstance(run.task, NodeTask) and run.recipe.store is None and self._passes(widest)
        figure = answers.score_name(run.graph)
        now = (
            partial(quantization.packed, quantizers, partial(score_of, run, model), figure)
            if small and widest
            else None
        )
        stored = None if now is None else now()
        plain = self._fp32(model, figure) if small else ""
        return [*quantization.tables(quantizers, stored, plain), *quantization.curves(quantizers, now)]

    def _fp32(self, model: nn.Module, figure: str) -> str:
        """What the network without quantization reaches, in words."""
        run = self.run
        asked = self.options.fp32
        if asked is False:
            return ""
        alone = set(run.recipe.mechanisms) == {"quant"} and run.graph.partition is None
        if not alone or not isinstance(run.recipe.train.optimizer, Adamw):
            return " (not trained: quant.fp32 is for AdamW, without other mechanisms)" if asked else ""
        plain: Any = run.like(run.recipe.changed(mechanisms={}))
        step = plain.work(plain.global_batch, "none", "fp32")
        if not asked and float(step.model_flops) * (run.recipe.train.steps or 0) > MOST_FLOPS:
            return " (not trained: quant.fp32 = true trains it)"
        score = score_of(plain, trained(plain, model))
        name = "" if figure == "accuracy" else f"{figure} "
        return f" ({name}{score:.1f} % after as many steps without [quant])"

    def _passes(self, width: int) -> bool:
        """Whether all edges are here, and so few that rows of `width` may pass over them several times."""
        parts = self.run.graph.partition
        edges = self.run.graph.edges if parts is None else parts.edges
        return edges * width <= CURVED and (parts is None or partition_folder.complete(parts))

    def work(self, work: Work, network: nn.Module, reach: Sequence[Reach], times: Any, precision: str) -> Work:
        """`work` of a network that `quantization.equip` was called with: its quantizers' time and memory come on top.
        A network that is not a `Gnn` is one layer, which passes over the first of `reach`."""
        size = max(4, VALUE_BYTES[precision])
        extra = []
        back = 2 * work.moved if work.moved_back is None else work.moved_back
        layers: list[Any] = list(network.layers) if isinstance(network, Gnn) else [network]
        for layer, reached in zip(layers, reach, strict=True):
            sources = reached.sources * times
            targets = reached.targets * times
            for name, part in layer.named_modules():
                if isinstance(part, a2q.FeatureQuantizer):
                    extra.append(cost(sources * part.columns, size, part.allocator.fits))
                elif isinstance(part, a2q.ColumnQuantizer) and part.dim:
                    extra.append(cost((targets if name.endswith("sums") else sources) * len(part.raw_step), size))
                elif parametrize.is_parametrized(part):
                    extra.append(cost(part.weight.numel(), size))
        return replace(
            work,
            moved=work.moved + sum(rounding.moved for rounding in extra),
            moved_back=back + sum(rounding.moved_back for rounding in extra),
            saved=work.saved + sum(rounding.saved for rounding in extra),
            transient=reduce(np.maximum, (rounding.transient for rounding in extra), work.transient),
        )


@torch.no_grad()
def score_of(run: GraphRun, model: nn.Module) -> float:
    """Of the held-out nodes of `run`, in per cent."""
    task = run.whole_task
    logits, shard = infer(model, task.view), Shard(0, task.validation, task.validation)
    totals = answers.held_out_figures(task, shard, lambda ids: logits[ids])
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    return answers.score(run.summary(means))


def trained(run: Any, model: nn.Module) -> nn.Module:
    """The network of `run`, which has no `[quant]`, trained in fp32 where `model` lies by the rank that reports: same
    seed, batches, loss, optimizer, schedule and steps."""
    recipe = run.recipe.train
    device = placement(model)["device"]
    network: nn.Module = run.build(device, torch.float32)
    optimizer = adamw.build(recipe.optimizer, owned_by(network))
    count = run.global_batch
    with torch.random.fork_rng(), torch.enable_grad():
        for step in range(recipe.steps):
            seed_step(device, hash((recipe.seed, step, 0)) & 0x7FFF_FFFF_FFFF_FFFF)
            network.train()
            for batch in run.batches(step, Shard(0, count, count)):
                total, weight = run.loss(network, to_device(batch, device))
                (total / weight).backward()
            if recipe.clip > 0:
                nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
            optimizer.step(schedules.factor(recipe.schedule, step, recipe.steps))
            network.zero_grad()
    return network.eval()
