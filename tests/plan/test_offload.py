"""Offload and optimizer nodes in a plan: what waits outside the device, and on whose disk."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from asked import decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import every_layout

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.mechanisms.local_rounds.options import DiLoCo, Eager
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.plan import collective_time, search
from espalier.plan.axes import node_cost as cost
from espalier.plan.axes import offload, optimizer_node
from espalier.plan.axes import offload_layout as layout
from espalier.plan.base import RESIDENT, Offload, Plan, Rank, dumps, loads
from espalier.plan.compose import Refusal
from espalier.plan.decide import decide
from espalier.plan.layout_estimate import grid
from espalier.plan.layouts import Layouts
from espalier.plan.refusals import DoesNotFit
from espalier.plan.request import Crossing, Request
from espalier.recipe import Auto, Pin, units
from espalier.recipe.errors import UserError
from espalier.recipe.sections import ShardPin

tiers = st.sampled_from(["device", "host", "disk"])


@given(st.builds(Offload, optimizer=tiers, parameters=tiers, activations=tiers), st.integers(0, 9))
def test_a_plan_is_read_as_it_was_written(offload: Offload, window: int) -> None:
    node = Rank(role="optimizer", node=1, layers=(0, 4))
    plan = Plan(ranks=(Rank(), node), offload=offload).with_state(OptimizerNodeState(layer_window=window))
    assert loads(dumps(plan)) == plan
    assert plan.trainers == (0,)


def test_plans_from_before_offload_are_read() -> None:
    table = json.loads(dumps(Plan()))
    for name in ("offload", "choices"):
        del table[name]
    del table["ranks"][0]["layers"]
    assert loads(json.dumps(table)) == Plan()


OPTIMIZER = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\nrole = "optimizer"\n'
TRAINER = OPTIMIZER.replace("optimizer", "trainer")


def test_machines_of_the_role_optimizer_have_no_devices_to_train_on() -> None:
    cluster = clusters.loads(OPTIMIZER + TRAINER + '[links]\nbetween = "1Gbit/s"')
    assert len(cluster.devices()) == cluster.machines == len(cluster.optimizers) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [(OPTIMIZER, 'only nodes with role = "optimizer"'), (OPTIMIZER + TRAINER, "links.between is missing")],
)
def test_a_cluster_that_cannot_be_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        clusters.loads(text)


# --- where states wait -----------------------------------------------------------------------------------------------


def machine(
    device: str = "A100-40GB", devices: int = 1, memory: float = 0, disk: float = 0, count: int = 1, cores: int = 2
) -> Cluster:
    """Machines with so many GiB of memory, and a disk of so many GB/s; 0: nobody says."""
    disks = f'[[nodes.disks]]\npath = "/scratch"\nwrite = {disk * 1e9}\nread = {disk * 1.5e9}\niops = 1e4\n'
    return clusters.loads(
        f'[[nodes]]\ndevice = "{device}"\ncount = {count}\ndevices = {devices}\ncores = {cores}\n'
        + f'memory = "{memory}GiB"\n' * bool(memory)
        + disks * bool(disk)
        + '[links]\nbetween = "10Gbit/s"\n'
    )


def random_case(seed: int) -> tuple[Request, Cluster]:
    """Models too large for their devices, on machines that hold more, or less, or have a disk."""
    draw = random.Random(seed)
    machines, devices = draw.choice([(1, 1), (1, 2), (2, 1), (1, 4)])
    device, memory = draw.choice(["A100-40GB", "T4"]), draw.choice([0, 16, 64, 1024])
    cluster = machine(device, devices, memory, draw.choice([0, 1, 6]), machines)
    request = decoder(draw.choice([2048, 4096]), draw.choice([8, 16, 32]), 1024, draw.choice([1, 2, 3]))
    pinned: Any = draw.choice([None, None, "none", "host", "disk"])
    return request.changed(precision=draw.choice(["fp32", "fp16"]), pin=Pin(offload=pinned)), cluster


def held_so(way: Offload, layout: Layouts) -> bool:
    """Whether a layout may wait so: ranks with a window of layers hold no shards, and activations wait where blocks are
    computed again."""
    whole = (layout.algorithm, layout.recompute, layout.pp, layout.optimizer) == ("data", "block", 1, 1)
    again = (layout.recompute, layout.pp) == ("block", 1) or way.activations == "device"
    return again and (whole or not offload.windowed(way))


def brute_force(request: Request, cluster: Cluster) -> float:
    """Seconds of the fastest layout that fits, tried one by one; infinite where none does."""
    times = []
    for part, ranks, threads in search.parts(request, cluster):
        on = collective_time.fleet(part, ranks, threads)
        for one in filter(partial(held_so, request.offload), every_layout(request, ranks, on.per_node)):
            priced = grid(request, on, one)
            if float(priced.over) <= 0:
                times.append(float(priced.seconds))
    return min(times, default=float("inf"))


@pytest.mark.parametrize(
    ("first", "count"), [(0, 4), *(pytest.param(first, 8, marks=pytest.mark.slow) for first in range(0, 72, 8))]
)
def test_the_search_with_offload_equals_brute_force(first: int, count: int) -> None:
    away = 0
    for seed in range(first, first + count):
        request, cluster = random_case(seed)
        made, found = search.anywhere(request, cluster)
        pinned = request.pin.offload
        resident = float("inf") if pinned in ("host", "disk") else brute_force(request, cluster)
        ways = offload.ways(request, cluster) if resident == float("inf") and pinned != "none" else []
        fastest = {way: brute_force(request.changed(offload=way), cluster) for way in ways}
        best = min([resident, *fastest.values()])
        assert bool(found.options) == (best < float("inf")), seed
        if found.options:
            mine = fastest.get(made.offload, resident)
            assert found.options[0].seconds == pytest.approx(mine), seed
            assert mine <= best * (1 + found.tie), seed
            assert (made.offload == RESIDENT) == (resident < float("inf")), seed
        away += made.offload != RESIDENT
    assert away


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 60), st.integers(0, 40))
def test_more_memory_never_sends_more_away_and_never_makes_a_way_slower(least: int, more: int) -> None:
    cluster = machine(memory=1024, disk=2)
    asked = decoder(2048, 16, 1024, 8)
    found = [search.anywhere(asked.changed(memory=size * 2.0**30), cluster) for size in (least, least + more)]
    less, larger = (len(str(made.offload)) if one.options else 1000 for made, one in found)
    assert larger <= less
    if found[0][0].offload == found[1][0].offload and found[0][1].options:
        assert found[1][1].options[0].seconds <= found[0][1].options[0].seconds * (1 + 1e-9)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_waits_is_what_devices_no_longer_hold(tier: Literal["host", "disk"]) -> None:
    request, cluster = decoder(1024, 8, 512, 8), machine(memory=256, disk=2)
    there = decide(request.changed(pin=Pin(ranks=1)), cluster).plan
    here = decide(request.changed(pin=Pin(ranks=1, offload=tier)), cluster).plan
    assert here.predicted
    assert there.predicted
    assert str(here.offload) == f"optimizer on {tier}"
    assert here.predicted.waiting_bytes == {"optimizer": 8.0 * request.profile.trainable}
    assert there.predicted.memory_bytes["optimizer"] == 8.0 * request.profile.trainable
    assert here.predicted.memory_bytes["optimizer"] == 0
    assert here.predicted.memory_bytes["buffers"] == layout.BUFFERS * layout.CHUNK
    assert here.predicted.state_bytes == there.predicted.state_bytes
    assert any(f"optimizer states wait on {tier}" in line or tier in line for line in here.why)


@pytest.mark.parametrize("memory", [3.0, 64.0])
def test_a_disk_that_is_pinned_holds_all_optimizer_states(memory: float) -> None:
    request = decoder(1024, 8, 256, 4).changed(pin=Pin(offload="disk", ranks=1))
    plan = decide(request, machine("cpu", memory=memory, disk=4)).plan
    assert plan.offload.optimizer == "disk"
    assert plan.predicted
    assert plan.predicted.waiting_bytes["optimizer"] == 8 * request.profile.trainable


def test_memory_that_is_too_small_is_not_used() -> None:
    request = decoder(4096, 16, 1024, 8)
    small, large = (decide(request, machine(memory=memory, disk=4)).plan.offload for memory in (16, 256))
    assert (small.optimizer, large.optimizer) == ("disk", "host")


def test_a_slower_disk_makes_a_longer_step() -> None:
    request = decoder(2048, 8, 512, 8).changed(pin=Pin(offload="disk", ranks=1, micro_batch=1))
    taken = [decide(request, machine(disk=speed)).plan.predicted for speed in (4, 2, 1)]
    steps = [one.step_seconds for one in taken if one]
    assert steps == sorted(steps)
    assert len(set(steps)) == 3
    size = 8.0 * request.profile.trainable
    assert taken[2]
    assert taken[2].terms["offload"] == pytest.approx(size / 1e9, rel=0.1)


@pytest.mark.parametrize(
    ("pinned", "cluster", "told"),
    [
        ("host", machine("cpu", memory=8), "on processors that is the memory"),
        ("disk", machine(), "names no disk"),
        ("none", machine(disk=2), "does not fit"),
        ("host", machine(memory=8), "does not fit"),
    ],
)
def test_a_pin_is_obeyed_or_refused(pinned: Any, cluster: Cluster, told: str) -> None:
    with pytest.raises(UserError, match=told):
        _ = decide(decoder(4096, 32, 1024, 8).changed(pin=Pin(offload=pinned)), cluster).taken


def test_what_cannot_run_offloaded_is_not_planned_so() -> None:
    def refuses(plan: Plan) -> Refusal | None:
        return None if plan.offload == RESIDENT else Refusal("states are moved whole", ("a", "b"), "leave it out")

    request, cluster = decoder(4096, 16, 1024, 8).changed(refuses=refuses), machine(memory=1024, disk=2)
    assert not decide(request, cluster).fits
    with pytest.raises(UserError, match="states are moved whole"):
        decide(request.changed(pin=Pin(offload="disk")), cluster)


def test_where_nobody_says_how_much_memory_there_is_the_bytes_it_needs_are_told() -> None:
    request = decoder(4096, 16, 1024, 8)
    with pytest.raises(DoesNotFit) as error:
        _ = decide(request, machine()).taken
    told = re.search(r'plan.pin.offload="host".*: ([\d.]+) GiB a machine', error.value.do or "")
    assert told
    assert decide(request, machine(memory=float(told[1]) / offload.HOST_MEMORY + 0.1)).fits
    assert not decide(request, machine(memory=float(told[1]) / offload.HOST_MEMORY - 0.1)).fits


def test_a_processor_offers_its_disk_before_it_says_that_nothing_fits() -> None:
    request = decoder(1024, 16, 256, 4)
    plan = decide(request, machine("cpu", memory=3, disk=1)).taken
    assert plan.offload.optimizer == "disk"
    assert plan.predicted
    assert plan.predicted.memory_bytes["peak"] <= plan.predicted.memory_limit
    with pytest.raises(DoesNotFit):
        _ = decide(request, machine("cpu", memory=3)).taken


def test_states_that_fit_stay_in_memory_but_where_the_disk_is_pinned() -> None:
    """A disk that moves all states in 1.6 s each way, and an optimizer that is faster."""
    request, cluster = decoder(1024, 16, 256, 4), machine("cpu", memory=3, disk=1)
    free, pinned = (decide(request.changed(pin=Pin(offload=pin)), cluster).taken.predicted for pin in (None, "disk"))
    assert free
    assert pinned
    total, write = 8.0 * request.profile.trainable, total_seconds(request, cluster, pinned.terms)
    half = (pinned.memory_limit - pinned.memory_bytes["peak"]) / 2
    assert 0 < half < total / 2
    assert pinned.waiting_bytes == {"optimizer": total}
    assert pinned.memory_bytes["buffers"] == layout.BUFFERS * layout.CHUNK
    assert free.memory_bytes["optimizer"] == pytest.approx(half)
    assert free.waiting_bytes["optimizer"] == pytest.approx(total - half)
    assert free.memory_bytes["peak"] == pytest.approx(pinned.memory_bytes["peak"] + half)
    assert pinned.terms["offload"] == pytest.approx(write, rel=0.01)
    assert free.terms["offload"] == pytest.approx(write - half / 1e9, rel=0.01)


def total_seconds(request: Request, cluster: Cluster, terms: Mapping[str, float]) -> float:
    """By which a step gets longer where all states move."""
    size, pieces = 8.0 * request.profile.trainable, -(-8 * request.profile.trainable // layout.CHUNK)
    disk = cluster.nodes[0].disks[0]
    return size / disk.write - terms["optimizer"] + size * (1 / disk.read + 1 / disk.write) / pieces


def test_activations_wait_on_disk_where_that_is_the_fastest_way_to_fit() -> None:
    request = decoder(1024, 16, 256, 4)
    plan = decide(request, machine("cpu", memory=2.032, disk=1)).taken
    assert plan.offload == Offload(optimizer="disk", activations="disk")
    assert (plan.recompute, plan.predicted is not None) == ("block", True)
    assert plan.predicted
    size = plan.micro_batch * 256 * 1024 * 4  # what a block gives, fp32
    assert plan.predicted.waiting_bytes["activations"] == 15 * size  # of all blocks but the last
    assert plan.predicted.memory_bytes["activations"] < 6 * size + 2**20
    assert any("activations" in line and "wait on disk" in line for line in plan.why)
    alone = request.changed(offload=Offload(activations="disk"))
    seconds = [replace_disk_seconds(alone, speed) for speed in (4, 1, 0.01)]
    assert seconds == sorted(seconds)
    assert seconds[2] > seconds[0]


def replace_disk_seconds(request: Request, speed: float) -> float:
    """Seconds of the fastest layout that computes blocks again, with a disk of so many GB/s."""
    cluster = machine("cpu", memory=64, disk=speed)
    asked = request.changed(pin=offload.pinned(request, request.offload))
    return search.search(asked, cluster).options[0].seconds


def test_a_disk_without_room_is_refused_with_the_bytes_that_it_lacks() -> None:
    request, cluster = decoder(1024, 16, 256, 4).changed(free=1e9), machine("cpu", memory=3, disk=1)
    with pytest.raises(DoesNotFit, match="634 MiB are missing") as pinned:
        _ = decide(request.changed(pin=Pin(offload="disk")), cluster).taken
    assert "954 MiB free" in (pinned.value.why or "")
    with pytest.raises(DoesNotFit) as free:
        _ = decide(request, cluster).taken
    assert "free 634 MiB of the disk" in (free.value.do or "")
    needed = 1e9 + 634.5 * 2**20 / offload.SCRATCH
    assert decide(request.changed(free=needed), cluster).taken.offload == Offload(optimizer="disk")


# --- optimizer nodes -------------------------------------------------------------------------------------------------


def with_nodes(
    workers: int = 4, nodes: int = 1, memory: float = 3, between: str = "1Gbit/s", disk: float = 1
) -> Cluster:
    """Processors without disks, and optimizer nodes with one each."""
    kind = '[[nodes]]\ndevice = "cpu"\ncores = 2\n'
    return clusters.loads(
        f'{kind}count = {workers}\nmemory = "{memory}GiB"\n{kind}count = {nodes}\nmemory = "8GiB"\nrole = "optimizer"\n'
        f'disks = [{{ path = "/d", write = {disk * 1e9}, read = {disk * 1e9}, iops = 1e4 }}]\n'
        f'[links]\nbetween = "{between}"\n'
    )


def test_a_model_that_no_worker_holds_goes_to_the_optimizer_node() -> None:
    request = decoder(2048, 16, 256, 8)  # 12.9 GB of states on machines of 3 GiB that would share them by four
    plan = decide(request, with_nodes()).taken
    assert plan.offload == offload.NODE
    assert [rank.role for rank in plan.ranks] == ["trainer"] * len(plan.trainers) + ["optimizer"]
    assert plan.ranks[-1].node == 4
    assert plan.ranks[-1].layers == (0, 16)
    assert (plan.state(OptimizerNodeState).layer_window, plan.recompute) == (3, "none")
    assert plan.predicted
    assert plan.predicted.sent_bytes["gradients"] == 4.0 * request.profile.trainable
    assert plan.predicted.memory_bytes["window"] == cost.window_bytes(optimizer_node.layers(request), 3)
    assert any("optimizer node on machine 4" in line for line in plan.why)
    with pytest.raises(DoesNotFit):
        _ = decide(request.changed(pin=Pin(offload="none")), with_nodes()).taken


def test_layers_are_divided_among_nodes_and_a_machine_may_be_both() -> None:
    request = decoder(1024, 9, 256, 8).changed(pin=Pin(offload="node"))
    plan = decide(request, with_nodes(2, nodes=2)).taken
    assert [(rank.node, rank.layers) for rank in plan.ranks if rank.role == "optimizer"] == [(2, (0, 4)), (3, (4, 9))]
    here = decide(request, machine("cpu", memory=4, disk=1)).taken
    assert here.ranks[-1] == Rank(role="optimizer", node=0, threads=1, layers=(0, 9))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["between", "disk"])
def test_what_a_node_is_slow_at_makes_steps_longer(name: str) -> None:
    request = decoder(1024, 8, 16, 8).changed(pin=Pin(offload="node"))
    slower = {"between": ["10Gbit/s", "1Gbit/s", "100Mbit/s"], "disk": [4, 0.4, 0.04]}[name]
    quick: dict[str, Any] = {"between": "100Gbit/s", "disk": 20} | {}
    steps = [decide(request, with_nodes(**{**quick, name: one})).plan.predicted for one in slower]
    taken = [one.step_seconds for one in steps if one]
    assert taken == sorted(taken)
    assert taken[2] > 5 * taken[1]


def test_a_node_whose_disk_is_not_known_is_not_priced() -> None:
    with pytest.raises(UserError, match="names no disk"):
        decide(decoder().changed(pin=Pin(offload="node")), machine("cpu", memory=8))


RECIPE = """
model = { depth = 2, width = 256, heads = 4, feed_forward = 512 }
data.path = "corpus.txt"
train = { steps = 2, sequence = 32, batch_tokens = 64, validate_every = 100, optimizer = { kind = "adamw" } }
plan = { trial = false, pin = { ranks = 1, offload = "disk" } }
"""


@pytest.mark.slow
def test_the_bytes_that_wait_are_those_that_a_step_moves(tmp_path: Path) -> None:
    text = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n" for i in range(600))
    (tmp_path / "corpus.txt").write_text(text)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "espalier", "train", "recipe.toml", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    plan = loads((tmp_path / "run" / "plan.json").read_bytes())
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    moved = [event["offload"]["disk"] for event in events if event["event"] == "step" and "offload" in event]
    assert plan.predicted
    for name in ("read", "written"):
        assert moved[-1][name] == pytest.approx(plan.predicted.waiting_bytes["optimizer"], rel=0.02)  # whole pages


def test_rounds_at_nodes_are_as_long_as_makes_their_exchange_short() -> None:
    request, cluster = decoder(1024, 9, 256, 8).changed(sync=DiLoCo()), with_nodes(2, between="100Mbit/s")
    plan = decide(request, cluster).taken
    assert plan.replicas
    assert plan.predicted
    assert plan.replicas == ((0,), (1,))
    assert not plan.state(LocalRoundsState).adapt
    assert plan.ranks[-1].role == "optimizer"
    assert plan.predicted.terms["outer"] <= 0.05 * plan.predicted.step_seconds
    assert plan.predicted.sent_bytes == {
        "outer_step": optimizer_node.pushed(request) / plan.state(LocalRoundsState).steps
    }
    assert plan.state(LocalRoundsState).steps > decide(request, with_nodes(2)).taken.state(LocalRoundsState).steps  # type: ignore[union-attr]
    quarter = decide(request.changed(sync=DiLoCo(steps=7, codec="int8")), cluster).taken
    assert quarter.predicted
    assert quarter.predicted.sent_bytes["outer_step"] < 0.3 * 4.0 * request.profile.trainable / 7
    with pytest.raises(UserError, match=r"(?s)needs two replicas.*try: sync\.replicas=2"):
        decide(request.changed(sync=DiLoCo()), with_nodes(1))
    with pytest.raises(UserError, match="cannot run rounds of the method 'eager'"):
        decide(request.changed(sync=Eager()), cluster)


def test_machines_of_different_speed_have_samples_by_their_speed_and_the_nodes_all_layers() -> None:
    cluster = with_nodes(2, memory=8, between="10Gbit/s")
    slow = msgspec.structs.replace(cluster.nodes[0], count=1)
    device = slow.device
    quick = msgspec.structs.replace(
        slow, device=msgspec.structs.replace(device, name="quick", flops={k: 4 * v for k, v in device.flops.items()})
    )
    request = decoder(1024, 8, 256, 40).changed(pin=Pin(offload="node", ranks=2), sync=Auto())
    plan = decide(request, msgspec.structs.replace(cluster, nodes=(quick, slow))).taken
    counts = [stop - start for start, stop in (plan.ranks[rank].share for rank in plan.trainers)]
    assert sum(counts) == 40
    assert counts[0] > 2 * counts[1] > 0
    assert plan.ranks[-1] == Rank(role="optimizer", node=2, threads=2, layers=(0, 8))


def of_two(link: str, per_machine: int = 4, disk: float = 8e9, more: str = "") -> tuple[Request, Cluster]:
    """Two machines of so many workers each, and a node behind that link; `more`: keys of both, then other tables."""
    kind = f'[[nodes]]\ndevice = "cpu"\ncores = {per_machine}\nmemory = "16GiB"\n'
    disks = f'disks = [{{ path = "/d", write = {disk}, read = {disk}, iops = 1e4 }}]\n'
    keys, _, tables = more.partition("|")
    text = f'{kind}{keys}count = 2\n{kind}{keys}role = "optimizer"\n{disks}{tables}[links]\nbetween = "{link}"\n'
    pin = Pin(offload="node", ranks=2 * per_machine, threads=1)
    return decoder(1024, 8, 256, 16).changed(pin=pin), clusters.loads(text)


def aggregators(plan: Plan) -> list[int]:
    return [one.node for one in plan.ranks if one.role == "aggregator"]


def test_machines_of_several_workers_get_an_aggregator_where_a_step_is_shorter_by_it() -> None:
    found = {link: aggregators(decide(*of_two(link)).taken) for link in ("1Gbit/s", "100000Gbit/s")}
    assert found == {"1Gbit/s": [0, 1], "100000Gbit/s": []}
    request, cluster = of_two("1Gbit/s")
    without = request.changed(pin=msgspec.structs.replace(request.pin, roles=()))
    with_, plain = (decide(one, cluster).taken for one in (request, without))
    assert aggregators(plain) == []
    assert with_.predicted is not None
    assert plain.predicted is not None
    assert with_.predicted.step_seconds < plain.predicted.step_seconds


def test_machines_of_one_worker_get_no_aggregator_and_others_do_where_it_is_pinned() -> None:
    request, cluster = of_two("10Gbit/s", per_machine=1)
    assert aggregators(decide(request, cluster).taken) == []
    pinned = request.changed(pin=msgspec.structs.replace(request.pin, roles=("aggregator",)))
    assert aggregators(decide(pinned, cluster).taken) == [2], "beside the node"
    alone = pinned.changed(pin=msgspec.structs.replace(pinned.pin, ranks=1))
    plan = decide(alone, cluster).taken
    assert aggregators(plan) == []
    assert any(sentence.startswith("No aggregator, which was asked for") for sentence in plan.why)
    request, cluster = of_two("100000Gbit/s")
    pinned = request.changed(pin=msgspec.structs.replace(request.pin, roles=("aggregator",)))
    assert aggregators(decide(pinned, cluster).taken) == [2], "the node reads its disk once"
    several = cluster.changed(optimizers=(cluster.optimizers[0].changed(count=2),))
    assert aggregators(decide(pinned, several).taken) == [0, 1]


SUMMING = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "4GiB"\nrole = "aggregator"\ncount = {}\n'


def test_an_aggregator_with_a_link_as_fast_as_all_workers_spares_the_node_and_is_on_the_machine_behind_it() -> None:
    request, cluster = of_two("1Gbit/s", 1, more=f'between = "100Mbit/s"\n|{SUMMING.format(1)}')
    plan = decide(request, cluster).taken
    without = decide(request.changed(pin=msgspec.structs.replace(request.pin, roles=())), cluster).taken
    assert (aggregators(plan), aggregators(without)) == ([3], [])
    assert plan.predicted
    assert without.predicted
    assert plan.predicted.step_seconds < 0.8 * without.predicted.step_seconds
    assert any("1 aggregator on other machines" in sentence for sentence in plan.why)
    assert aggregators(decide(request, cluster.changed(standbys=cluster.optimizers)).taken) == [4]


def test_an_aggregator_with_a_link_like_the_nodes_is_left_alone_and_two_before_four_workers_are_not() -> None:
    request, cluster = of_two("100Mbit/s", 1, more=f"|{SUMMING.format(1)}")
    assert optimizer_node.chosen(request, collective_time.fleet(cluster, 2), 0.0).place == ""
    four = cluster.changed(nodes=(cluster.nodes[0].changed(count=4),), aggregators=(cluster.nodes[0].changed(count=2),))
    assert optimizer_node.chosen(request, collective_time.fleet(four, 4), 0.0) == cost.Route(4, 1, "host", 2)


def test_a_node_with_a_slow_disk_has_an_aggregator_beside_it() -> None:
    request, cluster = of_two("10Gbit/s", 1, disk=1e7)
    assert aggregators(decide(request, cluster).taken) == [2]


def test_pushes_in_eight_bits_are_a_byte_each_in_the_plan() -> None:
    request, cluster = of_two("1Gbit/s", 1)
    exact, coded = (decide(request.changed(codec=codec), cluster).taken.predicted for codec in ("exact", "int8"))
    assert exact
    assert coded
    numel = optimizer_node.pushed(request) / 4
    assert (exact.sent_bytes["gradients"], coded.sent_bytes["gradients"]) == (4 * numel, numel)
    assert optimizer_node.step_bytes(request)[1:] == (4 * numel, 4 * numel)
    crossing = Crossing("all", "int8", 4.0, 0.0)
    assert optimizer_node.step_bytes(request.changed(crossings={"gradients": crossing}))[1:] == (numel, 2 * numel)


def test_a_plan_says_how_much_faster_zero1_would_be_and_where_it_lacks_memory() -> None:
    request, cluster = of_two("1Gbit/s", 1)
    (sentence,) = (one for one in decide(request, cluster).taken.why if one.startswith("ZeRO-1"))
    shard = ShardPin(params=1, grads=1, optimizer=2)
    pin = Pin(ranks=2, threads=1, offload="none", dp=2, recompute="none", shard=shard)
    zero1 = decide(request.changed(pin=pin), cluster).taken.predicted
    assert zero1
    assert f"takes {units.show_seconds(zero1.step_seconds)} a step" in sentence
    assert sentence.endswith('times as fast, and fits (plan.pin.offload = "none").')
    device = cluster.nodes[0].device.changed(memory=3 * 2**29)
    small = cluster.changed(nodes=(cluster.nodes[0].changed(memory=3 * 2**29, device=device),))
    (sentence,) = (one for one in decide(request, small).taken.why if one.startswith("ZeRO-1"))
    assert sentence.endswith("but lacks memory.")
