"""The values a cluster is made of: devices, links, disks, machines. Frozen data; no torch, no files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from espalier.machine.cluster import machine_order
from espalier.recipe.serialization import Value


class Rate(Value, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One measurement: `processes` processes of `threads` threads at once multiply [rows, inner] by [inner, columns].

    `what = "attention"`: causal attention over `rows` positions with heads `inner` wide. `flops`: of one process.
    """

    what: Literal["product", "attention"]
    precision: str
    rows: int
    inner: int
    columns: int
    threads: int
    processes: int
    flops: float


class Copy(Value, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Measured memory traffic, bytes/s read plus written by one of `processes` processes of `threads` threads."""

    threads: int
    processes: int
    bandwidth: float


class CodecSpeed(Value, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A measured codec on one core: float32 bytes over encoded bytes, and float32 bytes/s of encoding and decoding."""

    codec: str
    ratio: float
    encode: float
    decode: float


class Device(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One compute device. `flops`: precision -> sustained or peak FLOP/s of dense matrix products, per device."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int
    """Bytes all ranks on the device may use together."""
    memory_bandwidth: float
    """Bytes/s, read plus written."""
    flops: dict[str, float]
    peak: bool = True
    """True when `flops` are the vendor's peak, False when measured (then the best measured)."""
    sustained: dict[str, float] = msgspec.field(default_factory=dict)
    """Share of the peak that large `product`s and fused `attention` reach, and products in a precision (`fp32`) where
    it is another; what is not said is assumed."""
    spread: float = 0.0
    """Relative error to expect of a step's seconds where nothing is calibrated; 0 when not known."""
    watts: float = 0.0
    """Power of the device at its limit; 0 when not known."""
    multiprocessors: int = 0
    """Of a GPU (AMD: compute units), each of which computes a tile of a product at a time; 0 when not known."""
    dispatch: float = 0.0
    """Seconds the host needs to issue one operation; 0 when not measured."""
    runtime: int = 0
    """Bytes a rank holds before it holds anything of the model; 0 when not measured."""
    rates: tuple[Rate, ...] = ()
    copies: tuple[Copy, ...] = ()
    codecs: tuple[CodecSpeed, ...] = ()
    source: str = ""


class Link(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """alpha-beta plus a price per launch: seconds = launch + latency·hops + bytes / bandwidth.

    `bandwidth` is of one direction: per device inside a node, per node between nodes. Collectives reach `share` of it;
    where it was `measured`, sums of gradients of unequal pipelines do (`machine.link`).
    """

    bandwidth: float  # bytes/s
    latency: float = 0.0  # seconds
    launch: float = 0.0  # seconds per collective call, whatever its size
    share: float = 0.0  # 0: as of its level
    measured: bool = False
    source: str = ""


class Disk(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One disk, as a program that writes under `path` finds it. Bytes/s; 4 KiB reads/s at depth 1 and with threads."""

    path: str
    write: float
    read: float
    iops: float
    iops_parallel: float = 0.0
    direct: bool = True
    """Measured with O_DIRECT; False: through the page cache, because the file system refused it."""


class Node(Value, frozen=True, kw_only=True):
    """`count` equal machines with `devices` equal devices each. Tables of one `name` are parts of one machine."""

    device: Device
    inside: Link
    count: int = 1
    devices: int = 1
    cores: int = 0
    """Processor cores a program may use; 0 when unknown."""
    memory: int = 0
    """Host memory in bytes; 0 when unknown."""
    disks: tuple[Disk, ...] = ()
    name: str = ""
    between: Link | None = None
    """To other machines, where it is slower than the cluster's."""
    price: float = 0.0
    """Of one machine for an hour, in any currency; 0 when not said."""
    mtbf: float = 0.0
    """Mean hours between two failures of one machine; 0: as `catalogue.failure_rate` has it."""


class Pair(Value, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The measured link between devices `a` and `b`, both ways: bytes/s, seconds, seconds; and what sums over all
    devices reach of the slowest such link (0: not measured)."""

    a: int
    b: int
    bandwidth: float
    latency: float
    launch: float = 0.0
    share: float = 0.0


class Place(NamedTuple):
    """Where a device is: its number in the cluster, its machine, its number there, and its table."""

    rank: int
    node: int
    slot: int
    table: Node

    @property
    def device_name(self) -> str:
        """`cpu`, or `cuda:` and its number."""
        return "cpu" if self.table.device.kind == "cpu" else f"cuda:{self.slot}"


class Cluster(Value, frozen=True, kw_only=True, dict=True):
    """Machines and the links among them. `machine` identifies a probed machine; `busy`: how many of its cores other
    programs used while it was measured; `notes`: what the probe had to say.

    `optimizers`: machines with `role = "optimizer"`, which hold the model for the others and compute no loss;
    `standbys`: those with `role = "standby"`, each of which goes on where an optimizer node is lost; `aggregators`:
    those with `role = "aggregator"`, which add up gradients on their way to optimizer nodes. They are numbered after
    the others, in this order, and have no devices among `devices()`.

    (`dict=True` gives room to remember its devices and fleets, of which there may be thousands.)
    """

    nodes: tuple[Node, ...]
    between: Link | None = None
    pairs: tuple[Pair, ...] = ()
    machine: str = ""
    busy: float = 0.0
    notes: tuple[str, ...] = ()
    optimizers: tuple[Node, ...] = ()
    standbys: tuple[Node, ...] = ()
    aggregators: tuple[Node, ...] = ()

    @property
    def helpers(self) -> tuple[Node, ...]:
        """Machines that compute no loss, in the order of their numbers."""
        return (*self.optimizers, *self.standbys, *self.aggregators)

    def devices(self) -> list[Place]:
        """All devices in rank order, each with its machine. Not to be changed."""
        return self._devices

    @cached_property
    def _devices(self) -> list[Place]:
        places: list[Place] = []
        named: dict[str, tuple[int, int]] = {}  # name -> machine, devices so far
        machines = 0
        for table in self.nodes:
            for _ in range(table.count):
                node, first = named.get(table.name, (machines, 0)) if table.name else (machines, 0)
                machines = max(machines, node + 1)
                places += [Place(len(places) + s, node, first + s, table) for s in range(table.devices)]
                if table.name:
                    named[table.name] = (node, first + table.devices)
        return places

    @cached_property
    def fleets(self) -> dict[tuple[int, int], Any]:
        """By ranks and threads of each what planners worked out of them: `plan.collective_time.Fleet`."""
        return {}

    @cached_property
    def machines(self) -> int:
        """How many machines there are."""
        return 1 + max(place.node for place in self.devices())

    @cached_property
    def links(self) -> list[list[float]]:
        """Bytes/s by pairs of machines: of the slowest measured pair of their devices, else what the level has."""
        machine = [place.node for place in self.devices()]
        rest = self.between.bandwidth if self.between else 0.0
        by_node = {place.node: place.table.between.bandwidth for place in self.devices() if place.table.between}
        each = [min(rest, by_node.get(node, rest)) for node in range(self.machines)]
        bandwidths = [[min(a, b) for b in each] for a in each]
        seen: dict[tuple[int, int], float] = {}
        for pair in self.pairs:
            a, b = sorted((machine[pair.a], machine[pair.b]))
            seen[a, b] = min(pair.bandwidth, seen.get((a, b), pair.bandwidth))
        for (a, b), bandwidth in seen.items():
            bandwidths[a][b] = bandwidths[b][a] = bandwidth
        return bandwidths

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """The machines in the order in which ranks sit on them: rings then cross slow links least."""
        return machine_order.ring(self.links) if self.pairs else tuple(range(self.machines))

    @property
    def same_speed(self) -> bool:
        """True when no device is faster than another."""
        first = self.nodes[0].device
        return all(_speed(table.device) == _speed(first) for table in self.nodes)

    def link(self, a: int, b: int) -> Link:
        """The link between devices `a` and `b` (indices into `devices()`): the measured pair, else by level."""
        for pair in self.pairs:
            if {pair.a, pair.b} == {a, b}:
                return _measured(pair)
        places = self.devices()
        if places[a].node != places[b].node:
            return min(self._between(a, b), key=lambda link: link.bandwidth)
        return min((places[i].table.inside for i in (a, b)), key=lambda link: link.bandwidth)

    def _between(self, *devices: int) -> list[Link]:
        """The links over which these devices reach other machines."""
        assert self.between is not None, "reading refuses a cluster without it"
        places = self.devices()
        by_table = {id(table): table.between for table in (places[at].table for at in devices) if table.between}
        return [self.between, *by_table.values()]

    def level(self, ranks: Iterable[int]) -> Literal["inside", "between"]:
        """`inside` when all these devices are in one machine."""
        places = self.devices()
        return "between" if len({places[rank].node for rank in ranks}) > 1 else "inside"

    def slowest(self, ranks: Iterable[int], level: Literal["inside", "between"]) -> Link:
        """The worst bandwidth, latency and launch price of that level among these devices: what a ring goes at."""
        places = self.devices()
        chosen = set(ranks)
        links = {id(places[r].table): places[r].table.inside for r in chosen}.values() if level == "inside" else ()
        slowest_links = [*links, *(self._between(*chosen) if level == "between" and self.between else [])]
        near = level == "inside"
        pairs = [p for p in self.pairs if {p.a, p.b} <= chosen and (places[p.a].node == places[p.b].node) == near]
        slowest_links = [_measured(pair) for pair in pairs] or slowest_links
        slow = min(slowest_links, key=lambda link: link.bandwidth)
        return slow.changed(
            latency=max(link.latency for link in slowest_links), launch=max(link.launch for link in slowest_links)
        )


def _speed(device: Device) -> tuple[Any, ...]:
    return (device.flops, device.memory_bandwidth, device.rates)


def _measured(pair: Pair) -> Link:
    source = f"measured between {pair.a} and {pair.b}"
    return Link(
        bandwidth=pair.bandwidth,
        latency=pair.latency,
        launch=pair.launch,
        share=pair.share,
        measured=True,
        source=source,
    )
