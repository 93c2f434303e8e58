"""A changed cluster is the cluster file one would have written."""

from __future__ import annotations

import pytest

from espalier.machine import cluster as clusters
from espalier.machine.cluster.whatif import changed
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
