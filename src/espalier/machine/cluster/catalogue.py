"""Catalogue of devices and links that have a name: `devices.toml`, where each constant has its source.

A card has many spellings (`4090`, `RTX4090`, the driver's `NVIDIA GeForce RTX 4090`): two are the same where they have
the same words, without those that say no more than who makes it and how it is mounted.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Literal

import msgspec
from msgspec import Struct

from espalier.machine.cluster.values import Device, Link, Node
from espalier.recipe import units
from espalier.recipe.errors import UserError, nearest

Quantity = str | int | float

SAME_SIZE = 1.12
"""A card is sold with at most so much more memory than its driver leaves to programs."""
ROUNDED = 1.05
"""How much more than a link's bandwidth people say: 32 GB/s of PCI Express 4.0 are 31.5."""
TCP_SHARE, TCP_FROM, TCP_GROWS = 0.9, 1.25e9, 0.65
"""What collectives of GPUs over TCP reach of a network, and up to how many bytes/s; beyond, they grow with this power
of it: 60 % of 32 Gbit/s (NVIDIA/nccl issue 209), 5.2 of 12.5 GB/s (issue 450)."""
RDMA_FROM = 5e9
"""Bytes/s from which a network of GPUs counts as RDMA unless its file says TCP: 40 Gbit/s, InfiniBand QDR."""

Fabric = Literal["rdma", "tcp"]


class FailureRate(Struct, frozen=True, forbid_unknown_fields=True):
    """Mean hours between two failures of one device, or of one machine, and who says so."""

    hours: float
    of: Literal["device", "machine"]
    source: str


class _Card(Struct, forbid_unknown_fields=True):
    name: str
    memory: Quantity
    bandwidth: Quantity
    fp32: float = 0.0
    flops: dict[str, float] = {}
    also: tuple[str, ...] = ()
    inside: str = ""
    sustained: dict[str, float] = {}
    basis: str = ""
    watts: float = 0.0
    multiprocessors: int = 0


class _Family(Struct, forbid_unknown_fields=True):
    name: str
    kind: Literal["cpu", "cuda"]
    inside: str
    basis: str
    source: str
    cards: tuple[_Card, ...]
    times: dict[str, float] = {}
    sustained: dict[str, float] = {}
    failures: str = "home"
    dispatch: float = 0.0


class _KnownNetwork(Struct, forbid_unknown_fields=True):
    latency: str
    launch: str
    source: str


class _Wire(Struct, forbid_unknown_fields=True):
    bandwidth: str
    share: float
    latency: str
    launch: str
    source: str


class _Catalogue(Struct, forbid_unknown_fields=True):
    silent: frozenset[str]
    spread: dict[str, float]
    failures: dict[str, FailureRate]
    family: tuple[_Family, ...]
    links: dict[str, _Wire]
    network: dict[str, _KnownNetwork]


@cache
def _catalogue() -> _Catalogue:
    text = resources.files("espalier.machine.cluster").joinpath("devices.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), _Catalogue)


@cache
def _cards() -> dict[str, tuple[_Family, _Card]]:
    return {card.name: (family, card) for family in _catalogue().family for card in family.cards}


def known_devices() -> list[str]:
    """Names a cluster file may use for a device."""
    return list(_cards())


def known(name: str) -> str | None:
    """The catalogue's name for what people, vendors or drivers call `name`; None when there is none, or several."""
    if name in _cards():
        return name
    words, size = _words(name)
    fits = []
    for family, card in _cards().values():
        memory = units.size(card.memory) / 2**30 if family.kind == "cuda" else 0.0
        for spelling in (card.name, *card.also):
            name_words, stated = _words(spelling)
            same = size == stated or (size is not None and memory <= size <= SAME_SIZE * memory)
            if name_words == words and (same or size is None):
                fits.append((size != stated, card.name))
    exact = [name for differs, name in fits if not differs] or [name for _, name in fits]
    return exact[0] if len(set(exact)) == 1 else None


def device(name: str, cores: int = 1, memory: int = 0, where: str = "device") -> Device:
    """The catalogue's device `name`; a `cpu` is made of `cores` cores and `memory` bytes. UserError when unknown."""
    entry = known(name)
    if entry is None:
        raise _unknown(name, where)
    family, card = _cards()[entry]
    scale = 1
    if family.kind == "cpu":
        if cores < 1 or memory < 1:
            missing = "cores" if cores < 1 else "memory"
            raise UserError(f"{where}: a cpu node does not say its {missing}.", do='cores = 16, memory = "64GiB"')
        scale = cores
    basis = card.basis or family.basis
    flops = card.flops or {"fp32": card.fp32, **{name: card.fp32 * times for name, times in family.times.items()}}
    shares = {"runs": "shares of whole runs", "products": "shares of measured products"}.get(basis, "shares assumed")
    return Device(
        name=card.name,
        kind=family.kind,
        memory=units.size(card.memory) or memory,
        memory_bandwidth=units.rate(card.bandwidth) * scale,
        flops={precision: rate * scale for precision, rate in flops.items()},
        sustained=card.sustained or family.sustained,
        watts=card.watts,
        multiprocessors=card.multiprocessors,
        dispatch=family.dispatch,
        spread=_catalogue().spread[basis],
        source=f"{family.source}; {shares}" if family.kind == "cuda" else family.source,
    )


def failure_rate(node: Node) -> FailureRate:
    """How often such a machine fails: as its file says, else as published of the kind of its devices."""
    if node.mtbf:
        return FailureRate(node.mtbf, "machine", "nodes.mtbf")
    family, _ = _cards().get(node.device.name, _cards()["cpu"])
    return _catalogue().failures[family.failures]


def link(name: str) -> Link | None:
    """The link called `name` in the catalogue, such as `nvlink4` or `pcie4-host`."""
    wire = _catalogue().links.get(name)
    if wire is None:
        return None
    return Link(
        bandwidth=units.rate(wire.bandwidth),
        latency=units.seconds(wire.latency),
        launch=units.seconds(wire.launch),
        share=wire.share,
        source=wire.source,
    )


def of_bandwidth(usual: Link, bandwidth: float) -> Link:
    """A link inside a machine that is said to have this bandwidth: of the `usual` kind, unless it has more."""
    share = usual.share if bandwidth <= ROUNDED * usual.bandwidth else 0.0
    return usual.changed(bandwidth=bandwidth, share=share, source="declared")


def default_link(name: str, kind: str) -> Link:
    """The link between devices `name` in one machine; by kind (loopback, PCI Express) when the name is not known."""
    family, card = _cards().get(name, (None, None))
    by_kind = {"cpu": "loopback", "cuda": "pcie4"}[kind]
    usual = link(by_kind if family is None or card is None else card.inside or family.inside)
    assert usual is not None, "tests compare the links that devices name with those there are"
    return usual


def network(kind: str, bandwidth: float, fabric: Fabric | None = None) -> Link:
    """A network of `bandwidth` bytes/s between machines with devices of `kind`, by default not TCP where it is fast."""
    wire = _catalogue().network[kind]
    tcp = kind == "cuda" and (fabric == "tcp" or (fabric is None and bandwidth < RDMA_FROM))
    return Link(
        bandwidth=bandwidth,
        latency=units.seconds(wire.latency),
        launch=units.seconds(wire.launch),
        share=TCP_SHARE * max(1.0, bandwidth / TCP_FROM) ** (TCP_GROWS - 1) if tcp else 0.0,
        source="declared",
    )


def _words(name: str) -> tuple[frozenset[str], float | None]:
    """What tells a device from others: words of its name, and the GB of memory that it says."""
    text = re.sub(r"\brtx(?=\w)", "rtx ", name.casefold().replace("(tm)", ""))
    text = re.sub(r"(?<=\d{4})(ti|super|laptop)", r" \1", text).replace("tisuper", "ti super")
    text = re.sub(r"\b(max-q|mobile)\b", "laptop", text)
    words = [word for word in re.split(r"[\s\-_/,]+", text) if word]
    sizes = [float(word[:-2].rstrip("i")) for word in words if re.fullmatch(r"\d+(gb|gib)", word)]
    rest = frozenset(word for word in words if not re.fullmatch(r"\d+(gb|gib)", word)) - _catalogue().silent
    return rest, sizes[0] if sizes else None


def _unknown(name: str, where: str) -> UserError:
    """No device is called so: names devices only where they are variants of what was said, else the families."""
    words, _ = _words(name)
    if "apple" in words or re.fullmatch(r"m\d", next(iter(sorted(words)), "")):
        return UserError(
            f"{where}: {name!r} is not a device that `espalier train` computes on.",
            why="Apple's GPUs (MPS) have no backend here; their processors have",
            do='device = "cpu", with cores and memory',
        )
    sisters = [known for known in known_devices() if words and _words(known)[0] >= words]
    if not sisters:
        misspelled = nearest(name.casefold(), (known.casefold() for known in known_devices()))
        sisters = [known for known in known_devices() if known.casefold() == misspelled]
    if sisters:
        why = f"{name} may be {', '.join(sisters)}"
        return UserError(f"{where}: unknown device {name!r}.", why=why, do=f'device = "{sisters[0]}"')
    families = ", ".join(family.name for family in _catalogue().family)
    return UserError(
        f"{where}: unknown device {name!r}.",
        why=f"known are {families}: docs/cluster.md lists them",
        do="describe it in a table, see docs/cluster.md",
    )
