"""Which devices run the slices of a wave: those that hold the parameters or the input, on one node, with memory free.
Pure; no torch. See `mechanisms.task_waves.wave_search`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from espalier.mechanisms.task_waves.metaops import MetaOp
from espalier.mechanisms.task_waves.wave_solver import MetaOpSlice, Wave


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


def holders(metaops: Sequence[MetaOp], planned: Sequence[Wave]) -> Collection[tuple[float, set[int]]]:
    """Of each operator the bytes of its gradients, and the devices that hold it."""
    by_name, groups = {metaop.name: metaop for metaop in metaops}, dict[tuple[str, int], tuple[float, set[int]]]()
    for slice_ in (slice_ for wave in planned for slice_ in wave):
        metaop = by_name[slice_.metaop]
        for k in range(slice_.first, slice_.first + slice_.operators):
            groups.setdefault((metaop.parameters, k), (metaop.gradients, set()))[1].update(slice_.devices)
    return groups.values()


def exchange(metaops: Sequence[MetaOp], planned: Sequence[Wave], devices: Devices) -> float:
    """Seconds of summing the gradients of each operator over the devices that hold it, one after the other."""
    return sum(summed(size, ranks, devices) for size, ranks in holders(metaops, planned))


class DeviceLinks:
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
        self.by_name: Mapping[str, MetaOp] = {metaop.name: metaop for metaop in metaops}
        self.devices, self.memory_first = devices, memory_first
        self.operators: list[dict[tuple[str, int], float]] = [{} for _ in devices.nodes]
        self.saved = [0.0 for _ in devices.nodes]
        self.where: dict[str, tuple[int, ...]] = {}

    def bytes_on(self, device: int) -> float:
        """Bytes on it."""
        return sum(self.operators[device].values()) + self.saved[device]

    def grown(self, slice_: MetaOpSlice, device: int) -> float:
        """Further bytes of states that a slice brings to a device."""
        metaop, operators = self.by_name[slice_.metaop], self.operators[device]
        last = slice_.first + slice_.operators
        new = sum((metaop.parameters, k) not in operators for k in range(slice_.first, last))
        return new * metaop.states

    def order(self, slice_: MetaOpSlice) -> tuple[float, float, int, str]:
        """By traffic; where devices differ, what takes longest gets the fastest."""
        metaop = self.by_name[slice_.metaop]
        work = metaop.curve.within(slice_.size)[1] * slice_.operators if self.devices.slower else 0.0
        return -work, -metaop.output, -slice_.size, slice_.metaop

    def take(self, slice_: MetaOpSlice) -> None:
        """The slice's devices hold it from now on."""
        metaop = self.by_name[slice_.metaop]
        for device in slice_.devices:
            for k in range(slice_.first, slice_.first + slice_.operators):
                self.operators[device][metaop.parameters, k] = metaop.states
            self.saved[device] += metaop.activations * slice_.operators / len(slice_.devices)
        self.where[slice_.metaop] = slice_.devices

    def source(self, slice_: MetaOpSlice) -> tuple[int, ...]:
        """The devices from which a slice's input comes."""
        if slice_.first:
            return self.where[slice_.metaop]
        return tuple(device for need in self.by_name[slice_.metaop].needs for device in self.where[need])

    def chosen(self, slice_: MetaOpSlice, free: Sequence[int]) -> tuple[int, ...]:
        """The devices for a slice, of those that are free: on one node where one has enough."""
        source = self.source(slice_)
        place = {device: k for k, device in reversed(list(enumerate(source)))}

        def rank(device: int) -> tuple[float, ...]:
            memory = (self.grown(slice_, device), self.bytes_on(device))
            local = (float(device not in place),)
            if self.memory_first:
                return (*memory[::-1], *local, device)
            return (self.devices.slowest([device]), memory[0], *local, memory[1], device)

        best = [sorted(free, key=rank)[: slice_.size]]
        for node in sorted(set(self.devices.nodes)):
            inside = sorted((device for device in free if self.devices.nodes[device] == node), key=rank)
            if len(inside) >= slice_.size:
                best.append(inside[: slice_.size])

        def cost(group: Sequence[int]) -> tuple[float, ...]:
            crossing = len({self.devices.nodes[device] for device in group})
            new, fullest = sum(self.grown(slice_, d) for d in group), max(self.bytes_on(d) for d in group)
            moved = sum(device not in place for device in group)
            if self.memory_first:
                return (fullest, crossing, new, moved)
            return (self.devices.slowest(group), crossing, new, moved, fullest)

        group = min(best, key=cost)
        return tuple(sorted(group, key=lambda device: (place.get(device, len(place)), device)))


def place_waves(metaops: Sequence[MetaOp], waves: Sequence[Wave], devices: Devices) -> PlacedWaves:
    """Gives devices to slices that have none. Where what is nearest does not fit into memory, what is emptiest."""
    placement = _placed(metaops, waves, devices, memory_first=False)
    if placement.most > devices.memory:
        other = _placed(metaops, waves, devices, memory_first=True)
        return other if other.most < placement.most else placement
    return placement


def _placed(metaops: Sequence[MetaOp], waves: Sequence[Wave], devices: Devices, memory_first: bool) -> PlacedWaves:
    placing = _Placing(metaops, devices, memory_first)
    waves_placed: list[Wave] = []
    for wave in waves:
        free = sorted(set(range(len(devices.nodes))) - {device for slice_ in wave for device in slice_.devices})
        placed = {}
        for slice_ in sorted(wave, key=placing.order):
            group = slice_.devices or placing.chosen(slice_, free)
            free = [device for device in free if device not in group]
            placed[slice_.metaop] = slice_._replace(devices=group)
        for slice_ in placed.values():
            placing.take(slice_)
        waves_placed.append(tuple(placed[slice_.metaop] for slice_ in wave))
    return PlacedWaves(tuple(waves_placed), tuple(placing.bytes_on(device) for device in range(len(devices.nodes))))
