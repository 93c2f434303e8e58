"""The devices that have a name: `devices.toml`, where each constant has its source."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Literal

import msgspec
from msgspec import Struct

from espalier import units
from espalier.cluster.values import Device, Link
from espalier.errors import UserError, nearest

Quantity = str | int | float


class _Known(Struct, forbid_unknown_fields=True):
    name: str
    kind: Literal["cpu", "cuda"]
    memory: Quantity
    memory_bandwidth: Quantity
    flops: dict[str, float]
    inside: str
    source: str
    sustained: dict[str, float] = {}


class _Network(Struct, forbid_unknown_fields=True):
    latency: str
    launch: str
    source: str


class _Wire(Struct, forbid_unknown_fields=True):
    bandwidth: str
    latency: str
    launch: str
    source: str


class _Catalogue(Struct, forbid_unknown_fields=True):
    device: tuple[_Known, ...]
    links: dict[str, _Wire]
    network: dict[str, _Network]


@cache
def _catalogue() -> _Catalogue:
    text = resources.files("espalier").joinpath("devices.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), _Catalogue)


def known_devices() -> list[str]:
    """Names a cluster file may use for a device."""
    return [entry.name for entry in _catalogue().device]


def device(name: str, cores: int = 1, memory: int = 0, where: str = "device") -> Device:
    """The catalogue's device `name`; a `cpu` is made of `cores` cores and `memory` bytes. UserError when unknown."""
    entry = _entry(name, where)
    scale = 1
    if entry.kind == "cpu":
        if cores < 1 or memory < 1:
            missing = "cores" if cores < 1 else "memory"
            raise UserError(f"{where}: a cpu node does not say its {missing}.", do='cores = 16, memory = "64GiB"')
        scale = cores
    return Device(
        name=entry.name,
        kind=entry.kind,
        memory=units.size(entry.memory) or memory,
        memory_bandwidth=units.rate(entry.memory_bandwidth) * scale,
        flops={precision: rate * scale for precision, rate in entry.flops.items()},
        sustained=entry.sustained,
        source=entry.source,
    )


def default_link(name: str, kind: str) -> Link:
    """The link between devices `name` in one machine; by kind (loopback, PCI Express) when the name is not known."""
    by_kind = {"cpu": "loopback", "cuda": "pcie4"}[kind]
    found = next((entry.inside for entry in _catalogue().device if entry.name == name), by_kind)
    wire = _catalogue().links[found]
    return Link(
        bandwidth=units.rate(wire.bandwidth),
        latency=units.seconds(wire.latency),
        launch=units.seconds(wire.launch),
        source=wire.source,
    )


def network(kind: str) -> tuple[float, float]:
    """Seconds of latency and of launch between machines with devices of `kind`, when a file does not say them."""
    wire = _catalogue().network[kind]
    return units.seconds(wire.latency), units.seconds(wire.launch)


def _entry(name: str, where: str) -> _Known:
    for entry in _catalogue().device:
        if entry.name == name:
            return entry
    folded = {known.casefold(): known for known in known_devices()}
    begins = (known for known in folded if known.startswith(name.casefold()) and name)
    near = next(begins, None) or nearest(name.casefold(), folded)
    raise UserError(
        f"{where}: unknown device {name!r}.",
        why="known devices are " + ", ".join(known_devices()),
        do=f'device = "{folded[near]}"' if near else "describe it in a table, see docs/cluster.md",
    )
