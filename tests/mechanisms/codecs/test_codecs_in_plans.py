"""What a plan encodes: by the recipe, the links and the measured codecs; priced, and told."""

from __future__ import annotations

import pytest

from espalier.comm.codecs import codec
from espalier.comm.compressed_collectives import sent_bytes
from espalier.machine import cluster as clusters
from espalier.mechanisms.codecs import choice as codecs
from espalier.plan import collective_time
from espalier.plan.axes.flat_layout import BucketRule, Piece, arrange
from espalier.plan.base import Plan
from espalier.plan.decide import decide
from espalier.plan.request import Crossing, Request
from espalier.recipe import Pin, ShardPin, defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe

HOST = '[[nodes]]\nname = "{}"\ncores = 2\nmemory = "8GiB"\n[nodes.device]\nname = "cpu"\nkind = "cpu"\n'
HOST += "memory = 8589934592\nmemory_bandwidth = 1e10\nflops = {{ fp32 = 4e10 }}\n"
CODECS = 'codecs = [["int8", 3.94, 4e9, 6e9], ["split", 1.19, 3e8, 5e8]]\n'


def request(**more: object) -> Request:
    table = {
        "model": {"depth": 4, "width": 256, "heads": 4, "vocabulary": 512},
        "train": {"steps": 10, "sequence": 128, "batch_tokens": 128 * 64},
    }
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0]).changed(**more)  # type: ignore[arg-type]


def machines(between: str, codecs: str = CODECS, hosts: int = 2) -> clusters.Cluster:
    text = "".join(HOST.format(name) + codecs for name in "abcd"[:hosts])
    links = f'[links]\nbetween = {{ bandwidth = "{between}", latency = "100us" }}\n' if hosts > 1 else ""
    return clusters.loads(text + links)


def decided(cluster: clusters.Cluster, codec: str, ranks: int = 2) -> Plan:
    """Of replicas of whole models: of cut ones less than all gradients would cross."""
    shard = ShardPin(params=1, grads=1, optimizer=1)
    asked = request(pin=Pin(ranks=ranks, threads=1, shard=shard, tp=1, sp=1, pp=1)).changed(codec=codec)
    return decide(asked, cluster).taken


def test_auto_encodes_between_machines_where_links_are_slow() -> None:
    slow, raw = (decided(machines("100Mbit/s"), codec) for codec in ("auto", "exact"))
    assert slow.exchanges[0].codec == "int8"
    assert slow.exchanges[0].level == "between"
    assert any("gradients go as int8" in line for line in slow.why)
    assert slow.predicted is not None
    assert raw.predicted is not None
    assert [one.codec for one in raw.exchanges] == ["exact"]
    sizes = [
        one.length
        for one in arrange(
            [Piece(s.elements, 4, copies=s.copies) for s in request().profile.sizes], lambda group: BucketRule()
        )
    ]
    assert raw.predicted.sent_bytes["gradients"] == sum(4 * size for size in sizes)
    assert slow.predicted.sent_bytes["gradients"] == sum(
        sent_bytes(codec("int8"), "all_reduce", n, (0, 2)) for n in sizes
    )
    terms = [plan.predicted.terms["all_reduce"] for plan in (raw, slow)]
    assert terms[0] > 2 * terms[1]
    assert slow.predicted.memory_bytes["feedback"] > 0
    assert "feedback" not in raw.predicted.memory_bytes


def test_auto_leaves_fast_links_and_unmeasured_codecs_alone() -> None:
    for cluster in (machines("200Gbit/s"), machines("100Mbit/s", codecs="")):
        assert [one.codec for one in decided(cluster, "auto").exchanges] == ["exact"]


def test_one_machine_encodes_only_what_is_asked_for() -> None:
    alone = machines("", hosts=1)
    assert [one.codec for one in decided(alone, "auto").exchanges] == ["exact"]
    (one,) = decided(alone, "int4").exchanges
    assert (one.codec, one.level) == ("int4", "all")


def test_parameters_are_never_rounded() -> None:
    found, _ = codecs.encoded(request().changed(codec="zhybrid"), machines("100Mbit/s"))
    assert {traffic: one.codec for traffic, one in found.crossings.items()} == {
        "gradients": "zfp:8",
        "parameters": "split",
        "activations": "zfp:16",
        "keys_values": "zfp:16",
    }
    assert [one.lossy for one in found.crossings.values()] == [True, False, False, False]


def test_a_codec_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"comm\.codec = 'zhybird'"):
        decided(machines("1Gbit/s"), "zhybird")


def test_a_link_carries_what_coding_and_the_codecs_ratio_let_through() -> None:
    on = collective_time.fleet(machines("100Mbit/s"), 2)
    assert on.between is not None
    raw = on.between.bandwidth
    for one, expected in (
        (Crossing("between", "x", 4.0, 1e12, 1e12), 4 * raw),
        (Crossing("between", "x", 4.0, raw, 1e18), raw),
        (Crossing("between", "x", 4.0, 6 * raw, 3 * raw), 2 * raw),
        (Crossing("inside", "x", 4.0), raw),
    ):
        found = collective_time.encoded(on, one, 4)
        assert found.between is not None
        assert found.between.bandwidth == pytest.approx(expected)
    assert collective_time.encoded(on, None, 4) is on
    halves = collective_time.encoded(on, Crossing("between", "x", 4.0), 2)
    assert halves.between is not None
    assert halves.between.bandwidth == pytest.approx(2 * raw)


def test_a_probed_machine_gets_the_speed_of_its_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        codecs.hybrid_compression, "measure", lambda: {"int8": codecs.hybrid_compression.CodecRate(3.9, 2e9, 3e9)}
    )
    found = codecs.measured(machines("1Gbit/s", codecs=""))
    assert [one.codec for table in found.nodes for one in table.device.codecs] == ["int8", "int8"]
    assert clusters.loads(clusters.dumps(found)) == found
    rates = codecs._rates(found)
    assert rates == {"int8": (3.9, 2e9, 3e9)}
