"""Several machines measured at once; here three ranks that pretend to be on two hosts."""

import pytest

from espalier.comm import multihost_probe
from espalier.machine import cluster
from many_ranks import forks

MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'


def test_every_rank_gets_one_cluster_with_each_host_once_and_its_links_measured(monkeypatch):
    def task(channel):
        monkeypatch.setattr(multihost_probe, "host", lambda: "ab"[channel.rank() // 2] + "|1")
        return cluster.dumps(multihost_probe.probe_ranks(channel, channel.rank() % 2, lambda: cluster.loads(MACHINE)))

    texts = forks(3, task)
    assert len(set(texts)) == 1
    found = cluster.loads(texts[0])
    assert [node.name for node in found.nodes] == ["host 0 (a)", "host 1 (b)"]
    assert found.machines == 2
    assert [(pair.a, pair.b) for pair in found.pairs] == [(0, 1)]
    assert found.between is not None
    assert found.link(0, 1).bandwidth == pytest.approx(found.pairs[0].bandwidth)
    assert found.link(0, 1).bandwidth > 1e6


def test_ranks_of_one_host_share_its_device(monkeypatch):
    def task(channel):
        return multihost_probe.probe_ranks(channel, channel.rank(), lambda: cluster.loads(MACHINE))

    found = forks(2, task)[0]
    assert len(found.nodes) == 1
    assert found.pairs == ()
    assert found.between is None
