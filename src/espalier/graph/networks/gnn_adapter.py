"""Our layered networks (`gnn`) as the workload, the planner and parts of a graph ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from espalier import recipe as config
from espalier.graph.networks import graph_plan, layer_work
from espalier.graph.networks.gnn import Gnn, GraphAttention, Layer, style_of
from espalier.graph.networks.network import quantizers_of
from espalier.graph.parts import halo
from espalier.graph.run import GraphRun, NetworkAdapter
from espalier.graph.tasks.link_prediction import LinkTask

if TYPE_CHECKING:
    from espalier.graph.networks.base import MessageBlock
    from espalier.graph.parts.partition_folder import Part
    from espalier.graph.sampling.subgraphs import View
    from espalier.recipe import Recipe
    from espalier.recipe.cost import Work


class GnnAdapter(NetworkAdapter):
    """Of GCN, GraphSAGE, GAT and GIN. Has state: the format of the whole graph, once chosen."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert isinstance(recipe.model, config.Network)
        assert recipe.model.depth is not None
        self.options = recipe.model
        self.depth = recipe.model.depth
        self.width = recipe.model.width
        self.style = style_of(recipe.model)
        self._format: str | None = None

    def build(self, run: GraphRun, inputs: int, outputs: int) -> nn.Module:
        """With the layers of the recipe."""
        return Gnn(self.options, inputs, outputs, run.graph.values and not isinstance(run.task, LinkTask))

    def embeddings(self, model: Any) -> Sequence[nn.Parameter]:
        """Of both layers."""
        return [parameter for at in (0, -1) for parameter in model.layers[at].parameters() if parameter.ndim == 2]

    def decisions(self, run: GraphRun, sentences: tuple[str, ...], bits: tuple[str, ...]) -> tuple[str, ...]:
        """The format of the edges, which is chosen now, and what each layer aggregates."""
        model = run.bare()
        assert isinstance(model, Gnn)
        layers = model.layers
        k = model.options.k if model.options.activation == "maxk" else None
        if not run.batching.stands:
            return (*sentences, *bits, *graph_plan.passes(layers, k, once=False))
        if self._format is None:
            partition = run.graph.partition
            self._format = (
                self._format_of(run.whole_task.train.block, layers)
                if partition is None
                else f"Format: CSR; each rank reads its part of {partition.ranks} alone."
            )
        return (*sentences, *bits, self._format, *graph_plan.passes(layers, k, once=model.aggregates_once))

    def _format_of(self, block: MessageBlock, layers: Sequence[Layer]) -> str:
        assert self.recipe.graph is not None
        return graph_plan.formatted(block, layers, self.recipe.graph.format, self.recipe.train.steps or 0)

    def work(self, run: GraphRun, micro_batch: Any, precision: str) -> Work:
        """By layer, from what it passes over."""
        batching = run.batching
        rounding = run.rounding
        network = rounding.network
        reach = batching.own_reach(micro_batch)
        assert isinstance(network, Gnn)
        work = layer_work.layer_work(network, reach, micro_batch, precision, batching.each)
        return rounding.work(work, network, reach, micro_batch if batching.each else micro_batch * 0 + 1.0, precision)

    # --- over parts of a graph -----------------------------------------------------------------------------------

    def takes_sums(self, model: Any) -> bool:
        """None of GAT, MaxK, dropout of features and quantizers does."""
        return takes_sums(model)

    def crossing(self, run: GraphRun) -> Gnn:
        """The network itself."""
        network = run.rounding.network
        assert isinstance(network, Gnn)
        return network

    def over_parts(self, model: Any, view: View, part: Part) -> None:
        """Layers exchange what they aggregate."""
        halo.equip(model)

    def formatted(self, model: Any, block: MessageBlock) -> None:
        """For kernels of processors; products of GPUs are measured."""
        block.forms.known["stands"] = True
        if next(model.parameters()).device.type == "cpu":
            self._format_of(block, model.layers)


def takes_sums(network: Gnn) -> bool:
    """See `NetworkAdapter.takes_sums`."""
    attends = any(isinstance(layer, GraphAttention) for layer in network.layers)
    plain = network.options.activation != "maxk" and not network.drops_features
    return not attends and plain and quantizers_of(network) is None
