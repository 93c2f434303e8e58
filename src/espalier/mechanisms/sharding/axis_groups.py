"""A placement's process groups: one for each axis and each kind of exchange, so that their launches never mix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from espalier.comm import Channel
from espalier.comm.base import Codec, Traffic, feedback, traffic
from espalier.comm.codecs import codec
from espalier.comm.plain_collectives import RankGroup
from espalier.mechanisms.sharding.async_collectives import Stage
from espalier.plan.axes.placement import Axis, Placement, Span, level
from espalier.plan.axes.placement_plan import LOSSLESS
from espalier.recipe.errors import UserError

Groups = dict[tuple[str, tuple[int, ...]], Any]
"""Groups made so far, by kind of exchange and members."""
Making = Callable[..., Stage]
"""(buffer, base, residual=None) -> the stage. `residual` is of the whole unit: see `comm.base.feedback`."""


@dataclass(frozen=True)
class Codecs:
    """What the groups of all meshes are to encode with: by class and level, and the machine of each rank."""

    names: Mapping[tuple[str, str], str]
    nodes: Sequence[int]
    given: dict[Any, set[tuple[str, str]]] = field(default_factory=dict)
    """What each group has already: meshes share groups."""


class AxisGroups:
    """The axes of one placement as seen from this rank. Ranks must make their meshes in the same order.

    Stages for `Exchanges` are made here: each takes a buffer that holds the span `base` of a unit, and works in place.

    Attributes:
        rounding: the lossy codecs of its axes, which need feedback.
    """

    def __init__(self, placement: Placement, channel: RankGroup, made: Groups, codecs: Codecs | None) -> None:
        self.placement = placement
        self.rounding: list[Codec] = []
        self._groups: dict[tuple[str, Axis], Any] = {}
        self.rank = 0
        if channel is None:  # one rank: there is no axis
            return
        self.rank = channel.rank()
        self._members = getattr(channel, "members", None) or tuple(dist.get_process_group_ranks(channel))
        for axis in placement.axes:
            groups = (self._join("reduce", axis, channel, made), self._join("gather", axis, channel, made))
            if codecs is not None:
                self._encode(axis, groups, codecs)

    def _join(self, kind: str, axis: Axis, channel: dist.ProcessGroup, made: Groups) -> Any:
        inside = axis.members(self.rank)
        key = (f"{kind} {axis.state} {self.placement.factors}", inside)
        if key not in made:
            limit = getattr(channel, "timeout", None)
            ranks = [self._members[index] for index in inside]
            made[key] = dist.new_group(ranks, timeout=limit, use_local_synchronization=True, group_desc=key[0])
        self._groups[kind, axis] = made[key]
        return made[key]

    def _encode(self, axis: Axis, groups: tuple[Any, Any], codecs: Codecs) -> None:
        """Gives the groups of an axis the codecs of its level. Sums of gradients may be rounded, with feedback; what is
        gathered (parameters, and sums on their way back) is not."""
        if not codecs.names:
            return
        where = level(codecs.nodes, axis.members(self.rank))
        for group, kind, sums in ((groups[0], Traffic.GRADIENTS, True), (groups[1], _gathered(axis), False)):
            name = codecs.names.get((kind._value_, where))
            if name is None:
                continue
            chosen = codec(name)
            if not sums and not chosen.lossless:
                chosen = codec(LOSSLESS + "!" * name.endswith("!"))
            if not chosen.lossless:
                self.rounding.append(chosen)
            if not isinstance(group, Channel):
                raise UserError(
                    f"Codec {name!r} was asked for, but the process group is not Espalier's.",
                    do="espalier.apply without `group`, or dist.init_process_group('espalier')",
                )
            if (kind, name) not in codecs.given.setdefault(group, set()):
                codecs.given[group].add((kind, name))
                group.use(kind, chosen)

    def held(self, length: int, state: Any) -> Span:
        """What this rank holds of a state of a unit of `length` elements."""
        return self.placement.held(self.rank, length, state)

    def scatter(self, length: int, *states: Any) -> list[Making]:
        """Stages that add up a unit over the axes of `states`, each leaving the rank's own part of the sum."""
        return [
            self._scattering(axis, before, after)
            for axis, before, after in self.placement.spans(self.rank, length)
            if axis.state in states
        ]

    def gather(self, length: int, *states: Any) -> list[Making]:
        """Stages that bring the parts of a unit together over the axes of `states`, coarsest first."""
        return [
            self._gathering(axis, before, after)
            for axis, before, after in reversed(list(self.placement.spans(self.rank, length)))
            if axis.state in states
        ]

    def reduce(self, length: int) -> list[Making]:
        """Stages that add up the rank's own part over its replicas, and leave the sum on all of them."""
        axes = [span for span in self.placement.spans(self.rank, length) if span[0].state == "replicas"]
        if not axes:
            return []
        *inner, (axis, span, _) = axes
        out = [self._scattering(*step) for step in inner]
        back = [self._gathering(*step) for step in reversed(inner)]
        total = _making(
            lambda part: self._groups["reduce", axis].allreduce([part], AllreduceOptions()), Traffic.GRADIENTS, span
        )
        return [*out, total, *back]

    def _scattering(self, axis: Axis, before: Span, after: Span) -> Making:
        scatter = self._groups["reduce", axis]._reduce_scatter_base
        return _making(
            lambda whole, part: scatter(part, whole, ReduceScatterOptions()), Traffic.GRADIENTS, before, after
        )

    def _gathering(self, axis: Axis, before: Span, after: Span) -> Making:
        gather = self._groups["gather", axis]._allgather_base
        return _making(lambda whole, part: gather(whole, part, AllgatherOptions()), _gathered(axis), before, after)


def _gathered(axis: Axis) -> Traffic:
    """The class of what is gathered along an axis."""
    return Traffic.GRADIENTS if axis.state == "replicas" else Traffic.PARAMETERS


def _making(carry: Callable[..., Any], kind: Traffic, *spans: Span) -> Making:
    """Stages that `carry` the `spans` of a buffer; a residual is of the first of them."""

    def made(buffer: Tensor, base: Span, residual: Tensor | None = None) -> Stage:
        def launch() -> Any:
            part = None if residual is None else residual[spans[0].start : spans[0].stop]
            with traffic(kind), feedback(part):
                return carry(*(buffer[span.within(base)] for span in spans))

        return launch

    return made
