"""A changed cluster is the cluster file one would have written."""

from __future__ import annotations

import pytest

from espalier.machine import cluster as clusters
from espalier.machine.cluster.whatif import changed, faster
from espalier.recipe.errors import UserError

TEXT = """
[[nodes]]
count = 4
device = "A100-80GB"
devices = 8
[links]
between = "800Gbit/s"
"""
CLUSTER = clusters.loads(TEXT)


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        ("nodes.count=16", "count = 4", "count = 16"),
        ("nodes.0.devices=4", "devices = 8", "devices = 4"),
        ("nodes.device=H100", "A100-80GB", "H100"),
    ],
)
def test_a_change_is_what_the_file_would_say(change: str, old: str, new: str) -> None:
    assert changed(CLUSTER, [change]).nodes == clusters.loads(TEXT.replace(old, new)).nodes


SERVED = (
    TEXT
    + """
[[nodes]]
device = "cpu"
cores = 8
memory = "16GiB"
role = "optimizer"
disks = [{ path = "/d", write = 1e9, read = 2e9, iops = 1e4 }]
"""
)


def test_machines_of_other_roles_change_like_those_that_train() -> None:
    served = clusters.loads(SERVED)
    assert changed(served, ["nodes.1.count=2"]).optimizers[0].count == 2
    (disk,) = changed(served, ["nodes.1.disks=100MB/s"]).optimizers[0].disks
    assert (disk.path, disk.read, disk.write, disk.iops) == ("/d", 1e8, 1e8, 1e4)
    other = changed(served, ["nodes.1.role=trainer"])
    assert (len(other.nodes), len(other.optimizers)) == (2, 0)


def test_a_slower_link_keeps_its_latency() -> None:
    slower = changed(CLUSTER, ["links.between=25Gbit/s"])
    assert slower.between is not None
    assert CLUSTER.between is not None
    assert slower.between.bandwidth == 25e9 / 8
    assert slower.between.latency == CLUSTER.between.latency
    assert changed(CLUSTER, ["links.inside=10GB/s"]).nodes[0].inside.bandwidth == 10e9


def test_a_link_between_machines_needs_two_of_them() -> None:
    alone = changed(CLUSTER, ["nodes.count=1"])
    with pytest.raises(UserError, match="has one machine"):
        changed(alone, ["links.between=25Gbit/s"])
    assert changed(alone, ["links.between=25Gbit/s", "nodes.count=2"]).between is not None


def test_latency_can_be_changed() -> None:
    later = changed(CLUSTER, ["links.latency=1ms"])
    assert later.between is not None
    assert later.between.latency == 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("links.betwen=1Gbit/s", "links.between"),
        ("links.between", "no value"),
        ("links.between=-1Gbit/s", "links.between"),
        ("nodes.7.count=2", "nodes.0"),
        ("nodes.device=A1000", "A1000"),
        ("nodes.count=0", "count"),
        ("colour=blue", "colour"),
    ],
)
def test_what_cannot_be_is_named(change: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        changed(CLUSTER, [change])
    assert words in str(caught.value)


@pytest.mark.parametrize("begin", ["100Mbit/s", "10Gbit/s", "200Gbit/s", '{ bandwidth = "25Gbit/s", share = 0.5 }'])
@pytest.mark.parametrize("factor", [0.02, 0.5, 2, 50])
def test_a_faster_cluster_has_links_as_a_file_would_say_them(begin: str, factor: float) -> None:
    """Also their share of the bandwidth, which of a network with TCP depends on it, unless the file says it."""
    nodes = '[[nodes]]\ndevice = "T4"\ncount = 2\n[[nodes]]\ndevice = "T4"\nbetween = "10Mbit/s"\n'
    cluster = clusters.loads(f"{nodes}[links]\nbetween = {begin if begin[0] == '{' else repr(begin)}\n")
    assert cluster.between is not None
    bits = 8 * factor * cluster.between.bandwidth
    said = f'{{ bandwidth = "{bits:.0f}bit/s", share = 0.5 }}' if begin[0] == "{" else f'"{bits:.0f}bit/s"'
    nodes = nodes.replace("10Mbit/s", f"{10e6 * factor:.0f}bit/s")
    assert faster(cluster, factor) == clusters.loads(f"{nodes}[links]\nbetween = {said}\n")


def test_a_faster_cluster_has_faster_measured_links_between_machines_alone() -> None:
    pairs = "pairs = [[0, 1, 9e9, 1e-5], [0, 2, 1e7, 1e-3], [1, 2, 2e7, 1e-3]]\n"
    cluster = clusters.loads(f'{pairs}[[nodes]]\ndevice = "T4"\ndevices = 2\n[[nodes]]\ndevice = "T4"\n')
    twice = faster(cluster, 2)
    assert [pair.bandwidth for pair in twice.pairs] == [9e9, 2e7, 4e7]
    assert (twice.between, faster(twice, 0.5)) == (None, cluster)
