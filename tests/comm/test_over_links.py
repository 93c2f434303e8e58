"""A compressed all-reduce over a real link: frames are lost, the link is cut for 2 s, and the bits are the same.

Rows of a cut graph: the wire carries the bytes of the formula."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from espalier.comm import Channel, Traffic, codec, connect, disconnect, traffic
from espalier.train.rank_spec import RankSpec, store
from many_ranks import ranks

ROOT = Path(__file__).parents[2]
VALUES = 2**22 + 7
CUT = 2.0


def summed(channel: Channel, values: int = VALUES) -> str:
    """A fingerprint of the sum of what each rank draws, at 8 bits."""
    x = torch.randn(values, generator=torch.Generator().manual_seed(channel.rank()))
    with traffic(Traffic.GRADIENTS):
        dist.all_reduce(x)
    return hashlib.sha256(x.numpy()).hexdigest()


def _reference(channel: Channel) -> str:
    channel.use(Traffic.GRADIENTS, codec("int8"))
    return summed(channel)


def host(lab: Any, index: int, said: Any) -> None:
    """One host: a small all-reduce, then two whose seconds and fingerprints it tells; before each, that it begins."""
    lab.enter(index)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    place = RankSpec(index, 2, host="10.213.77.1", port=29500, serves=index == 0)
    channel = connect(store(place, 60.0), place.rank, place.world, timeout=30.0)
    channel.use(Traffic.GRADIENTS, codec("int8"))
    summed(channel, 2**13)
    for _ in range(2):
        dist.barrier()
        said.put("begins")
        begun = time.monotonic()
        found = summed(channel)
        said.put((time.monotonic() - begun, found))
    dist.barrier()
    disconnect()


@contextlib.contextmanager
def lab(**shape: Any) -> Iterator[Any]:
    """A network of bench/netlab.py."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("network namespaces need root and iproute2")
    spec = importlib.util.spec_from_file_location("netlab", ROOT / "bench" / "netlab.py")
    assert spec is not None
    assert spec.loader is not None
    netlab = sys.modules["netlab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(netlab)
    handler = signal.getsignal(signal.SIGTERM)
    with netlab.Lab(netlab.Shape(**shape)) as made:
        yield made
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def outcomes() -> list[list[tuple[float, str]]]:
    """[host][all-reduce] seconds and fingerprint; every hundredth frame is lost, in the second the link is cut."""
    fork = multiprocessing.get_context("fork")
    with lab(nodes=2, hosts=1, rate=50e6, loss=0.01) as made:
        said = [fork.Queue() for _ in range(2)]
        hosts = [fork.Process(target=host, args=(made, index, said[index]), daemon=True) for index in range(2)]
        for one in hosts:
            one.start()
        try:
            first = [[queue.get(timeout=60) for _ in range(3)][1] for queue in said]
            time.sleep(0.2)
            with made.cut(1):
                time.sleep(CUT)
            second = [queue.get(timeout=60) for queue in said]
        finally:
            for one in hosts:
                one.join(20)
                one.kill()
    return [list(pair) for pair in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def expected() -> str:
    """The fingerprint without a network."""
    first, second = ranks(2, _reference)
    assert first == second
    return first


@pytest.mark.slow
def test_lost_frames_change_no_bit(outcomes: Any, expected: str) -> None:
    assert [host[0][1] for host in outcomes] == [expected, expected]


def test_a_link_cut_for_two_seconds_delays_the_sum_and_changes_no_bit(outcomes: Any, expected: str) -> None:
    assert min(host[1][0] for host in outcomes) > CUT, "the cut struck the all-reduce"
    assert [host[1][1] for host in outcomes] == [expected, expected]


FRAME = 66
"""Bytes of Ethernet's, IP's and TCP's headers."""
EPOCHS = 10


def on_the_wire() -> int:
    """Payload bytes that left this host so far."""
    (line,) = (one for one in Path("/proc/thread-self/net/dev").read_text().splitlines() if "eth0:" in one)
    sent, packets = (int(line.partition(":")[2].split()[at]) for at in (8, 9))
    return sent - FRAME * packets


def part_of_a_graph(lab: Any, index: int, said: Any) -> None:
    """One host trains on its part; says for 32 bits and for one what the wire carried and what the formula has."""
    from dataclasses import replace

    from espalier.graph.data import synthetic
    from espalier.graph.networks.gnn import Gnn
    from espalier.graph.parts import halo
    from espalier.graph.sampling.neighbor_sampler import Style, whole
    from espalier.mechanisms.halo_exchange import quantized_exchange as sylvie
    from espalier.mechanisms.halo_exchange.options import HaloOptions
    from espalier.recipe import Sage

    lab.enter(index)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    place = RankSpec(index, 2, host="10.213.77.1", port=29500, serves=index == 0)
    channel = connect(store(place, 60.0), place.rank, place.world, timeout=30.0)
    graph = synthetic.load("planted:nodes=2000,degree=12,classes=4,features=8,homophily=0.5", Path(said[1]))
    block = whole(graph, Style(loops=False, scale="mean"))
    cut = halo.boundary(block.indptr, block.indices, np.arange(graph.nodes) % 2, 2)
    own = halo.Halo.of(block.indptr, block.indices, cut, index, channel)
    network = halo.equip(Gnn(Sage(depth=3, width=64, dropout=0.0, activation="relu"), 8, 4))
    features = torch.tensor(np.asarray(graph.features))[own.nodes]
    found = []
    for bits in (32, 1):
        transport = sylvie.Sylvie(sylvie.Every(bits, 1))
        blocks = replace(own, transport=transport).by_layer(own.block(block), 3)
        dist.barrier()
        before = on_the_wire()
        for step in range(EPOCHS):
            transport.begin(step)
            network(features, blocks).square().mean().backward()
        dist.barrier()
        formula = sylvie.step_bytes(network, cut.rows, HaloOptions(bits=bits, synchronize=5))
        found.append((on_the_wire() - before, EPOCHS * float(formula[index].sum())))
    said[0].put(found)
    dist.barrier()
    disconnect()


def test_rows_of_a_cut_graph_take_the_bytes_of_the_formula_on_the_wire(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    with lab(nodes=2, hosts=1) as made:
        said = [fork.Queue() for _ in range(2)]
        arguments = [(made, index, (said[index], str(tmp_path / str(index)))) for index in range(2)]
        hosts = [fork.Process(target=part_of_a_graph, args=one, daemon=True) for one in arguments]
        for one in hosts:
            one.start()
        try:
            every = [queue.get(timeout=120) for queue in said]
        finally:
            for one in hosts:
                one.join(20)
                one.kill()
    for whole, few in every:
        assert whole[0] == pytest.approx(whole[1], rel=0.01)
        assert few[0] == pytest.approx(few[1], rel=0.05)
