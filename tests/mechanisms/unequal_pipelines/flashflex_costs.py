"""FlashFlex's own cost model, as its released scheduler has it (arXiv 2409.01143; Relaxed-System-Lab/FlashFlex,
Apache-2.0): what a plan of ours takes by the yardstick of the system it comes from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.mechanisms.unequal_pipelines.pipeline_solver import DeviceClass, Group, Slot, SolvedPipeline

BYTES = 2
TERA, GIGA = 2.0**40, 2.0**30


@dataclass(frozen=True)
class Card:
    """TFLOP/s and GB/s in the released code's units; memory in GiB."""

    flops: float
    memory: float
    bandwidth: float


@dataclass(frozen=True)
class ReleasedCosts:
    classes: Sequence[DeviceClass]
    cards: Sequence[Card]
    between: float
    layers: int
    micro_batches: int
    size: int = 1
    hidden: int = 4096
    sequence: int = 4096
    vocabulary: int = 32000
    recompute: bool = True
    awaits_sends: bool = True

    def _tokens(self) -> float:
        return float(self.size * self.sequence)

    def degrees(self, kind: int) -> Sequence[int]:
        return [one for one in (1, 2, 4, 8) if one <= self.classes[kind].devices]

    def layer(self, group: Group) -> float:
        h, s, v = self.hidden, self.sequence, self.vocabulary
        rho, tau = (96, 12) if self.recompute else (72, 8)
        work = rho * self.size * s * h * h * (1 + s / (6 * h) + v / (16 * self.layers * h))
        card = self.cards[group.kind]
        compute = work / (card.flops * TERA * group.tensor)
        message = self._tokens() * h * BYTES / (group.tensor * card.bandwidth * GIGA)
        return compute + tau * (group.tensor - 1) * message

    def extra(self, group: Group, slot: Slot) -> float:
        return 0.0

    def send(self, group: Group, following: Group) -> float:
        same = self.classes[group.kind].machine == self.classes[following.kind].machine
        whole = self._tokens() * self.hidden * BYTES
        inside = self.cards[following.kind].bandwidth
        across = self.cards[group.kind].bandwidth if same else self.between
        scatter = (following.tensor - 1) * whole / (following.tensor * inside * GIGA)
        return 2 * (whole / (across * GIGA) + scatter)

    def held(self, group: Group, slot: Slot, layers: int) -> float:
        """GiB of a device of a stage."""
        h, s, v, t = self.hidden, self.sequence, self.vocabulary, group.tensor
        ends = (slot.first * h * (v + s) + slot.last * (h + v * h)) * BYTES * 4 / GIGA
        ends += 2 * self.size * s * h * BYTES / GIGA
        return ends + layers * (12 * h * h / t * BYTES * 4 / GIGA + self.size * s * h / t * BYTES / GIGA)

    def most_layers(self, group: Group, slot: Slot) -> int:
        none, one = (self.held(group, slot, layers) for layers in (0, 1))
        return max(0, int((self.cards[group.kind].memory - none) / (one - none)))

    def profile(self, seconds: Sequence[float]) -> tuple[float, float]:
        slowest = max(seconds)
        up = sum(itertools.accumulate(seconds[:-1], max))
        down = sum(itertools.accumulate(seconds[:0:-1], max))
        return up + down - (len(seconds) - 1) * slowest, slowest

    def sync(self, pipelines: Sequence[SolvedPipeline]) -> float:
        if len(pipelines) == 1:
            return 0.0
        total = 0.0
        for layer in range(self.layers):
            held = [_holder(one, layer) for one in pipelines]
            least, most = min(one.tensor for one in held), max(one.tensor for one in held)
            machines = {self.classes[one.kind].machine for one in held}
            cards = [self.cards[one.kind].bandwidth for one in held]
            bandwidth = min(cards) if len(machines) == 1 else self.between
            each = 12 * self.hidden**2 * BYTES / (least * len(held) * bandwidth * GIGA)
            total += most * 2 * (len(held) - 1) * each
        return total

    def step(self, pipelines: float, sync: float) -> float:
        return 1.8 * pipelines + 1.1 * sync


def _holder(pipeline: SolvedPipeline, layer: int) -> Group:
    ends = itertools.accumulate(stage.layers for stage in pipeline.stages)
    return next(stage.group for stage, end in zip(pipeline.stages, ends, strict=True) if layer < end)
