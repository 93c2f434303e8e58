"""Cluster files: what is written is what is read, and every mistake is named."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster, Copy, Device, Disk, Link, Node, Pair, Rate, catalogue
from espalier.recipe.errors import UserError

HAND = """
[[nodes]]
count = 128
device = "A100-80GB"
devices = 8
[links]
inside = "300GB/s"
between = "400Gbit/s"
"""

positive = st.floats(1e-9, 1e18, allow_nan=False)
bandwidths, operations = st.floats(1e6, 1e14), st.floats(1e6, 1e18)
few = st.integers(1, 64)
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
links = st.builds(Link, bandwidth=bandwidths, latency=positive, launch=positive, measured=st.booleans(), source=words)
rates = st.builds(
    Rate, what=st.sampled_from(["product", "attention"]), precision=st.sampled_from(["fp32", "bf16"]),
    rows=few, inner=few, columns=few, threads=few, processes=few, flops=positive,
)  # fmt: skip
measured_devices = st.builds(
    Device, name=words.filter(lambda name: name not in clusters.known_devices()), kind=st.sampled_from(["cpu", "cuda"]),
    memory=st.integers(1, 2**50), memory_bandwidth=bandwidths,
    flops=st.dictionaries(st.sampled_from(["fp32", "bf16", "fp64"]), operations, min_size=1), peak=st.booleans(),
    dispatch=positive, runtime=st.integers(0, 2**40), rates=st.lists(rates, max_size=3).map(tuple),
    copies=st.lists(st.builds(Copy, threads=few, processes=few, bandwidth=positive), max_size=2).map(tuple),
    source=words,
)  # fmt: skip
LINKS = list(catalogue._catalogue().links)
named_devices = st.sampled_from([name for name in clusters.known_devices() if name != "cpu"]).map(clusters.device)
disks = st.builds(Disk, path=words, write=positive, read=positive, iops=positive, direct=st.booleans())
nodes = st.builds(
    Node, device=measured_devices | named_devices, inside=links, count=few, devices=few, cores=st.integers(0, 256),
    memory=st.integers(0, 2**50), disks=st.lists(disks, max_size=2).map(tuple),
)  # fmt: skip


written = st.builds(
    Cluster, nodes=st.lists(nodes, min_size=1, max_size=2).map(tuple), between=links, machine=words,
    notes=st.lists(words, max_size=2).map(tuple), pairs=st.just((Pair(0, 1, 1e9, 1e-5, 1e-6),)),
    optimizers=st.lists(nodes, max_size=2).map(tuple),
).filter(lambda cluster: len(cluster.devices()) > 1)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(written)
def test_a_written_cluster_reads_back_equal(cluster: Cluster) -> None:
    assert clusters.loads(clusters.dumps(cluster)) == cluster


def test_a_file_by_hand_says_devices_and_links() -> None:
    cluster = clusters.loads(HAND)
    assert len(cluster.devices()) == 1024
    assert cluster.machines == 128
    assert cluster.link(0, 7).bandwidth == 300e9
    assert cluster.link(7, 8).bandwidth == 50e9
    assert cluster.level([0, 7]) == "inside"
    assert cluster.level([7, 8]) == "between"
    assert cluster.same_speed
    assert clusters.loads(clusters.dumps(cluster)) == cluster


def test_links_not_said_are_the_catalogue_s() -> None:
    inside = clusters.loads('[[nodes]]\ndevice = "H100"\ndevices = 8').link(0, 1)
    assert inside.bandwidth == 450e9
    assert inside.latency == pytest.approx(3.4e-6)
    assert "NVLink" in inside.source


def test_latency_may_be_one_for_the_network_or_a_table_or_of_one_link() -> None:
    one = HAND + 'latency = "5ms"'
    table = HAND + 'latency = { inside = "1us", between = "2us" }'
    own = HAND.replace('"400Gbit/s"', '{ bandwidth = "400Gbit/s", latency = "7us", launch = "1us" }')
    assert clusters.loads(one).link(0, 8).latency == pytest.approx(5e-3)
    assert clusters.loads(one).link(0, 1).latency == pytest.approx(3.4e-6)
    assert clusters.loads(table).link(0, 1).latency == pytest.approx(1e-6)
    assert clusters.loads(table).link(0, 8).latency == pytest.approx(2e-6)
    assert clusters.loads(own).link(0, 8).latency == pytest.approx(7e-6)
    assert clusters.loads(own).link(0, 8).launch == pytest.approx(1e-6)


def test_mixed_tables_keep_their_order_and_differ_in_speed() -> None:
    cluster = clusters.loads(
        '[[nodes]]\ndevice = "A100-40GB"\ndevices = 2\n[[nodes]]\ndevice = "T4"\n[links]\nbetween = "10Gbit/s"'
    )
    assert [(place.rank, place.node, place.slot) for place in cluster.devices()] == [(0, 0, 0), (1, 0, 1), (2, 1, 0)]
    assert not cluster.same_speed


def test_tables_of_one_name_are_one_machine() -> None:
    cluster = clusters.loads(
        '[[nodes]]\nname = "desk"\ndevice = "RTX 4090"\n[[nodes]]\nname = "desk"\ndevice = "RTX 3060"\n'
    )
    assert [(place.node, place.slot) for place in cluster.devices()] == [(0, 0), (0, 1)]
    assert cluster.level([0, 1]) == "inside"


def test_a_measured_pair_wins_over_its_level() -> None:
    pairs = "pairs = [[0, 1, 1e9, 1e-5, 2e-6], [0, 2, 5e8, 3e-5, 0.0]]\n"
    cluster = clusters.loads(pairs + '[[nodes]]\ndevice = "T4"\ncount = 3\n[links]\nbetween = "100Gbit/s"')
    assert cluster.link(1, 0).bandwidth == 1e9
    assert cluster.link(1, 2).bandwidth == 12.5e9
    slow = cluster.slowest([0, 1, 2], "between")
    assert (slow.bandwidth, slow.latency, slow.launch) == (5e8, 3e-5, 2e-6)


def test_pairs_alone_are_links_enough() -> None:
    pairs = "pairs = [[0, 1, 1e9, 1e-5, 2e-6]]\n"
    assert clusters.loads(pairs + '[[nodes]]\ndevice = "T4"\ncount = 2').link(0, 1).latency == 1e-5


def test_a_cpu_is_made_of_its_cores() -> None:
    four = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"').nodes[0].device
    eight = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 8\nmemory = "8GiB"').nodes[0].device
    assert eight.flops["fp32"] == 2 * four.flops["fp32"]
    assert four.memory == 8 * 2**30


WITHOUT_TENSOR_CORES = ("P100", "TITAN X")
"""Their products in fp16 are added up in fp32, as fast as those in fp32."""


@pytest.mark.parametrize("name", clusters.known_devices())
def test_every_known_device_is_whole(name: str) -> None:
    it = clusters.device(name, cores=2, memory=2**30)
    assert it.source
    assert it.flops["fp32"] > 0
    assert it.memory_bandwidth > 0
    assert 0.05 < clusters.default_link(name, it.kind).share <= 1
    if it.kind == "cuda":
        assert 0 < it.sustained["attention"] <= it.sustained["product"] <= 1
        assert 0 < it.sustained["fp32"] <= 1
        assert 0.2 <= it.spread <= 0.5
        assert not {"bf16", "tf32"} & set(it.flops) or it.flops["fp16"] == it.flops["bf16"]
        assert it.flops["fp16"] >= it.flops.get("tf32", 0.0) >= 0
        assert it.flops["fp16"] >= (1 if name in WITHOUT_TENSOR_CORES else 2) * it.flops["fp32"]
        assert 3e9 < it.memory < 300 * 2**30


@pytest.mark.parametrize("name", clusters.known_devices())
def test_every_known_device_has_one_name_however_it_is_written(name: str) -> None:
    joined = name.replace("RTX ", "rtx").replace("-", " ")
    for written in (name, name.lower(), joined, f"NVIDIA GeForce {name}", f"{name} GPU"):
        assert clusters.known(written) == name


SPELLINGS = {
    "RTX 4090": ["RTX4090", "rtx 4090", "4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "RTX 4090 24GB"],
    "RTX 4070 Ti SUPER": ["4070TiSuper", "NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070ti super"],
    "RTX 3060": ["RTX 3060 12GB"],
    "RTX 4060 Ti-16GB": ["NVIDIA GeForce RTX 4060 Ti 16GB", "4060ti 16gb"],
    "RTX 3080": ["RTX 3080 10GB", "3080"],
    "RTX 4090 Laptop": ["NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop"],
    "RTX A6000": ["A6000", "NVIDIA RTX A6000"],
    "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation"],
    "T4": ["Tesla T4", "NVIDIA T4"],
    "V100-16GB": ["Tesla V100-SXM2-16GB", "V100 16GB"],
    "V100-PCIe-32GB": ["Tesla V100-PCIE-32GB"],
    "A100-80GB": ["NVIDIA A100-SXM4-80GB", "A100 80GB", "A100-SXM-80GB"],
    "A100-PCIe-80GB": ["NVIDIA A100 80GB PCIe"],
    "A800": ["NVIDIA A800-SXM4-80GB"],
    "H100": ["H100-80GB", "NVIDIA H100 80GB HBM3", "H100 SXM5"],
    "H100-PCIe": ["NVIDIA H100 PCIe"],
    "H100-NVL": ["NVIDIA H100 NVL"],
    "GH200": ["NVIDIA GH200 480GB"],
    "MI300X": ["AMD Instinct MI300X"],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_drivers_and_people_mean_the_same_card(name: str) -> None:
    assert {clusters.known(written) for written in SPELLINGS[name]} == {name}


@pytest.mark.parametrize(
    "other", ["A5500", "RTX 3060 8GB", "RTX 4090 D", "H200 NVL", "A800 PCIe", "A100", "RTX", "", "8GB"]
)
def test_another_card_is_not_taken_for_a_known_one(other: str) -> None:
    assert clusters.known(other) is None


def test_geforce_cards_compute_16_bits_at_twice_their_fp32_rate_and_professional_ones_at_four_times() -> None:
    for name in clusters.known_devices():
        it = clusters.device(name, 1, 2**30)
        if name.startswith("RTX"):
            professional = clusters.default_link(name, "cuda").share > 0.5  # peer-to-peer
            assert it.flops["bf16"] == (4 if professional else 2) * it.flops["fp32"]


def test_a_link_may_be_named_and_a_bandwidth_without_a_name_is_of_the_device_s_own_kind() -> None:
    def inside(said: str, device: str = "RTX 3090") -> clusters.Link:
        return clusters.loads(f'[[nodes]]\ndevice = "{device}"\ndevices = 8\n[links]\ninside = {said}').link(0, 1)

    usual = clusters.default_link("RTX 3090", "cuda")
    assert inside('"pcie4-host"') == usual
    assert inside('"32GB/s"').share == inside('"8GB/s"').share == usual.share
    assert inside('"56.25GB/s"').share == 0.0  # a bridge: what is usual of fast links
    assert inside('{ bandwidth = "8GB/s", share = 0.5 }').share == 0.5


@pytest.mark.parametrize("name", LINKS)
def test_links_without_peer_to_peer_reach_less_than_those_with_it(name: str) -> None:
    found = clusters.loads(f'[[nodes]]\ndevice = "H100"\n[links]\ninside = "{name}"').link(0, 0)
    assert found.source
    assert (found.share < 0.5) == name.endswith("-host")


def test_tcp_reaches_less_of_a_fast_network_than_rdma() -> None:
    def between(said: str, device: str = "T4") -> clusters.Link:
        return clusters.loads(f'[[nodes]]\ndevice = "{device}"\ncount = 2\n[links]\nbetween = {said}').link(0, 1)

    assert between('"100Gbit/s"').share == 0.0  # what is usual between machines
    assert between('"10Gbit/s"').share == 0.9
    tcp = [between(f'{{ bandwidth = "{rate}Gbit/s", fabric = "tcp" }}') for rate in (10, 25, 32, 50, 100, 200)]
    shares, reached = [one.share for one in tcp], [one.share * one.bandwidth for one in tcp]
    assert shares == sorted(shares, reverse=True)
    assert reached == sorted(reached)
    assert shares[2] == pytest.approx(0.6, abs=0.02)  # NVIDIA/nccl issue 209: 60 % of 32 Gbit/s
    assert reached[4] == pytest.approx(5.2e9, rel=0.05)  # issue 450: 100 Gbit/s
    assert between('"25Gbit/s"') == between('{ bandwidth = "25Gbit/s", fabric = "tcp" }')
    assert between('{ bandwidth = "25Gbit/s", fabric = "rdma" }').share == 0.0


def test_catalogue_rates_are_dense() -> None:
    """The figures people know, without the factor two of structured sparsity."""
    assert clusters.device("A100-80GB").flops["bf16"] == 312e12
    assert clusters.device("H100").flops["bf16"] == clusters.device("H200").flops["bf16"] == 989.4e12
    assert clusters.device("L4").flops["bf16"] == 121e12


MINE = '[[nodes]]\n[nodes.device]\nname = "a"\nkind = "cuda"\nmemory = 1000\n'
BAD = {
    "": "has no nodes",
    '[[nodes]]\ndevice = "A100"': 'device = "A100-80GB"',
    '[[nodes]]\ndevice = "A5500"': "describe it in a table",
    '[[nodes]]\ndevice = "H200 NVL"': "known are GeForce RTX 30",
    '[[nodes]]\ndevice = "Apple M3 Max"': 'device = "cpu", with cores and memory',
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = "pcie6"': "not a quantity: 'pcie6'",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = { bandwidth = "1GB/s", share = 2.0 }': "share = 0.9",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = { bandwidth = "1GB/s", fabric = "tcp" }': "fabric",
    '[[nodes]]\ndevice = "H100"\ncount = 0': "count is 0",
    '[[nodes]]\ndevice = "H100"\ndevices = -1': "devices is -1",
    '[[nodes]]\ndevice = "H100"\nmtbf = 0': "nodes[0].mtbf is 0.0",
    '[[nodes]]\ndevice = "H100"\nmtbf = -8': "nodes[0].mtbf is -8.0",
    '[[nodes]]\ndevice = "H100"\nmtbf = inf': "nodes[0].mtbf is inf",
    '[[nodes]]\ndevice = "H100"\nmtbf = nan': "nodes[0].mtbf is nan",
    '[[nodes]]\ndevice = "H100"\nmtbf = "1 year"': "nodes[0].mtbf: Expected `float | null`",
    'mtbf = 900\n[[nodes]]\ndevice = "H100"': "mtbf stands in [[nodes]]",
    '[[nodes]]\ndevice = "H100"\ncount = 2': "links.between is missing",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = "0GB/s"': "must be from a thousand",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = "1e3TB/s"': "links.inside is 1000000000000000.0",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = 25': "from a thousand to 1e+14 a second",
    MINE + "memory_bandwidth = 1e9\nflops = { fp32 = 0 }": "flops.fp32 is 0.0",
    MINE + "memory_bandwidth = 80\nflops = { fp32 = 1e9 }": "memory_bandwidth is 80",
    MINE + "memory_bandwidth = 1e9\nflops = { fp32 = 80 }": "flops.fp32 is 80",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = -3': "not a quantity: -3",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = inf': "finite",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = "5ms"': "unknown unit 'ms'",
    '[[nodes]]\ndevice = "H100"\n[links]\nbetween = { bandwidth = "1GB/s", latency = "3GB" }': "unknown unit 'GB'",
    '[[nodes]]\ndevice = "H100"\nmemry = "3GB"': "did you mean memory",
    '[[nodes]]\ndevice = "H100"\ncount = 1000000000': "1,000,000 devices or fewer",
    '[[nodes]]\ndevice = "H100"\n[[nodes]]\ndevice = "T4"\ncount = 1000\ndevices = 1000': "has 1,000,001 devices",
    '[[nodes]]\ndevice = "H100"\n[links]\npairs = []': "pairs stands at the top of the file",
    '[[nodes]]\ndevice = "H100"\n[links]\nbandwith = 3': "docs/cluster.md",
    '[[nodes]]\ndevice = "H100"\n[links]\nbandwidth = 3': "bandwidth stands in links.inside or links.between",
    '[[nodes]]\ndevice = "H100"\n[links]\nbetwen = 3': "did you mean between?",
    '[[nodes]]\ndevice = "H100"\n[links]\ninside = { bandwith = 3 }': "did you mean bandwidth?",
    'devices = 8\n[[nodes]]\ndevice = "H100"': "devices stands in [[nodes]]",
    'pairs = []\n[[nodes]]\ndevice = "H100"\n[links.latency]\ninsid = 1': "did you mean inside?",
    'note = []\n[[nodes]]\ndevice = "H100"': "did you mean notes?",
    '[[nodes]]\ndevice = "H100"\ncount = "two"': "nodes[0].count",
    '[[nodes]]\ndevice = "cpu"\nmemory = "1GiB"': "does not say its cores",
    '[[nodes]]\ndevice = "cpu"\ncores = 2': "does not say its memory",
    '[[nodes]]\ndevice = "H100"\nname = "a"\ncount = 2': "a name is one machine's",
    'pairs = [[0, 9, 1e9, 1e-5, 0.0]]\n[[nodes]]\ndevice = "H100"': "link from 0 to 9",
    "[[nodes]": "cannot be read: Expected",
}


@pytest.mark.parametrize(("text", "said"), BAD.items(), ids=list(BAD.values()))
def test_a_mistake_is_named(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        clusters.loads(text, "mine.toml")
    assert said in str(caught.value)
    assert "mine.toml" in str(caught.value)


values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | st.sampled_from(["H100", "cpu", "3GB/s", ""]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["nodes", "links", "device", "count", "devices", "inside", "between", "bandwidth", "latency",
                         "pairs", "memory", "cores", "flops", "name", "kind", "rates"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["nodes", "links", "pairs", "machine", "notes", "x"]), values, max_size=4))
def test_any_toml_loads_or_is_refused(table: dict[str, object]) -> None:
    try:
        text = tomli_w.dumps(table)
        tomllib.loads(text)
    except (TypeError, tomllib.TOMLDecodeError):
        return
    with suppress(UserError):
        assert clusters.loads(text).nodes


def test_a_file_that_is_not_there_is_said(tmp_path) -> None:
    with pytest.raises(UserError, match="cannot be read: it is not there"):
        clusters.read(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        clusters.read(tmp_path / "bytes.toml")
    (tmp_path / "good.toml").write_text(HAND)
    assert clusters.read(tmp_path / "good.toml") == clusters.loads(HAND)


def test_every_example_in_the_docs_loads() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        cluster = clusters.loads(example)
        assert clusters.loads(clusters.dumps(cluster)) == cluster


def test_the_docs_list_every_device_and_every_link() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    listed = {name for line in text.splitlines() if line.startswith("|") for name in re.findall(r"`([^`]+)`", line)}
    assert set(clusters.known_devices()) <= listed
    assert {name for name in LINKS if name.startswith("pcie")} <= listed


def test_a_slow_link_to_one_machine_slows_what_goes_over_it_and_nothing_else() -> None:
    slow = '[[nodes]]\ndevice = "T4"\nbetween = { bandwidth = "100Mbit/s", latency = "5ms" }\n'
    cluster = clusters.loads(f'[[nodes]]\ndevice = "T4"\ncount = 2\n{slow}[links]\nbetween = "100Gbit/s"')
    assert cluster.link(0, 1).bandwidth == cluster.slowest([0, 1], "between").bandwidth == 12.5e9
    assert cluster.link(2, 0).bandwidth == cluster.slowest([0, 1, 2], "between").bandwidth == 12.5e6
    assert cluster.slowest([0, 1, 2], "between").latency == 5e-3
    assert cluster.links == [[12.5e9, 12.5e9, 12.5e6], [12.5e9, 12.5e9, 12.5e6], [12.5e6] * 3]
    assert clusters.loads(clusters.dumps(cluster)) == cluster
    faster = clusters.loads(clusters.dumps(cluster).replace("bandwidth = 12500000.0", "bandwidth = 1e12"))
    assert faster.link(2, 0).bandwidth == 12.5e9


def test_a_byte_order_mark_is_skipped(tmp_path) -> None:
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + HAND.encode())
    assert clusters.read(tmp_path / "marked.toml") == clusters.loads(HAND)
