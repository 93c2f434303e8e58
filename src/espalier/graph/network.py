"""Networks of graphs: what the workload, the planner and mechanisms ask of each kind of `[model]`, and of what rounds
the values of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from espalier.graph.neighbor_sampler import Style

if TYPE_CHECKING:
    from pathlib import Path

    from espalier.graph.base import MessageBlock, Rows
    from espalier.graph.coded_rows import RowSize
    from espalier.graph.data import Graph
    from espalier.graph.gnn import Gnn
    from espalier.graph.halo import ForeignRows
    from espalier.graph.partition_folder import Part
    from espalier.graph.subgraphs import SubgraphBatch, View
    from espalier.graph.workload import GraphWorkload
    from espalier.recipe import Recipe
    from espalier.recipe.cost import Work

QUANTIZED = "quantization"
"""Attribute of a network with quantizers: its `Quantizers`."""


class Quantizers(Protocol):
    """What rounds the values of a network (`mechanisms.few_bits.quantization.Quantization`). `packed`: rows that layers
    read are put in packages and taken out of them."""

    packed: bool

    def enters(self, block: MessageBlock, features: Tensor) -> Tensor:
        """Features of a forward pass that begins, as they are stored."""

    def pack(self, layer: nn.Module, rows: Rows, placed: dict[str, Any]) -> None:
        """Rows of all nodes, before `layer` reads them in pieces."""

    def row_size(self, model: nn.Module, at: int, size: int) -> RowSize | None:
        """Bytes of a row that layer `at` of `model` sums where it crosses between ranks as codes (values beside them
        take `size` bytes each); None: it crosses as it is."""


def quantizers_of(model: object) -> Quantizers | None:
    """Of a network that rounds its values."""
    found: Quantizers | None = getattr(model, QUANTIZED, None)
    return found


class GraphNetwork(nn.Module):
    """A network of ours: it is called with features and message blocks."""

    def answers(self, features: Tensor, blocks: tuple[MessageBlock, ...]) -> Tensor:
        """What it says of the last block's targets."""
        raise NotImplementedError


class NetworkAdapter:
    """What is asked of the networks of one kind of `[model]`, with the answers that most share. Has state: what was
    decided of them for one run.

    Attributes:
        depth: layers, of each of which a batch has a block; style: of the blocks.
        width: columns between layers; None: not known.
    """

    style = Style(loops=False, scale="none")
    width: int | None = None

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.graph is not None
        self.recipe, self.depth = recipe, len(recipe.graph.fanouts)

    def placed(self, graph: Graph) -> Graph:
        """`graph` with the features that the network reads."""
        return graph

    def told(self, run: GraphWorkload) -> Graph:
        """The graph that quantizers are told of."""
        return run.graph

    def build(self, run: GraphWorkload, inputs: int, outputs: int) -> nn.Module:
        """The network with plain aggregation, on the CPU."""
        raise NotImplementedError

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The layers."""
        return list(model.layers)

    def embeddings(self, model: Any) -> Sequence[nn.Parameter]:
        """The matrices of the first layer and of the last."""
        raise NotImplementedError

    def at_step(self, run: GraphWorkload, batches: list[SubgraphBatch], step: int) -> list[SubgraphBatch]:
        """`batches` of a step, as the network takes them then."""
        return batches

    def notes(self) -> list[str]:
        """What the user should know of it."""
        return []

    def decisions(self, run: GraphWorkload, said: tuple[str, ...], bits: tuple[str, ...]) -> tuple[str, ...]:
        """What was decided of the network, behind what is `said` of the graph and of its `bits`."""
        raise NotImplementedError

    def work(self, run: GraphWorkload, micro_batch: Any, precision: str) -> Work:
        """See `Workload.work`."""
        raise NotImplementedError

    def freeze(self, run: GraphWorkload, folder: Path) -> None:
        """Keeps in `folder` what the run decided of the network."""

    # --- over parts of a graph -----------------------------------------------------------------------------------

    def takes_sums(self, model: Any) -> bool:
        """Whether every layer adds rows up with weights that are known, so that sums may cross instead."""
        return False

    def crossing(self, run: GraphWorkload) -> Gnn | ForeignRows:
        """What says which rows cross between parts."""
        raise NotImplementedError

    def over_parts(self, model: Any, view: View, part: Part) -> ForeignRows | None:
        """`model` with layers that exchange rows, and what it needs of them (None: it is one of ours)."""
        raise NotImplementedError

    def formatted(self, model: Any, block: MessageBlock) -> None:
        """Chooses the format of a part's edges, which are passed over at every step."""
