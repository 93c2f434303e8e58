"""How does a token reach its expert? A Route takes tokens whose experts are chosen, and brings back what these say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from jaxtyping import Float, Int
    from torch import Tensor, nn

    from espalier.parallel.mesh import Ranks


class ExpertRoute(Protocol):
    """The seam `route` of a mixture of experts: dispatch, the experts' own work, combine. `local` is the plain answer.

    No token is dropped (no capacity), and no gradient is missing: an expert that no token chose gets zeros.
    """

    def __call__(
        self,
        x: Float[Tensor, "tokens width"],
        chosen: Int[Tensor, "tokens active"],
        weights: Float[Tensor, "tokens active"],
        experts: Sequence[nn.Module],
    ) -> Float[Tensor, "tokens width"]:
        """Sum over a token's `chosen` experts of weight times expert(token), in x's dtype.

        `experts` maps rows `[rows, width]` to rows; with expert parallelism, those that this rank holds.
        """


@dataclass(frozen=True)
class ExpertMap:
    """Which rank of a group holds which experts. Immutable.

    Attributes:
        ranks: of each rank its experts, in its own order; every expert is held once, numbered from 0.
    """

    ranks: tuple[Ranks, ...]

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Experts of each rank."""
        return [len(experts) for experts in self.ranks]

    def positions(self, device: torch.device) -> Tensor:
        """int64 [experts]: where each stands, rank after rank."""
        import torch

        experts_in_order = torch.tensor([expert for experts in self.ranks for expert in experts])
        positions = torch.empty_like(experts_in_order)
        positions[experts_in_order] = torch.arange(len(experts_in_order))
        return positions.to(device)


class RoutedTokens(NamedTuple):
    """What a rank brings to a layer: x, chosen and weights as in `ExpertRoute`, and a number that wants a gradient
    where one is recorded: then every rank comes to the backward pass, also one without tokens."""

    x: Tensor
    chosen: Tensor
    weights: Tensor
    anchor: Tensor


@dataclass
class ExpertsOverRanks:
    """A Route among ranks; its `experts` are those that this rank holds, in the order of the map.

    Attributes:
        group: the ranks of the map, all of which call this together, backward passes too.
    """

    group: dist.ProcessGroup
    expert_map: ExpertMap

    def __call__(
        self,
        x: Float[Tensor, "tokens width"],
        chosen: Int[Tensor, "tokens active"],
        weights: Float[Tensor, "tokens active"],
        experts: Sequence[nn.Module],
    ) -> Float[Tensor, "tokens width"]:
        """Sum over a token's chosen experts of weight times expert(token), in x's dtype, or autocast's."""
        import torch

        local = self.expert_map.ranks[self.group.rank()]
        assert len(experts) == len(local), f"{len(experts)} experts for {local}"
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # halves what crosses the links
        anchor = torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())
        return self._routed(RoutedTokens(x, chosen, weights, anchor), experts)

    def _routed(self, tokens: RoutedTokens, experts: Sequence[nn.Module]) -> Tensor:
        """The answer's own exchange."""
        raise AssertionError("each answer has its own")
