"""A run on a graph as its parts see it: what each may ask of the others, with the answers that most share.

The parts are the adapter of its kind of network, what rounds that network's values, and its way of batching
(`sampling.batch_strategy`). `lookup` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from espalier.graph.data.kept_graph import OtherNodes
from espalier.graph.networks import compiled_aggregate
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.graph.tasks.graph_classification import GraphTask
from espalier.graph.tasks.link_prediction import LinkTask
from espalier.graph.tasks.node_classification import NodeTask
from espalier.parallel.workload import Averages, SummedLoss

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from espalier.graph.data.graph import Graph, Signs
    from espalier.graph.networks.base import MessageBlock
    from espalier.graph.networks.gnn import Gnn
    from espalier.graph.networks.layer_work import Reach
    from espalier.graph.parts.halo import ForeignRows
    from espalier.graph.parts.partition_folder import Part
    from espalier.graph.sampling.subgraphs import SubgraphBatch, View
    from espalier.recipe import Recipe
    from espalier.recipe.cost import Anatomy, Cut, Work
    from espalier.store.artifacts import Artifact

Task = NodeTask | LinkTask | GraphTask


class GraphRun(Protocol):
    """What parts ask of a run: see `graph.workload.GraphWorkload`."""

    recipe: Recipe
    graph: Graph
    task: Task
    folder: str | Path | None
    frozen: Path | None
    trained: OtherNodes
    signs: Signs
    global_batch: int
    nominal_weight: float
    device: torch.device
    network: NetworkAdapter
    rounding: Rounding
    batching: Any
    step_loss: Callable[[nn.Module, SubgraphBatch], SummedLoss]

    @property
    def whole_task(self) -> NodeTask:
        """The task of a run that passes over the whole graph for its nodes."""

    def like(self, recipe: Recipe) -> GraphRun:
        """Of another recipe, on the same graph."""

    def bare(self) -> nn.Module:
        """The network with plain aggregation, seeded, on the CPU."""

    def placed(self, batch: SubgraphBatch) -> SubgraphBatch:
        """`batch` where the model is."""

    def summary(self, totals: Averages) -> Averages:
        """As people read them."""

    def anatomy(self, micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        """What plans are priced with."""

    def fingerprint(self) -> str:
        """Of the graph, its split included."""

    def halos(self) -> Any:
        """What a plan is told of rows that cross; None where the graph is not cut."""


class Rounding:
    """Of a run's networks. Has state: the run."""

    def __init__(self, run: GraphRun) -> None:
        self.run = run

    @property
    def signs(self) -> Signs:
        """What a run keeps of a network that rounds: `data.signed` of the features that it was trained on."""
        return ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """What a plan says of it."""
        return ()

    def equip(self, model: nn.Module) -> None:
        """Puts kernels, and what rounds, into a network."""
        compiled_aggregate.equip(model)

    @property
    def network(self) -> nn.Module:
        """The network with plain aggregation and with what rounds, of which plans are told; it is not trained."""
        return self.run.bare()

    def work(self, work: Work, network: nn.Module, reach: Sequence[Reach], times: Any, precision: str) -> Work:
        """`work` of `network`, which passes over `reach` so many `times`, with that of rounding."""
        return work

    def at_step(self, model: nn.Module, step: int) -> None:
        """Before the passes of a step of training."""

    def begin(self, model: nn.Module, batch: SubgraphBatch) -> None:
        """Before the loss of a batch of a run on one rank, or on ranks that draw their batches."""

    def loss(self, model: nn.Module, outcome: SummedLoss) -> SummedLoss:
        """(sum, weight) of a batch, with what rounding adds to the gradient."""
        return outcome

    def artifacts(self, model: nn.Module) -> Sequence[Artifact]:
        """What a report shows of it."""
        return []


class NetworkAdapter(Protocol):
    """What is asked of the networks of one kind of `[model]`, with the answers that most share. Has state: what was
    decided of them for one run.

    Attributes:
        depth: layers, of each of which a batch has a block; style: of the blocks.
        width: columns between layers; None: not known.
    """

    recipe: Recipe
    depth: int
    style: Style = Style(loops=False, scale="none")
    width: int | None = None

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.graph is not None
        self.recipe = recipe
        self.depth = len(recipe.graph.fanouts)

    def placed(self, graph: Graph) -> Graph:
        """`graph` with the features that the network reads."""
        return graph

    def told(self, run: GraphRun) -> Graph:
        """The graph that quantizers are told of."""
        return run.graph

    def build(self, run: GraphRun, inputs: int, outputs: int) -> nn.Module:
        """The network with plain aggregation, on the CPU."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The layers."""
        return list(model.layers)

    def embeddings(self, model: Any) -> Sequence[nn.Parameter]:
        """The matrices of the first layer and of the last."""

    def at_step(self, run: GraphRun, batches: list[SubgraphBatch], step: int) -> list[SubgraphBatch]:
        """`batches` of a step, as the network takes them then."""
        return batches

    def notes(self) -> list[str]:
        """What the user should know of it."""
        return []

    def decisions(self, run: GraphRun, sentences: tuple[str, ...], bits: tuple[str, ...]) -> tuple[str, ...]:
        """What was decided of the network, behind the `sentences` on the graph and on its `bits`."""

    def work(self, run: GraphRun, micro_batch: Any, precision: str) -> Work:
        """See `Workload.work`."""

    def freeze(self, run: GraphRun, folder: Path) -> None:
        """Keeps in `folder` what the run decided of the network."""

    # --- over parts of a graph -----------------------------------------------------------------------------------

    def takes_sums(self, model: Any) -> bool:
        """Whether every layer adds rows up with weights that are known, so that sums may cross instead."""
        return False

    def crossing(self, run: GraphRun) -> Gnn | ForeignRows:
        """What says which rows cross between parts."""

    def over_parts(self, model: Any, view: View, part: Part) -> ForeignRows | None:
        """`model` with layers that exchange rows, and what it needs of them (None: it is one of ours)."""

    def formatted(self, model: Any, block: MessageBlock) -> None:
        """Chooses the format of a part's edges, which are passed over at every step."""
