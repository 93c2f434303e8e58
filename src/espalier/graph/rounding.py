"""What rounds the values of a run's networks: the plain answer, nothing. `[quant]` has another (`lookup.rounding`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from espalier.graph import compiled_aggregate

if TYPE_CHECKING:
    from torch import Tensor, nn

    from espalier.graph.layer_work import Reach
    from espalier.graph.subgraphs import SubgraphBatch
    from espalier.graph.workload import GraphWorkload
    from espalier.recipe.cost import Work
    from espalier.store.artifacts import Artifact


class Rounding:
    """Of a run's networks. Has state: the run."""

    def __init__(self, run: GraphWorkload) -> None:
        self.run = run

    @property
    def signs(self) -> tuple[bool | None, ...]:
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

    def begin(self, model: nn.Module, batch: SubgraphBatch) -> None:
        """Before the loss of a batch of a run on one rank, or on ranks that draw their batches."""

    def loss(self, model: nn.Module, outcome: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(sum, weight) of a batch, with what rounding adds to the gradient."""
        return outcome

    def artifacts(self, model: nn.Module) -> Sequence[Artifact]:
        """What a report shows of it."""
        return []
