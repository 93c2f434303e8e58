"""Which devices run the slices of a wave: those that hold the parameters or the input, on one node, with memory free.
Pure; no torch. See `plan.spindle`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from espalier.plan.metaops import MetaOp
from espalier.plan.wave_solver import Slice, Wave


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


def reshard(size: float, source: Sequence[int], target: Sequence[int], devices: Devices) -> float:
    """Seconds to bring `size` bytes from one group to another. Each divides the samples evenly, in the order of its
    devices; a device sends and receives one message after the other."""
    if size == 0 or tuple(source) == tuple(target) or not (devices.inside or devices.between):
        return 0.0
    busy: dict[tuple[int, str], float] = {}
    for a, sender in enumerate(source):
        for b, receiver in enumerate(target):
            low = max(a / len(source), b / len(target))
            high = min((a + 1) / len(source), (b + 1) / len(target))
            if high > low and sender != receiver:
                each = devices.inside if devices.nodes[sender] == devices.nodes[receiver] else devices.between
                for key in ((sender, "out"), (receiver, "in")):
                    busy[key] = busy.get(key, 0.0) + (high - low) * size * each
    return max(busy.values(), default=0.0)


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
