"""Reads and writes cluster files (TOML): by hand with `[[nodes]]` and `[links]`, or as `espalier probe` writes them."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w
from msgspec import Struct

from espalier.machine.cluster import catalogue
from espalier.machine.cluster.values import Cluster, Device, Disk, Link, Node, Pair
from espalier.recipe import foreign_files, units
from espalier.recipe.errors import UserError, nearest

HELP = "docs/cluster.md shows the format; `espalier probe` writes one for this machine"
Quantity = str | int | float

ROLES = "trainer", "optimizer", "standby", "aggregator"
LARGEST = 1_000_000
"""Devices in all: each becomes an object, and no cluster has more."""
FLOPS, MEMORY, LINKS = 1e18, 1e17, 1e14
"""The highest rates of a device, of its memory and of links and pairs: a wafer of Cerebras WSE-3 has 1.25e17 FLOP/s and
2.1e16 B/s (its data sheet), NVLink 1.8e12 B/s."""


class _Line(Struct, forbid_unknown_fields=True):
    bandwidth: Quantity
    latency: Quantity | None = None
    launch: Quantity | None = None
    share: float | None = None
    measured: bool = False
    source: str = "declared"


class _NetworkTable(_Line, forbid_unknown_fields=True):
    fabric: catalogue.Fabric | None = None


class _Latencies(Struct, forbid_unknown_fields=True):
    inside: Quantity | None = None
    between: Quantity | None = None


class _Links(Struct, forbid_unknown_fields=True):
    inside: Quantity | _Line | None = None
    between: Quantity | _NetworkTable | None = None
    latency: Quantity | _Latencies | None = None


class _MachineTable(Struct, forbid_unknown_fields=True):
    device: str | Device
    count: int = 1
    devices: int = 1
    cores: int = 0
    memory: Quantity = 0
    inside: Quantity | _Line | None = None
    disks: tuple[Disk, ...] = ()
    name: str = ""
    between: Quantity | _NetworkTable | None = None
    role: Literal["trainer", "optimizer", "standby", "aggregator"] = "trainer"
    price: float = 0.0
    mtbf: float | None = None


class _File(Struct, forbid_unknown_fields=True):
    nodes: tuple[_MachineTable, ...] = ()
    links: _Links = msgspec.field(default_factory=_Links)
    pairs: tuple[Pair, ...] = ()
    machine: str = ""
    busy: float = 0.0
    notes: tuple[str, ...] = ()


# --- reading and writing -----------------------------------------------------------------------------------------


def read(path: str | Path) -> Cluster:
    """The cluster in file `path`. Raises UserError, never anything else."""
    with foreign_files.parsing(path, HELP):
        return loads(foreign_files.read_text(Path(path)), str(path))


def loads(text: str, origin: str = "cluster.toml") -> Cluster:
    """The cluster that TOML `text` says; `origin` names it in messages. Raises UserError naming the key at fault."""
    with foreign_files.parsing(origin, HELP):
        table = tomllib.loads(text)
    try:
        file = msgspec.convert(table, _File)
    except msgspec.ValidationError as error:
        raise _refusal(error, origin) from None
    if not file.nodes:
        raise UserError(f"{origin} has no nodes.", do='[[nodes]]\n       count = 2\n       device = "A100-80GB"')
    made = [_node(table, file.links, f"{origin}: nodes[{i}]") for i, table in enumerate(file.nodes)]
    by_role = {
        role: [node for node, table in zip(made, file.nodes, strict=True) if table.role == role] for role in ROLES
    }
    nodes, optimizers, standbys, aggregators = (tuple(by_role[role]) for role in ROLES)
    if not nodes:
        raise UserError(
            f'{origin} has only nodes with role = "optimizer", "standby" or "aggregator".',
            do="a [[nodes]] table of machines that train",
        )
    total = sum(node.count * node.devices for node in nodes)
    if total > LARGEST:
        raise UserError(f"{origin} has {total:,} devices (count x devices).", do=f"{LARGEST:,} devices or fewer in all")
    between = _between(file.links, nodes[0].device, origin)
    cluster = Cluster(
        nodes=nodes,
        between=between,
        pairs=file.pairs,
        machine=file.machine,
        busy=file.busy,
        notes=file.notes,
        optimizers=optimizers,
        standbys=standbys,
        aggregators=aggregators,
    )
    _check_links(cluster, origin)
    return cluster


def dumps(cluster: Cluster) -> str:
    """The cluster as TOML; `loads` of it gives an equal cluster. Plain numbers: bytes, bytes/s, seconds, FLOP/s."""
    nodes = [_dump_node(node) for node in cluster.nodes]
    for role, others in zip(ROLES[1:], (cluster.optimizers, cluster.standbys, cluster.aggregators), strict=True):
        nodes += [{**_dump_node(node), "role": role} for node in others]
    table: dict[str, Any] = {"nodes": nodes}
    if cluster.between:
        table["links"] = {"between": msgspec.to_builtins(cluster.between)}
    for key in ("pairs", "machine", "busy", "notes"):
        if getattr(cluster, key):
            table[key] = msgspec.to_builtins(getattr(cluster, key))
    head: dict[str, Any] = {key: table.pop(key) for key in ("machine", "busy", "notes", "pairs") if key in table}
    text = tomli_w.dumps(head) + ("\n" if head else "") + tomli_w.dumps(table)
    innermost = re.compile(r"\[\n([^\[\]]*)\n\s*\]")  # tomli_w gives each number of a list a line of its own
    return "# bytes, bytes/s, seconds, FLOP/s; see docs/cluster.md\n" + innermost.sub(
        lambda match: "[" + ", ".join(line.strip().rstrip(",") for line in match[1].split("\n")) + "]", text
    )


def _dump_node(node: Node) -> dict[str, Any]:
    measured = bool(node.device.rates)  # what the catalogue says is not
    named = not measured and node.device.name in catalogue.known_devices()
    named = named and catalogue.device(node.device.name, max(1, node.cores), max(1, node.memory)) == node.device
    table: dict[str, Any] = msgspec.to_builtins(node)
    table |= {"device": node.device.name} if named else {}
    return {key: value for key, value in table.items() if value not in ("", 0, [], (), None)}


def _node(table: _MachineTable, links: _Links, where: str) -> Node:
    _check_machine(table, where)
    memory = units.size(_finite(table.memory, f"{where}.memory"), f"{where}.memory")
    it = table.device
    if isinstance(it, str):
        it = catalogue.device(it, table.cores, memory, where)
    _check_device(it, where)
    for disk in table.disks:
        for key in ("write", "read", "iops"):
            _positive(getattr(disk, key), f"{where}.disks.{key}")
    latency = links.latency.inside if isinstance(links.latency, _Latencies) else None
    chosen = table.inside if table.inside is not None else links.inside
    usual = catalogue.default_link(it.name, it.kind)
    named = catalogue.link(chosen) if isinstance(chosen, str) else usual if chosen is None else None
    inside = named or _line(chosen, f"{where}: links.inside", partial(catalogue.of_bandwidth, usual))
    if latency is not None:
        inside = inside.changed(latency=units.seconds(latency, "links.latency.inside"))
    return Node(
        device=it, inside=inside, count=table.count, devices=table.devices, cores=table.cores, memory=memory,
        disks=table.disks, name=table.name, between=_network(table.between, it, f"{where}.between"),
        price=table.price, mtbf=table.mtbf or 0.0,
    )  # fmt: skip


def _between(links: _Links, first: Device, origin: str) -> Link | None:
    link = _network(links.between, first, f"{origin}: links.between")
    if link is None:
        return None
    latency = links.latency.between if isinstance(links.latency, _Latencies) else links.latency
    if latency is None:
        return link
    return link.changed(latency=units.seconds(latency, f"{origin}: links.latency"))


def _network(network: Quantity | _NetworkTable | None, device: Device, where: str) -> Link | None:
    """The link to other machines of one with such a device."""
    if network is None:
        return None
    fabric = network.fabric if isinstance(network, _NetworkTable) else None
    return _line(network, where, partial(catalogue.network, device.kind, fabric=fabric))


def _line(stated: Quantity | _Line | None, where: str, usual: Callable[[float], Link]) -> Link:
    """The link as it is said; `usual` tells what is not, of one of that bandwidth."""
    line = stated if isinstance(stated, _Line) else _Line(bandwidth=stated or 0)
    bandwidth = _positive(units.rate(_finite(line.bandwidth, where), where), where, LINKS)
    link = usual(bandwidth)
    if not 0 <= (line.share or 0) <= 1:
        raise UserError(f"{where}.share is {line.share}.", do="share = 0.9, of the bandwidth that collectives reach")
    return link.changed(
        latency=link.latency if line.latency is None else units.seconds(line.latency, f"{where}.latency"),
        launch=link.launch if line.launch is None else units.seconds(line.launch, f"{where}.launch"),
        share=link.share if line.share is None else line.share,
        measured=line.measured,
        source=line.source,
    )


# --- refusing ----------------------------------------------------------------------------------------------------


def _check_machine(table: _MachineTable, where: str) -> None:
    for key in ("count", "devices"):
        if getattr(table, key) < 1:
            raise UserError(f"{where}.{key} is {getattr(table, key)}.", do=f"{key} = 1 or more")
    if not (table.price >= 0 and math.isfinite(table.price)):
        raise UserError(f"{where}.price is {table.price}.", do="price = 2.5, of one machine for an hour")
    if table.mtbf is not None:
        _positive(table.mtbf, f"{where}.mtbf")
    if table.cores < 0:
        raise UserError(f"{where}.cores is {table.cores}.", do="leave it out when unknown")
    if table.name and table.count > 1:
        raise UserError(
            f"{where} names {table.count} machines {table.name!r}.", do="a name is one machine's: count = 1"
        )


def _check_device(it: Device, where: str) -> None:
    if not it.flops:
        raise UserError(f"{where}.device.flops is empty.", do="flops = { fp32 = 80e9 }")
    for precision, rate in it.flops.items():
        _positive(rate, f"{where}.device.flops.{precision}", FLOPS)
    for key in ("rates", "codecs", "copies"):
        for measured in getattr(it, key):
            for value in msgspec.structs.astuple(measured):
                if not isinstance(value, str):
                    _positive(value, f"{where}.device.{key}")
    _positive(it.memory, f"{where}.device.memory")
    _positive(it.memory_bandwidth, f"{where}.device.memory_bandwidth", MEMORY)


def _check_links(cluster: Cluster, origin: str) -> None:
    places = cluster.devices()
    for pair in cluster.pairs:
        if not (0 <= pair.a < len(places) and 0 <= pair.b < len(places)) or pair.a == pair.b:
            raise UserError(
                f"{origin}: pairs has a link from {pair.a} to {pair.b}.",
                why=f"{len(places)} devices",
                do="a and b from 0",
            )
        _positive(pair.bandwidth, f"{origin}: pairs ({pair.a}, {pair.b})", LINKS)
    machines = cluster.machines + sum(node.count for node in cluster.helpers)
    if cluster.between is not None or machines == 1:
        return
    there = {frozenset((pair.a, pair.b)) for pair in cluster.pairs}
    if (
        cluster.optimizers
        or len(places) > 1000
        or any(frozenset((a.rank, b.rank)) not in there for a in places for b in places if a.node < b.node)
    ):
        raise UserError(
            f"{origin}: links.between is missing.",
            why=f"{machines} machines exchange data, at a speed the file does not say",
            do='[links]\n       between = "400Gbit/s"',
        )


def _positive(value: float, where: str, most: float = math.inf) -> float:
    """With `most`: a rate, which beyond that, or below a thousand a second, lacks its unit or has a wrong one."""
    if value > 0 and math.isfinite(value) and (most == math.inf or 1e3 <= value <= most):
        return value
    bounds = "more than zero" if most == math.inf else f"from a thousand to {most:.0e} a second"
    raise UserError(f"{where} is {value}.", why=f"it must be {bounds}", do=HELP)


def _finite(value: Quantity, where: str) -> Quantity:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} is {value}.", why="it must be a finite number", do=HELP)
    return value


def _refusal(error: msgspec.ValidationError, origin: str) -> UserError:
    text, _, where = str(error).partition(" - at `$")
    where = re.sub(r"\[\.\.\.\]", "", where.rstrip("`").lstrip("."))
    unknown = re.search(r"unknown field `(.*)`", text)
    do = HELP
    if unknown:
        do = _instead(unknown[1], re.sub(r"\[\d+\]", "", where))
        text = f"unknown key {unknown[1]!r}"
    return UserError(f"{origin}: {where + ': ' if where else ''}{text}.", do=do)


_TABLES: dict[str, tuple[type[Struct], str]] = {
    "": (_File, "at the top of the file"),
    "nodes": (_MachineTable, "in [[nodes]]"),
    "links": (_Links, "in [links]"),
    "links.inside": (_Line, "in links.inside or links.between"),
    "links.between": (_NetworkTable, "in links.inside or links.between"),
    "links.latency": (_Latencies, "in links.latency"),
    "nodes.inside": (_Line, "in links.inside or links.between"),
    "nodes.between": (_NetworkTable, "in links.inside or links.between"),
    "nodes.device": (Device, "in nodes.device"),
    "nodes.disks": (Disk, "in nodes.disks"),
}
"""Path of a table -> its keys, and where people find it."""


def _instead(key: str, where: str) -> str:
    """What to write instead of the unknown `key` of table `where`: its own place, else the nearest key there."""
    for kind, place in _TABLES.values():
        if key in kind.__struct_fields__:
            return f"{key} stands {place}"
    near = nearest(key, _TABLES[where][0].__struct_fields__) if where in _TABLES else None
    return f"did you mean {near}?" if near else HELP
