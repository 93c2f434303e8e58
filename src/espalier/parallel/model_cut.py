"""Model cut: what a rank holds of a model that ranks share by matrices or layers, and who else holds the same of it.

Mechanisms that cut a model say it here, by the parameters' names in the whole model; gradients, norms and checkpoints
follow it, whatever cut the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from espalier.comm.base import Traffic, traffic

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from espalier.comm.plain_collectives import RankGroup
    from espalier.parallel.mesh import Ranks


class Slab(NamedTuple):
    """Where a rank's part lies in a tensor of the whole model.

    Attributes:
        shape: of the tensor; offsets: of the part's first element.
        group: the ranks that together have all of it; None where nobody asks for that.
        stands: this rank stands for all that hold the same part.
    """

    shape: torch.Size
    offsets: tuple[int, ...]
    group: RankGroup = None
    stands: bool = True

    def box(self, part: Sequence[int]) -> tuple[slice, ...]:
        """The part, of that shape, in the tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, part, strict=True))


class Holders(NamedTuple):
    """The ranks of a replica that hold one part of a parameter, besides those of data parallelism.

    Attributes:
        copies: how many they are.
        group: they, where each has only a part of the gradient, so that it is summed over them; None: each has all.
    """

    copies: int = 1
    group: RankGroup = None


ALONE = Holders()


class Recut(NamedTuple):
    """A parameter that pipelines cut over unlike numbers of ranks: all that hold any of it are its `ModelCut.peers`.

    Attributes:
        pipelines: how many hold it.
        first: this rank's pipeline is the first of them.
        stands: this rank stands for its pipeline where each of its ranks has all of the parameter.
    """

    pipelines: int
    first: bool
    stands: bool


class ShardedStream(Protocol):
    """A residual stream of which each rank has some tokens, between matrices that ranks share."""

    def part(self, whole: Tensor) -> Tensor:
        """[batch, seq, width] to this rank's tokens. Differentiable."""

    def whole(self, part: Tensor) -> Tensor:
        """This rank's tokens to [batch, seq, width], on each rank. Differentiable."""


@dataclass
class ModelCut:
    """How a model is cut, as this rank sees it. Has state: every mechanism that cuts adds to it.

    Attributes:
        replica: the ranks that hold one model together: norms and a step's totals are sums over them.
        slabs: of each parameter that is cut, its part here.
        holders: of each parameter that other ranks of the cut hold too.
        idle: modules, and what takes part in other ranks' forward passes through each without one of its own.
        stream: how the residual stream lies on the ranks that share matrices; None: each has all of it.
        peers: where pipelines are cut at different layers or experts spread over ranks, the ranks of the run that hold
            the same part of each parameter, in order; empty: those of the mesh do.
        in_step: all of these ranks take part in each micro-batch.
        recut: of each parameter that other pipelines cut otherwise.
    """

    replica: dist.ProcessGroup
    slabs: dict[str, Slab] = field(default_factory=dict)
    holders: dict[str, Holders] = field(default_factory=dict)
    idle: list[tuple[nn.Module, Callable[[], None]]] = field(default_factory=list)
    stream: ShardedStream | None = None
    peers: dict[str, Ranks] = field(default_factory=dict)
    in_step: bool = False
    recut: dict[str, Recut] = field(default_factory=dict)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor of the shape of parameter `name`, of which this rank has a part. All ranks that share it call this;
        what is not cut is whole already."""
        slab = self.slabs.get(name)
        if slab is None or slab.group is None:
            return part
        whole = part.new_zeros(slab.shape)
        if slab.stands:
            whole[slab.box(part.shape)] = part
        with traffic(Traffic.CONTROL):
            slab.group.allreduce([whole]).wait()
        return whole

    def part(self, name: str, whole: Tensor, part: Sequence[int]) -> Tensor:
        """This rank's part, of shape `part`, of a tensor of the shape of parameter `name`; any other as it is."""
        slab = self.slabs.get(name)
        return whole if slab is None or whole.shape != slab.shape else whole[slab.box(part)]

    def held_by(self, name: str) -> Holders:
        """Who holds the part that this rank has of a parameter."""
        return self.holders.get(name, ALONE)
