"""Model cut: what a rank holds of a model that ranks share by matrices or layers, and who else holds the same of it.

Mechanisms that cut a model say it here, by the parameters' names in the whole model; gradients, norms and checkpoints
follow it, whatever cut the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class Slab(NamedTuple):
    """Where a rank's part lies in a tensor of the whole model: the tensor's `shape`, the part's first element."""

    shape: torch.Size
    offsets: tuple[int, ...]


class Holders(NamedTuple):
    """The ranks of a replica that hold one part of a parameter, besides those of data parallelism.

    Attributes:
        copies: how many they are.
        group: they, where each has only a part of the gradient, so that it is summed over them; None: each has all.
    """

    copies: int = 1
    group: dist.ProcessGroup | None = None


ALONE = Holders()


@dataclass
class ModelCut:
    """How a model is cut, as this rank sees it. Has state: every mechanism that cuts adds to it.

    Attributes:
        replica: the ranks that hold one model together: norms and a step's totals are sums over them.
        slabs: of each parameter that is cut, its part here.
        holders: of each parameter that other ranks of the cut hold too.
    """

    replica: dist.ProcessGroup
    slabs: dict[str, Slab] = field(default_factory=dict)
    holders: dict[str, Holders] = field(default_factory=dict)

    def held_by(self, name: str) -> Holders:
        """Who holds the part that this rank has of a parameter."""
        return self.holders.get(name, ALONE)
