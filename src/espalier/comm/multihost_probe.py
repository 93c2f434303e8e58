"""Multi-host probe: each machine is measured by one of its ranks, then the links between all of them.

Two ranks are on one machine when they share a host name, a boot and a network namespace; variables such as
LOCAL_WORLD_SIZE are not asked, since launchers set them in different ways.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch.distributed as dist

from espalier.comm import plain_collectives
from espalier.machine import cluster as clusters
from espalier.machine import link as links
from espalier.machine import probe
from espalier.machine.cluster import Cluster, Link, Node
from espalier.recipe.cache_dir import cache_folder, write_atomic
from espalier.recipe.errors import UserError


def probe_ranks(group: dist.ProcessGroup, local_rank: int, measure: Callable[[], Cluster] | None = None) -> Cluster:
    """The cluster of all ranks of `group`; every rank calls it and gets the same value.

    Args:
        group: all ranks; its timeout must exceed the time of one probe (about ten seconds).
        local_rank: this rank's device on its machine, where there are several.
        measure: measures this machine (default: `probe.probe`).
    """
    hosts = plain_collectives.all_gather(host(), group)
    names = list(dict.fromkeys(hosts))
    leads = [hosts.index(name) for name in names]
    own_measurement = (measure or probe.probe)() if dist.get_rank(group) in leads else None
    texts = plain_collectives.all_gather(None if own_measurement is None else clusters.dumps(own_measurement), group)
    clusters_of_hosts = [clusters.loads(text) for text in texts if text is not None]
    matrix = links.measure(group)
    nodes: list[Node] = []
    first: list[int] = []
    for number, cluster in enumerate(clusters_of_hosts):
        first.append(sum(node.devices for node in nodes))
        nodes += [node.changed(name=f"host {number} ({names[number].split('|')[0]})") for node in cluster.nodes]
    devices = _devices(hosts, names, first, plain_collectives.all_gather(local_rank, group), clusters_of_hosts)
    measured = [pair for pair in matrix.pairs(devices) if pair.a != pair.b]
    pairs = {frozenset((pair.a, pair.b)): pair for pair in reversed(measured)}
    notes = tuple(note for cluster in clusters_of_hosts for note in cluster.notes)
    return Cluster(
        nodes=tuple(nodes),
        between=_between(matrix, hosts),
        pairs=tuple(pairs.values()),
        notes=(*notes, *matrix.notes()),
    )


def key(group: dist.ProcessGroup) -> str:
    """What a measurement of the ranks of `group` is valid for, as a short hash: their machines and interfaces."""
    identity = f"{host()} {os.environ.get('GLOO_SOCKET_IFNAME')} {probe.identity()}"
    return blake2b("/".join(plain_collectives.all_gather(identity, group)).encode(), digest_size=6).hexdigest()


def stored_cluster(name: str) -> Cluster | None:
    """The cluster kept under `key` on this machine, if there is a readable one."""
    try:
        return clusters.read(_file(name))
    except UserError:
        return None


def keep(cluster: Cluster, name: str) -> None:
    """Keeps `measured` on this machine; where the cache cannot be written, hosts are measured again the next time."""
    with suppress(OSError):
        _file(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_file(name), clusters.dumps(cluster))


def _file(name: str) -> Path:
    return cache_folder() / f"hosts-{name}.toml"


def host() -> str:
    """This machine: the same for two ranks exactly when they share a kernel, a host name and a network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # cloned machines bear one name
    except OSError:
        boot = ""
    return f"{socket.gethostname()}|{boot}|{os.stat('/proc/self/ns/net').st_ino}"


def _devices(
    hosts: Sequence[str], names: Sequence[str], first: Sequence[int], local: Sequence[int], measured: Sequence[Cluster]
) -> list[int]:
    """The number, in the cluster, of each rank's device."""
    numbers = []
    for host, index in zip(hosts, local, strict=True):
        machine = names.index(host)
        count = sum(node.devices for node in measured[machine].nodes)
        numbers.append(first[machine] + index % count)
    return numbers


def _between(matrix: links.Matrix, hosts: Sequence[str]) -> Link | None:
    """The median link between machines, None when there is one machine only."""
    across = [(a, b) for a, b in itertools.combinations(range(len(hosts)), 2) if hosts[a] != hosts[b]]
    if not across:
        return None
    rows, columns = zip(*across, strict=True)
    return Link(
        bandwidth=float(np.median(matrix.bandwidth[rows, columns])),
        latency=float(np.median(matrix.latency[rows, columns])),
        launch=matrix.launch,
        measured=True,
        source=f"probe: median of {len(across)} measured pairs",
    )
