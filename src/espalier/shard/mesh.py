"""A placement's process groups: one for each axis and each kind of exchange, so that their launches never mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from espalier.comm.base import Traffic, traffic
from espalier.shard.exchange import Stage
from espalier.shard.placement import Axis, Placement, Span

Groups = dict[tuple[str, tuple[int, ...]], Any]
"""Groups made so far, by kind of exchange and members."""


class Mesh:
    """The axes of one placement as seen from this rank. Ranks must make their meshes in the same order.

    Stages for `Exchanges` are made here: each takes a buffer that holds the span `base` of a unit, and works in place.
    """

    def __init__(self, placement: Placement, channel: dist.ProcessGroup, made: Groups) -> None:
        self.placement = placement
        self.rank = channel.rank()
        self._members = getattr(channel, "members", None) or tuple(dist.get_process_group_ranks(channel))
        self._groups: dict[tuple[str, Axis], Any] = {}
        for axis in placement.axes:
            self._join("reduce", axis, channel, made)
            self._join("gather", axis, channel, made)

    def _join(self, kind: str, axis: Axis, channel: dist.ProcessGroup, made: Groups) -> None:
        inside = axis.members(self.rank)
        key = (f"{kind} {axis.state} {self.placement.factors}", inside)
        if key not in made:
            limit = getattr(channel, "timeout", None)
            ranks = [self._members[index] for index in inside]
            made[key] = dist.new_group(ranks, timeout=limit, use_local_synchronization=True, group_desc=key[0])
        self._groups[kind, axis] = made[key]

    def held(self, length: int, state: Any) -> Span:
        """What this rank holds of a state of a unit of `length` elements."""
        return self.placement.held(self.rank, length, state)

    def scatter(self, length: int, *states: Any) -> list[Callable[[Tensor, Span], Stage]]:
        """Stages that add up a unit over the axes of `states`, each leaving the rank's own part of the sum."""
        return [
            self._scattering(axis, before, after)
            for axis, before, after in self.placement.spans(self.rank, length)
            if axis.state in states
        ]

    def gather(self, length: int, *states: Any) -> list[Callable[[Tensor, Span], Stage]]:
        """Stages that bring the parts of a unit together over the axes of `states`, coarsest first."""
        return [
            self._gathering(axis, before, after)
            for axis, before, after in reversed(list(self.placement.spans(self.rank, length)))
            if axis.state in states
        ]

    def reduce(self, length: int) -> list[Callable[[Tensor, Span], Stage]]:
        """Stages that add up the rank's own part over its replicas, and leave the sum on all of them."""
        axes = [one for one in self.placement.spans(self.rank, length) if one[0].state == "replicas"]
        if not axes:
            return []
        *inner, (axis, span, _) = axes
        out = [self._scattering(*one) for one in inner]
        back = [self._gathering(*one) for one in reversed(inner)]
        return [*out, self._summing(axis, span), *back]

    def _scattering(self, axis: Axis, before: Span, after: Span) -> Callable[[Tensor, Span], Stage]:
        group = self._groups["reduce", axis]

        def made(buffer: Tensor, base: Span) -> Stage:
            def launch() -> Any:
                with traffic(Traffic.GRADIENTS):
                    return group._reduce_scatter_base(
                        buffer[after.within(base)], buffer[before.within(base)], ReduceScatterOptions()
                    )

            return launch

        return made

    def _gathering(self, axis: Axis, before: Span, after: Span) -> Callable[[Tensor, Span], Stage]:
        group = self._groups["gather", axis]
        kind = Traffic.GRADIENTS if axis.state == "replicas" else Traffic.PARAMETERS

        def made(buffer: Tensor, base: Span) -> Stage:
            def launch() -> Any:
                with traffic(kind):
                    return group._allgather_base(
                        buffer[before.within(base)], buffer[after.within(base)], AllgatherOptions()
                    )

            return launch

        return made

    def _summing(self, axis: Axis, span: Span) -> Callable[[Tensor, Span], Stage]:
        group = self._groups["reduce", axis]

        def made(buffer: Tensor, base: Span) -> Stage:
            def launch() -> Any:
                with traffic(Traffic.GRADIENTS):
                    return group.allreduce([buffer[span.within(base)]], AllreduceOptions())

            return launch

        return made
