"""A cluster with something changed: what if the links were slower, or there were more machines?"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any, Literal

from espalier.machine.cluster import catalogue
from espalier.machine.cluster.file import dumps, loads
from espalier.machine.cluster.values import Cluster, Link
from espalier.recipe import units
from espalier.recipe.errors import UserError, nearest

KEYS = (
    "links.between",
    "links.inside",
    "links.latency",
    "nodes.count",
    "nodes.devices",
    "nodes.device",
    "nodes.memory",
    "nodes.cores",
    "nodes.role",
    "nodes.disks",
)
"""What can be changed; `nodes.…` changes every table of nodes, `nodes.0.…` the first. `nodes.disks`: bytes/s of every
disk, read and written."""


def changed(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """`cluster` after every `key=value` of `changes`, as a cluster file would say it. Raises UserError naming the key.

    >>> changed(cluster, ["links.between=25Gbit/s", "nodes.0.count=4"])  # doctest: +SKIP
    """
    table = tomllib.loads(dumps(cluster))
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not value.strip():
            raise UserError(f"--what-if {change} has no value.", do="--what-if links.between=25Gbit/s")
        _set(table, key.strip(), _value(value.strip()))
    import tomli_w

    edited = loads(tomli_w.dumps(table), "the changed cluster")
    if any(change.startswith("links.between") for change in changes) and sum(node.count for node in edited.nodes) == 1:
        raise UserError(
            "--what-if links.between changes nothing: the cluster has one machine.",
            do="--what-if nodes.count=2 as well",
        )
    return edited


def faster(cluster: Cluster, factor: float) -> Cluster:
    """`cluster` with `factor` times the bandwidth of every link between machines, as its file would say it."""

    def link(line: Link | None, kind: Literal["cpu", "cuda"]) -> Link | None:
        if line is None:
            return None
        usual, other = (catalogue.network(kind, line.bandwidth * each) for each in (1, factor))
        share = other.share if line.share == usual.share else line.share
        return line.changed(bandwidth=other.bandwidth, share=share)

    nodes = tuple(table.changed(between=link(table.between, table.device.kind)) for table in cluster.nodes)
    node = [place.node for place in cluster.devices()]
    pairs = tuple(
        pair.changed(bandwidth=pair.bandwidth * factor) if node[pair.a] != node[pair.b] else pair
        for pair in cluster.pairs
    )
    between = link(cluster.between, cluster.nodes[0].device.kind)
    return cluster.changed(nodes=nodes, pairs=pairs, between=between)


def _set(table: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    plain = ".".join(part for part in parts if not part.isdigit())
    if plain not in KEYS:
        near = nearest(plain, KEYS)
        raise UserError(
            f"--what-if does not know {key!r}.",
            do=f"{near}=…" if near else f"{', '.join(KEYS)}, or an option of the recipe",
        )
    if parts[0] == "links":
        _set_link(table, parts[1], value)
        return
    nodes = table["nodes"]
    chosen = [int(part) for part in parts if part.isdigit()] or list(range(len(nodes)))
    if max(chosen) >= len(nodes):
        raise UserError(f"--what-if {key}: the cluster has {len(nodes)} tables of nodes.", do="nodes.0 is the first")
    for index in chosen:
        if parts[-1] == "disks":
            rate = units.rate(value, f"--what-if {key}")
            named = nodes[index].get("disks") or [{"path": "/", "iops": rate / 4096}]
            value = [{**disk, "read": rate, "write": rate} for disk in named]
        nodes[index][parts[-1]] = value
        if parts[-1] == "device":
            nodes[index].pop("inside", None)  # the new device's own link


def _set_link(table: dict[str, Any], name: str, value: Any) -> None:
    links = table.setdefault("links", {})
    table.pop("pairs", None)  # measured between the machines there are, not between these
    if name == "inside":
        for node in table["nodes"]:
            node["inside"] = _rate(node.get("inside"), value)
    elif name == "between":
        links["between"] = _rate(links.get("between"), value)
        for node in table["nodes"]:
            node.pop("between", None)
    else:
        links["latency"] = value


def _rate(link: Any, value: Any) -> Any:
    """The link with another bandwidth, its latency and launch price kept."""
    other_fields = {key: link[key] for key in ("latency", "launch") if key in link} if isinstance(link, dict) else {}
    return {"bandwidth": value, "source": "what if", **other_fields}


def _value(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text
