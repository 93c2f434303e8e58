"""Which devices run the slices of a wave: those that hold the parameters or the input, on one node, with memory free.
Pure; no torch. See `mechanisms.task_waves.spindle`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from espalier.mechanisms.task_waves.metaops import MetaOp
from espalier.mechanisms.task_waves.wave_solver import Slice, Wave


@dataclass(frozen=True)
class Devices:
    """The node of each device; `memory` of one in bytes; seconds per byte `inside` a node and `between` nodes;
    `slower`: seconds of each device over those of the MetaOps, empty where all are alike."""

    nodes: tuple[int, ...]
    memory: float = math.inf
    inside: float = 0.0
    between: float = 0.0
    slower: tuple[float, ...] = ()

    def slowest(self, group: Sequence[int]) -> float:
        """Of devices that divide samples evenly, the one that the others wait for."""
        return max((self.slower[device] for device in group), default=1.0) if self.slower else 1.0


class PlacedWaves(NamedTuple):
    """Waves with devices, and the bytes on each device; `most`: of the fullest."""

    waves: tuple[Wave, ...]
    bytes: tuple[float, ...]

    @property
    def most(self) -> float:
        """Bytes on the fullest device."""
        return max(self.bytes)


def crossing(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, share of the samples) that go from one group to another. Each divides the samples evenly, in
    the order of its devices."""
    for a, sender in enumerate(source):
        for b, receiver in enumerate(target):
            low, high = max(a / len(source), b / len(target)), min((a + 1) / len(source), (b + 1) / len(target))
            if high > low and sender != receiver:
                yield sender, receiver, high - low


def summed(size: float, ranks: Collection[int], devices: Devices) -> float:
    """Seconds in which devices sum `size` bytes in a ring."""
    far = len({devices.nodes[rank] for rank in ranks}) > 1
    return 2 * (len(ranks) - 1) / len(ranks) * size * (devices.between if far else devices.inside)


def exchange(metaops: Sequence[MetaOp], planned: Sequence[Wave], devices: Devices) -> float:
    """Seconds of summing the gradients of each operator over the devices that hold it, one after the other."""
    by_name = {one.name: one for one in metaops}
    held: dict[tuple[str, int], set[int]] = {}
    size: dict[tuple[str, int], float] = {}
    for one in (one for wave in planned for one in wave):
        metaop = by_name[one.metaop]
        for k in range(metaop.first + one.first, metaop.first + one.first + one.operators):
            held.setdefault((metaop.parameters, k), set()).update(one.devices)
            size[metaop.parameters, k] = metaop.gradients
    return sum(summed(size[place], ranks, devices) for place, ranks in held.items())


class Links:
    """Links of devices, each of which sends and receives one message after the other. Has state: until when each is
    busy."""

    def __init__(self, devices: Devices) -> None:
        self.devices, self.fast = devices, not (devices.inside or devices.between)
        self._busy: dict[tuple[int, str], float] = {}

    def moved(self, size: float, groups: tuple[Sequence[int], Sequence[int]], at: float) -> float:
        """When `size` bytes that are ready `at` have come from one group to the other."""
        arrived, nodes = at, self.devices.nodes
        for sender, receiver, share in crossing(*groups) if size and not self.fast else ():
            ends = ((sender, "out"), (receiver, "in"))
            each = self.devices.inside if nodes[sender] == nodes[receiver] else self.devices.between
            end = max(at, *(self._busy.get(key, 0.0) for key in ends)) + share * size * each
            self._busy.update(dict.fromkeys(ends, end))
            arrived = max(arrived, end)
        return arrived


class _Placing:
    """Has state: what each device holds, and where each MetaOp's last operator ran."""

    def __init__(self, metaops: Sequence[MetaOp], devices: Devices, memory_first: bool) -> None:
        self.by_name: Mapping[str, MetaOp] = {one.name: one for one in metaops}
        self.devices, self.memory_first = devices, memory_first
        self.operators: list[dict[tuple[str, int], float]] = [{} for _ in devices.nodes]
        self.kept = [0.0 for _ in devices.nodes]
        self.where: dict[str, tuple[int, ...]] = {}

    def held(self, device: int) -> float:
        """Bytes on it."""
        return sum(self.operators[device].values()) + self.kept[device]

    def grown(self, one: Slice, device: int) -> float:
        """Further bytes of states that a slice brings to a device."""
        metaop, own = self.by_name[one.metaop], self.operators[device]
        first = metaop.first + one.first
        new = sum((metaop.parameters, k) not in own for k in range(first, first + one.operators))
        return new * metaop.states

    def order(self, one: Slice) -> tuple[float, float, int, str]:
        """By traffic; where devices differ, what takes longest gets the fastest."""
        metaop = self.by_name[one.metaop]
        work = metaop.curve.within(one.size)[1] * one.operators if self.devices.slower else 0.0
        return -work, -metaop.output, -one.size, one.metaop

    def take(self, one: Slice) -> None:
        """The slice's devices hold it from now on."""
        metaop = self.by_name[one.metaop]
        first = metaop.first + one.first
        for device in one.devices:
            for k in range(first, first + one.operators):
                self.operators[device][metaop.parameters, k] = metaop.states
            self.kept[device] += metaop.kept * one.operators / len(one.devices)
        self.where[one.metaop] = one.devices

    def source(self, one: Slice) -> tuple[int, ...]:
        """The devices from which a slice's input comes."""
        if one.first:
            return self.where[one.metaop]
        return tuple(device for need in self.by_name[one.metaop].needs for device in self.where[need])

    def chosen(self, one: Slice, free: Sequence[int]) -> tuple[int, ...]:
        """The devices for a slice, of those that are free: on one node where one has enough."""
        source = self.source(one)
        place = {device: k for k, device in reversed(list(enumerate(source)))}

        def rank(device: int) -> tuple[float, ...]:
            memory = (self.grown(one, device), self.held(device))
            local = (float(device not in place),)
            if self.memory_first:
                return (*memory[::-1], *local, device)
            return (self.devices.slowest([device]), memory[0], *local, memory[1], device)

        best = [sorted(free, key=rank)[: one.size]]
        for node in sorted(set(self.devices.nodes)):
            inside = sorted((device for device in free if self.devices.nodes[device] == node), key=rank)
            if len(inside) >= one.size:
                best.append(inside[: one.size])

        def cost(group: Sequence[int]) -> tuple[float, ...]:
            crossing = len({self.devices.nodes[device] for device in group})
            new, fullest = sum(self.grown(one, d) for d in group), max(self.held(d) for d in group)
            moved = sum(device not in place for device in group)
            if self.memory_first:
                return (fullest, crossing, new, moved)
            return (self.devices.slowest(group), crossing, new, moved, fullest)

        group = min(best, key=cost)
        return tuple(sorted(group, key=lambda device: (place.get(device, len(place)), device)))


def place_waves(metaops: Sequence[MetaOp], waves: Sequence[Wave], devices: Devices) -> PlacedWaves:
    """Gives devices to slices that have none. Where what is nearest does not fit into memory, what is emptiest."""
    found = _placed(metaops, waves, devices, memory_first=False)
    if found.most > devices.memory:
        other = _placed(metaops, waves, devices, memory_first=True)
        return other if other.most < found.most else found
    return found


def _placed(metaops: Sequence[MetaOp], waves: Sequence[Wave], devices: Devices, memory_first: bool) -> PlacedWaves:
    placing = _Placing(metaops, devices, memory_first)
    found: list[Wave] = []
    for wave in waves:
        free = sorted(set(range(len(devices.nodes))) - {device for one in wave for device in one.devices})
        placed = {}
        for one in sorted(wave, key=placing.order):
            group = one.devices or placing.chosen(one, free)
            free = [device for device in free if device not in group]
            placed[one.metaop] = one._replace(devices=group)
        for one in placed.values():
            placing.take(one)
        found.append(tuple(placed[one.metaop] for one in wave))
    return PlacedWaves(tuple(found), tuple(placing.held(device) for device in range(len(devices.nodes))))
