"""The parts of a layout of unequal devices, and the two of them that are solved exactly: layers of the stages of one
pipeline, and micro-batches of pipelines side by side. Pure; no torch. See
`mechanisms.unequal_pipelines.pipeline_search`.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol


class DeviceClass(NamedTuple):
    """Equal devices of one machine. `like`: the number of the first class that costs the same in its place, links
    included; None: this one."""

    name: str
    machine: int
    devices: int
    like: int | None = None


class Group(NamedTuple):
    """The devices of one stage: so many of one class share its matrices."""

    kind: int
    tensor: int = 1


class Slot(NamedTuple):
    """Where a stage stands in its pipeline: this number of so many."""

    number: int
    stages: int

    @property
    def first(self) -> bool:
        """It holds the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """It holds the head."""
        return self.number == self.stages - 1


class StageCosts(Protocol):
    """What a search asks of a model on a cluster. Seconds are of one micro-batch, forward and backward."""

    @property
    def layers(self) -> int:
        """Of the model."""

    @property
    def micro_batches(self) -> int:
        """Of a step, over all pipelines."""

    def degrees(self, kind: int) -> Sequence[int]:
        """Tensor degrees that this class can take; empty: it cannot be used."""

    def layer(self, group: Group) -> float:
        """Seconds of one layer."""

    def extra(self, group: Group, slot: Slot) -> float:
        """Seconds of what a stage computes beside its layers: embedding, head and loss."""

    @property
    def awaits_sends(self) -> bool:
        """Whether a stage computes nothing while it hands over; else that is hidden but where a pipeline fills and
        drains, or takes longer than the passes."""

    def send(self, group: Group, following: Group) -> float:
        """Seconds that a stage spends on handing over to the next one and back."""

    def most_layers(self, group: Group, slot: Slot) -> int:
        """Layers that fit into its memory; 0: none."""

    def profile(self, seconds: Sequence[float]) -> tuple[float, float]:
        """(fixed, each): a pipeline of stages that take so many seconds takes `fixed + micro-batches * each`."""

    def sync(self, pipelines: Sequence[SolvedPipeline]) -> float:
        """Seconds of summing gradients layer by layer, and of the optimizer; infinite: these cannot run together."""

    def step(self, pipelines: float, sync: float) -> float:
        """Seconds of a step, of its slowest pipeline's and those of `sync`."""


class SolvedStage(NamedTuple):
    """A stage: its devices, its layers, and seconds of one micro-batch."""

    group: Group
    layers: int
    seconds: float


@dataclass(frozen=True)
class SolvedPipeline:
    """Stages in order; `fixed + n * each` are the seconds of n micro-batches; `micro_batches`: its share of a step."""

    stages: tuple[SolvedStage, ...]
    fixed: float
    each: float
    micro_batches: int = 0

    @property
    def seconds(self) -> float:
        """Of its share."""
        return self.fixed + self.micro_batches * self.each

    def on(self, kinds: Sequence[int]) -> SolvedPipeline:
        """The same on other classes."""
        moved = (stage._replace(group=stage.group._replace(kind=kinds[stage.group.kind])) for stage in self.stages)
        return replace(self, stages=tuple(moved))

    @property
    def devices(self) -> Counter[int]:
        """How many of each class it has."""
        counts = Counter[int]()
        for group, _, _ in self.stages:
            counts[group.kind] += group.tensor
        return counts


@dataclass(frozen=True)
class UnequalLayout:
    """What a search gives: pipelines with their shares, and seconds of a step.

    Attributes:
        seconds: of a step; sync: of them those of gradients and optimizer.
        unused: devices of each class that are left out.
        priced: pipelines that were solved.
        with_unused: class -> seconds of the best step that was found with all its devices in use, where some of
            them are left out.
    """

    pipelines: tuple[SolvedPipeline, ...]
    seconds: float
    sync: float
    unused: Mapping[int, int]
    priced: int = 0
    with_unused: Mapping[int, float] = field(default_factory=dict)

    @property
    def devices(self) -> Counter[int]:
        """How many of each class it has."""
        return sum((pipeline.devices for pipeline in self.pipelines), Counter[int]())


# --- one pipeline: its layers -------------------------------------------------------------------------------------


class StageRate(NamedTuple):
    """What is known of a stage: seconds of a layer, seconds beside, the most layers that fit, and seconds of handing
    over to the next stage."""

    layer: float
    extra: float
    most: int
    send: float = 0.0


def solve_layers(layers: int, stages: Sequence[StageRate], weight: float) -> tuple[int, ...] | None:
    """Layers of each stage that minimise `sum(t) + weight * max(t)`, t = extra + layers * layer, exactly.

    1F1B with n micro-batches takes `sum(t) + (n - 1) * max(t)`. The slowest stage's seconds are one of
    `stages * layers` values. Given that bound, layers go to the stages whose layers are fastest, as far as bound and
    memory allow, which is optimal.

    Args:
        layers: of the model; each stage gets one at least.
        weight: micro-batches after the first.

    Returns:
        Layers of each stage; None where they do not fit.
    """
    if sum(stage.most for stage in stages) < layers or min(stage.most for stage in stages) < 1 or len(stages) > layers:
        return None
    room = layers - len(stages) + 1
    most: dict[tuple[float, float], int] = {}
    for layer, extra, fitting, _ in stages:
        most[layer, extra] = max(fitting, most.get((layer, extra), 0))
    bounds = sorted({extra + n * layer for (layer, extra), fit in most.items() for n in range(1, min(fit, room) + 1)})
    first = bisect.bisect_left(bounds, True, hi=len(bounds) - 1, key=lambda bound: _fits(layers, stages, bound))
    order = sorted(range(len(stages)), key=lambda index: (stages[index].layer, index))
    least = sum(stage.extra for stage in stages) + _filled_seconds(layers, stages, order, math.inf)[0]
    best, best_seconds = None, math.inf
    for bound in bounds[first:]:
        if weight * bound + least >= best_seconds:
            break
        seconds, filled = _filled_seconds(layers, stages, order, bound)
        slowest = max(stage.extra + n * stage.layer for stage, n in zip(stages, filled, strict=True))
        whole = seconds + sum(stage.extra for stage in stages) + weight * slowest
        if whole < best_seconds - 1e-12 * abs(whole):
            best, best_seconds = tuple(filled), whole
    return best


def _caps(stages: Sequence[StageRate], bound: float) -> list[int]:
    """The most layers of each stage that keep it within the bound."""
    if math.isinf(bound):
        return [stage.most for stage in stages]
    return [min(stage.most, int((bound - stage.extra) / stage.layer * (1 + 1e-12) + 1e-9)) for stage in stages]


def _fits(layers: int, stages: Sequence[StageRate], bound: float) -> bool:
    caps = _caps(stages, bound)
    return min(caps) >= 1 and sum(caps) >= layers


def _filled_seconds(
    layers: int, stages: Sequence[StageRate], order: Sequence[int], bound: float
) -> tuple[float, list[int]]:
    """(seconds of all layers, layers of each stage): one each, the others to the fastest first."""
    caps, filled, rest = _caps(stages, bound), [1] * len(stages), layers - len(stages)
    for index in order:
        more = min(rest, caps[index] - 1)
        filled[index] += more
        rest -= more
    return sum(n * stage.layer for stage, n in zip(stages, filled, strict=True)), filled


# --- shares of a step ---------------------------------------------------------------------------------------------


def share_micro_batches(profiles: Sequence[tuple[float, float]], count: int) -> tuple[int, ...] | None:
    """Micro-batches of each pipeline, so that the last one to end ends as early as it can, exactly; each has one at
    least. `profiles`: (fixed, each) as `StageCosts.profile`. None where there are more pipelines than micro-batches."""
    if len(profiles) > count:
        return None
    level = (count + sum(fixed / each for fixed, each in profiles)) / sum(1 / each for _, each in profiles)
    shares = [max(1, int((level - fixed) / each)) for fixed, each in profiles]
    while sum(shares) > count:
        at = max((n for n, share in enumerate(shares) if share > 1), key=lambda n: _ends(profiles[n], shares[n]))
        shares[at] -= 1
    queue = [(_ends(profile, shares[n] + 1), n) for n, profile in enumerate(profiles)]
    heapq.heapify(queue)
    for _ in range(count - sum(shares)):
        _, at = queue[0]
        shares[at] += 1
        heapq.heapreplace(queue, (_ends(profiles[at], shares[at] + 1), at))
    return tuple(shares)


def side_by_side(
    pipelines: Sequence[SolvedPipeline], classes: Sequence[DeviceClass], costs: StageCosts, shares: Sequence[int] = ()
) -> UnequalLayout | None:
    """Pipelines that train together, with the best `shares` where none are given; None: one would have none."""
    profiles = [(pipeline.fixed, pipeline.each) for pipeline in pipelines]
    best = shares or share_micro_batches(profiles, costs.micro_batches)
    if best is None:
        return None
    shared = tuple(replace(pipeline, micro_batches=share) for pipeline, share in zip(pipelines, best, strict=True))
    sync = costs.sync(shared)
    seconds = costs.step(max(pipeline.seconds for pipeline in shared), sync)
    layout = UnequalLayout(shared, seconds, sync, {})
    left = {kind: device_class.devices - layout.devices[kind] for kind, device_class in enumerate(classes)}
    return replace(layout, unused={kind: count for kind, count in left.items() if count})


def _ends(profile: tuple[float, float], share: int) -> float:
    return profile[0] + share * profile[1]
