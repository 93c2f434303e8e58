"""Anybody's expert modules over the ranks of a process group, outside a recipe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm.base import Traffic, traffic
from espalier.mechanisms.expert_parallel.flashmoe import FlashMoE
from espalier.mechanisms.expert_parallel.flashmoe.transport import row_codec
from espalier.parallel.expert_map import ExpertMap
from espalier.parallel.local_experts import local
from espalier.recipe.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class RoutedExperts(nn.Module):
    """A mixture's experts, of which this rank holds some. Made by `route`. Has state: what was counted so far.

    Attributes:
        experts: those of this rank; count: of all ranks.
    """

    def __init__(self, experts: Iterable[nn.Module], expert_map: ExpertMap, path: Callable[..., Any]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.count = expert_map.count
        self._path = path

    def forward(
        self,
        x: Float[Tensor, "tokens width"],
        chosen: Int[Tensor, "tokens active"],
        weights: Float[Tensor, "tokens active"],
    ) -> Float[Tensor, "tokens width"]:
        """Sum over a token's `chosen` experts (numbers from 0 to `count` - 1, each once) of weight times expert(token).

        Raises UserError where the numbers are not of experts, or shapes do not fit.
        """
        if x.dim() != 2 or chosen.shape != weights.shape or len(chosen) != len(x) or chosen.dim() != 2:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in (x, chosen, weights))
            raise UserError(
                f"x, chosen and weights have the shapes {shapes}.",
                do="x [tokens, width], chosen and weights [tokens, active]",
            )
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.count:
            raise UserError(
                f"chosen has numbers from {int(chosen.min())} to {int(chosen.max())}; there are {self.count} experts.",
                do=f"numbers from 0 to {self.count - 1}",
            )
        return self._path(x, chosen, weights, list(self.experts))

    @property
    def load(self) -> list[int]:
        """Rows that each expert of this rank has got from all ranks so far; empty where all experts are here."""
        return list(getattr(self._path, "load", []))

    @property
    def waited(self) -> float:
        """Seconds in which this rank had nothing to do in forward and backward passes so far."""
        links = getattr(self._path, "links", None)
        return 0.0 if links is None else float(links.idle)


def route(
    experts: Sequence[nn.Module],
    group: dist.ProcessGroup | None = None,
    experts_by_rank: Sequence[Sequence[int]] | None = None,
    codec: str = "exact",
) -> RoutedExperts:
    """Experts over the ranks of `group`: tokens go to the rank that holds their expert, and answers come back
    (FlashMoE, arXiv 2506.04667). No token is dropped, nothing is padded, and no rank waits at a barrier.

    All ranks of the group call this, and then the module it gives, forward and backward passes alike, a rank without
    tokens too. Gradients of an expert are summed over the tokens of all ranks; those of what every rank holds are the
    caller's to sum. On processors; the group sends by Gloo, or by one of Espalier's channels.

    Args:
        experts: those that this rank holds, at least one in the group; each maps rows [rows, width] to rows.
        group: None: all ranks of `torch.distributed`, or where it is not set up this process alone.
        experts_by_rank: the numbers of each rank's experts, in its own order; None: consecutive, rank after rank.
        codec: `exact`, or `int8`: rows on their way to experts (gradients in the backward pass) take eight bits a
            value and one scale for each row.

    Raises:
        UserError: the numbers do not fit the experts of the ranks, or there is no such codec.

    >>> import torch
    >>> experts = [torch.nn.Linear(4, 4) for _ in range(3)]
    >>> mixture = route(experts)
    >>> chosen, weights = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    >>> mixture(torch.ones(2, 4), chosen, weights).shape
    torch.Size([2, 4])
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    mine = torch.tensor([len(experts)])
    sizes = [len(experts)]
    if group is not None:
        counts = [torch.zeros_like(mine) for _ in range(group.size())]
        with traffic(Traffic.CONTROL):
            dist.all_gather(counts, mine, group=group)
        sizes = [int(count) for count in counts]
    ends = list(itertools.accumulate(sizes, initial=0))
    ranks = (
        tuple(map(tuple, experts_by_rank))
        if experts_by_rank is not None
        else tuple(itertools.starmap(_numbers, itertools.pairwise(ends)))
    )
    if (
        [len(experts_of_rank) for experts_of_rank in ranks] != sizes
        or sorted(itertools.chain(*ranks)) != list(range(ends[-1]))
        or not ends[-1]
    ):
        stated = "; ".join(", ".join(map(str, experts_of_rank)) or "none" for experts_of_rank in ranks)
        raise UserError(
            f"experts_by_rank says {stated}; the ranks hold {', '.join(map(str, sizes))} experts.",
            why="each expert is held once, and they are numbered from 0",
            do="experts_by_rank=None, for consecutive numbers",
        )
    whole = ExpertMap(ranks)
    row_codec(codec)
    if group is None or group.size() == 1:
        return RoutedExperts(experts, whole, partial(_numbered, [ranks[0].index(number) for number in range(ends[-1])]))
    return RoutedExperts(experts, whole, FlashMoE(group, whole, codec=codec))


def _numbers(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last))


def _numbered(order: Sequence[int], x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """All experts here, in any order."""
    return local(x, chosen, weights, [experts[place] for place in order])
