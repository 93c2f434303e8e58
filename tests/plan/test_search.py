"""The search finds what trying every layout finds, whatever the cluster; more of anything good never makes it worse."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from asked import decoder, gpus, processor

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import base, build_plan, coarse_search, collective_time, pins, refusals, search
from espalier.plan.axes.sharding import StateBytes
from espalier.plan.layout_estimate import grid
from espalier.plan.layouts import ALGORITHMS, MODES, Layouts
from espalier.plan.layouts import grid as grid_of
from espalier.plan.request import Request
from espalier.recipe import Pin, ShardPin, units
from espalier.recipe.errors import UserError


def every_layout(request: Request, ranks: int, per_node: int, starved: bool = False) -> list[Layouts]:
    """All layouts by the definition: products, divisibility and nesting, one at a time. `starved`: also those in which
    some rank has no sample for a micro-batch in which gradients are exchanged."""
    found = []
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for dp, tp, sp, pp in itertools.product(degrees, repeat=4):
        if (
            dp * tp * sp * pp != ranks
            or (tp > 1 and sp > 1)
            or pp > request.profile.layers
            or dp > request.profile.global_batch
        ):
            continue
        cut = tp * sp
        if request.profile.heads % cut or request.profile.width % cut or request.profile.tokens_per_sample % cut:
            continue
        algorithms = ["megatron", "fsp"] if tp > 1 else ["isp"] if sp > 1 else ["data"]
        share = -(-request.profile.global_batch // dp)
        sizes = sorted({*(s for s in (1, 2, 4, 8, 16) if s <= share), share})
        shards = [
            (p, g, o) for p, g, o in itertools.product(degrees, repeat=3) if allowed((p, g, o), dp * sp, tp, per_node)
        ]
        for algorithm, mode, size, (p, g, o) in itertools.product(algorithms, MODES, sizes, shards):
            if g > 1 and -(-share // size) > request.profile.global_batch // dp and not starved:
                continue
            one = Layouts(algorithm, mode, dp, tp, sp, 1, 1, pp, p, g, o, size)
            found.append(one)
            found += [replace(one, schedule="zero_bubble")] * (pp > 1)
            found += [replace(one, chunks=2)] * (pp > 1 and 2 * pp <= request.profile.layers)
    return found


def allowed(shard: tuple[int, int, int], ranks: int, tp: int, per_node: int) -> bool:
    """Nested, and each factor divides a node's ranks, is a multiple of them, or is all ranks."""
    params, grads, optimizer = shard
    node = max(d for d in range(1, ranks + 1) if ranks % d == 0 and max(1, per_node // tp) % d == 0)
    fits = all(node % factor == 0 or factor % node == 0 or factor == ranks for factor in shard)
    return fits and grads % params == 0 and optimizer % grads == 0 and ranks % optimizer == 0


def random_case(seed: int) -> tuple[Request, Cluster]:
    """A small cluster and a model that sometimes fits, sometimes only just, sometimes not."""
    draw = random.Random(seed)
    machines, devices = draw.choice([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (1, 3)])
    kind = draw.choice(["A100-40GB", "T4", "RTX 3090", "H100"])
    cluster = gpus(kind, machines, devices, f"{draw.choice([1, 10, 100, 800])}Gbit/s")
    width = draw.choice([512, 2048, 4096, 8192])
    request = decoder(width, draw.choice([2, 3, 8]), draw.choice([64, 1024]), draw.choice([1, 2, 3]))
    return request.changed(precision=draw.choice(["fp32", "fp16"])), cluster


def fastest_of(request: Request, cluster: Cluster) -> tuple[float, int]:
    """Seconds of the fastest layout that fits on any part of the cluster, and how many fit, tried one by one."""
    times = []
    for part, ranks, threads in search.parts(request, cluster):
        on = collective_time.fleet(part, ranks, threads)
        for layout in every_layout(request, ranks, on.per_node):
            priced = grid(request, on, layout)
            if float(priced.over) <= 0:
                times.append(float(priced.seconds))
    return min(times, default=float("inf")), len(times)


def runs(request: Request, cluster: Cluster, layout: Layouts) -> bool:
    """Whether a plan of this layout passes the plan's own check."""
    option = search.Option(layout, cluster, 1.0, 1.0, -1.0)
    try:
        base.check(
            build_plan.make(request, search.SearchResult((option,), None, 1, 0.03), option),
            request.profile.global_batch,
        )
    except UserError:
        return False
    return True


@pytest.mark.parametrize("batch", [3, pytest.param(11, marks=pytest.mark.slow)])
def test_the_search_leaves_out_what_the_check_of_plans_refuses_and_nothing_else(batch: int) -> None:
    refused = 0
    request, cluster = decoder(512, 4, batch=batch), gpus(count=2, devices=2)
    searched = {
        one
        for algorithm in ALGORITHMS
        for batch in grid_of(algorithm, 4, 2, search._limits(request, collective_time.fleet(cluster, 4), 1))
        for one in batch.each(np.arange(len(batch)))
    }
    for layout in every_layout(request, 4, 2, starved=True):
        allowed = runs(request, cluster, layout)
        assert allowed == (layout in searched)
        refused += not allowed
    assert refused


@pytest.mark.parametrize(
    ("first", "count"), [(0, 4), *(pytest.param(first, 20, marks=pytest.mark.slow) for first in range(0, 200, 20))]
)
def test_the_search_equals_brute_force(first: int, count: int) -> None:
    for seed in range(first, first + count):
        request, cluster = random_case(seed)
        found = search.search(request, cluster)
        fastest, count = fastest_of(request, cluster)
        assert bool(found.options) == bool(count), seed
        if found.options:
            assert found.options[0].seconds == pytest.approx(fastest), seed
            best = found.best()
            assert best is not None
            assert best.seconds <= fastest * (1 + found.tie) * (1 + 1e-9), seed


def tied(found: search.SearchResult) -> list[search.Option]:
    return [one for one in found.options if one.seconds <= found.options[0].seconds * (1 + found.tie)]


def test_a_tie_goes_to_fewer_moving_parts_then_to_larger_micro_batches_then_to_less_memory() -> None:
    found = search.search(decoder(batch=64), gpus(devices=8))
    best, near = found.best(), tied(found)
    assert best is not None
    assert all(one.leaving == 0 for one in near)
    assert best.layout.key() == min(one.layout.key() for one in near)
    alike = [one for one in near if one.layout.key() == best.layout.key()]
    assert best.layout.micro_batch == max(one.layout.micro_batch for one in alike)
    assert best.peak == min(one.peak for one in alike if one.layout.micro_batch == best.layout.micro_batch)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(one, marks=pytest.mark.slow) for one in range(3, 8))])
def test_a_tie_goes_to_fewer_bytes_between_machines_first(seed: int) -> None:
    request, cluster = random_case(seed)
    found = search.search(request, cluster)
    best = found.best()
    if best is None:
        return
    roomy = [one for one in tied(found) if not one.tight] or tied(found)
    assert best.leaving <= search.ALIKE * min(one.leaving for one in roomy)


def test_bytes_that_leave_a_machine() -> None:
    """Plain data parallel: all gradients, twice less a share; shards inside a machine change nothing of it, those over
    all ranks add parameters; one machine sends none."""
    request = decoder(512, 4, batch=32, storage=StateBytes(4, 4, 8))
    on = collective_time.fleet(gpus(count=2, devices=4), 8)
    whole, near, far = (Layouts(dp=8, grads=grads, optimizer=of) for grads, of in ((1, 1), (1, 4), (1, 8)))
    gradients = 4 * request.profile.trainable
    assert float(search.leaving(request, on, whole)[0]) == pytest.approx(2 * gradients * 7 / 8, rel=0.01)
    assert float(search.leaving(request, on, near)[0]) == pytest.approx(gradients, rel=0.01)
    assert float(search.leaving(request, on, far)[0]) == pytest.approx(2 * gradients * 7 / 8, rel=0.01)
    alone = collective_time.fleet(gpus(devices=8), 8)
    assert float(search.leaving(request, alone, whole)) == 0


def test_every_option_between_machines_counts_what_leaves_them_also_with_shares_by_speed() -> None:
    cluster = clusters.loads(
        '[[nodes]]\ndevice = "A100-80GB"\ndevices = 4\n[[nodes]]\ndevice = "H100"\ndevices = 4\n'
        '[links]\nbetween = "25Gbit/s"'
    )
    request = decoder(width=1024, layers=8, sequence=1024, batch=64, heads=16, kv_heads=16)
    found = [one for one in search.search(request, cluster).options if one.layout.world > 4]
    assert any(one.shares is not None for one in found)
    assert any(one.shares is None and one.layout.dp == 8 for one in found)
    for one in found:
        weak = coarse_search.weakest(request, one.on)
        (wanted,) = np.broadcast_to(search.leaving(request, weak, one.layout.at([0])), 1)
        assert one.leaving == pytest.approx(float(wanted))
        assert one.leaving > 0


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(one, marks=pytest.mark.slow) for one in range(4, 12))])
def test_more_memory_never_makes_the_best_slower(seed: int) -> None:
    request, cluster = random_case(seed)
    node = cluster.nodes[0]
    larger = msgspec.structs.replace(node.device, memory=2 * node.device.memory)
    richer = msgspec.structs.replace(cluster, nodes=(msgspec.structs.replace(node, device=larger),))
    before, after = search.search(request, cluster), search.search(request, richer)
    assert len(after.options) >= min(1, len(before.options))
    if before.options:
        assert after.options[0].seconds <= before.options[0].seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(one, marks=pytest.mark.slow) for one in range(4, 12))])
def test_a_faster_network_never_makes_the_best_slower(seed: int) -> None:
    request, cluster = random_case(seed)
    assert cluster.between is not None
    faster = msgspec.structs.replace(cluster.between, bandwidth=10 * cluster.between.bandwidth)
    before = search.search(request, cluster)
    after = search.search(request, msgspec.structs.replace(cluster, between=faster))
    if before.options:
        assert after.options[0].seconds <= before.options[0].seconds * (1 + 1e-12)


def test_the_same_question_gets_the_same_answer() -> None:
    request, cluster = decoder(1024, 8, batch=32), gpus(count=2)
    texts = set()
    for _ in range(2):
        found = search.search(request, cluster)
        best = found.best()
        assert best is not None
        texts.add(msgspec.json.encode(build_plan.make(request, found, best)))
    assert len(texts) == 1


def test_redundancy_keeps_live_copies_of_every_optimizer_shard() -> None:
    request = decoder(1024, 8, batch=64).changed(redundancy=4)
    found = search.search(request, gpus(count=2))
    assert found.options
    assert all(one.layout.shards // one.layout.optimizer >= 4 for one in found.options)


def test_demands_on_memory_and_devices_are_obeyed() -> None:
    request = decoder(1024, 8, batch=64).changed(memory=6 * 2**30, max_devices=5)
    found = search.search(request, gpus(count=2))
    assert found.options
    assert all(one.peak <= 6 * 2**30 and one.layout.world <= 5 for one in found.options)


def test_pins_bind() -> None:
    pin = Pin(tp=2, pp=2, shard=ShardPin(optimizer=4), micro_batch=2, recompute="block")
    found = search.search(decoder(1024, 8, batch=64, pin=pin), gpus(count=2))
    assert found.options
    for one in found.options:
        layout = one.layout
        assert (layout.tp, layout.pp, layout.optimizer, layout.micro_batch) == (2, 2, 4, 2)
        assert layout.recompute == "block"


@pytest.mark.parametrize(
    ("pin", "named", "near"),
    [
        (Pin(tp=3), "plan.pin.tp = 3", "plan.pin.tp=2"),
        (Pin(pp=9), "plan.pin.pp = 9", "8 or less"),
        (Pin(shard=ShardPin(params=4, optimizer=6)), "plan.pin.shard.params = 4", "plan.pin.shard.params=3"),
        (Pin(algorithm="isp", tp=2), "isp", "sp instead"),
        (Pin(dp=128), "plan.pin.dp = 128", "16"),
        (Pin(tp=0), "plan.pin.tp = 0", "tp=1"),
        (Pin(sp=4, hp=2, cp=4), "plan.pin.sp = 4", "plan.pin.sp=8"),
        (Pin(cp=4, window=3), "plan.pin.window = 3", "plan.pin.window=2"),
        (Pin(pp=1, schedule="zero_bubble"), "plan.pin.schedule = 'zero_bubble'", "plan.pin.pp=2"),
        (Pin(pp=4, interleave=3), "needs 12 layers", "plan.pin.interleave=2"),
    ],
)
def test_a_pin_that_cannot_be_met_is_named_with_the_nearest_that_can(pin: Pin, named: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        pins.check(decoder(1024, 8, batch=64, pin=pin), gpus(count=2))
    assert named in str(caught.value)
    assert near in str(caught.value)


def test_what_fits_nowhere_says_what_is_missing_and_what_would_help() -> None:
    request = decoder(16384, 64, batch=64)
    found = search.search(request, gpus("T4", devices=2))
    assert found.best() is None
    error = str(refusals.refusal(request, gpus("T4", devices=2), found))
    for word in ("missing", "params", "optimizer", "closest", "rank 0"):
        assert word in error


def test_a_cure_cures() -> None:
    request = decoder(4096, 16, batch=64).changed(memory=2**30)
    found = search.search(request, gpus(devices=2))
    assert found.best() is None
    assert found.closest is not None
    told = refusals.cures(request, gpus(devices=2), found.closest)
    assert told[0].startswith("leave plan.memory out (")
    best = search.search(request.changed(memory=None), gpus(devices=2)).best()
    assert best is not None
    assert f"({units.show_seconds(best.seconds)} a step, {units.show_size(best.peak)} of " in told[0]


def test_every_rank_of_a_plan_has_its_place_and_the_batch_is_shared_whole() -> None:
    request, cluster = decoder(2048, 8, batch=24, pin=Pin(tp=2, pp=2)), gpus(count=2)
    found = search.search(request, cluster)
    best = found.best()
    assert best is not None
    plan = build_plan.make(request, found, best)
    layout = plan.layout
    assert (layout.tp, layout.pp) == (2, 2)
    assert layout.dp * layout.tp * layout.sp * layout.pp == len(plan.ranks)
    assert sorted(rank for stage in plan.stages for rank in stage.ranks) == list(range(len(plan.ranks)))
    assert [stage.layers for stage in plan.stages] == [(0, 4), (4, 8)]
    assert sorted({rank.share for rank in plan.ranks})[-1][1] == 24


def test_mixed_devices_get_shares_by_speed() -> None:
    fast, slow = gpus("H100", devices=1), gpus("T4", devices=1)
    mixed = msgspec.structs.replace(fast, nodes=(*fast.nodes, *slow.nodes))
    request = decoder(
        2048, 2, 1024, 64, precision="fp16", pin=Pin(ranks=2, shard=ShardPin(params=1, grads=1, optimizer=1))
    )
    found = search.search(request, mixed)
    best = found.best()
    assert best is not None
    shares = [rank.share[1] - rank.share[0] for rank in build_plan.make(request, found, best).ranks]
    assert sum(shares) == 64
    assert shares[0] > 2 * shares[1]


def test_mixed_devices_share_a_long_sequence_by_speed() -> None:
    fast, slow = gpus("H100", devices=1), gpus("A100-80GB", devices=1)
    mixed = msgspec.structs.replace(fast, nodes=(*fast.nodes, *slow.nodes), between=gpus(count=2).between)
    request = decoder(2048, 4, 65_536, 1, precision="bf16", heads=16, pin=Pin(cp=2))
    found = search.search(request, mixed)
    equal = min(one.seconds for one in found.options if one.speeds is None)
    best = found.best()
    assert best is not None
    assert best.seconds < 0.8 * equal
    plan = build_plan.make(request, found, best)
    assert best.speeds is not None
    assert plan.stages[0].speeds == best.speeds
    assert sum(best.speeds) == pytest.approx(2.0)
    assert best.speeds[0] > 1.5 * best.speeds[1]
    assert any("of the mean number of tokens" in said for said in plan.why)
    assert base.check(plan, 1) is plan


def test_a_hundred_thousand_layouts_are_priced_in_a_second() -> None:
    request = decoder(4096, 32, sequence=4096, batch=1024, precision="bf16", heads=32)
    begun = time.process_time()
    found = search.search(request, gpus(count=128))
    assert found.priced / (time.process_time() - begun) > 100_000


def test_processors_are_searched_too() -> None:
    found = search.search(decoder(batch=16), processor(cores=4))
    assert {int(one.layout.world) for one in found.options} == {1, 2, 4}


@pytest.mark.parametrize("memory", ["1GiB", "64GiB"])
def test_whole_states_are_found_beside_all_others_as_by_a_search_of_them_alone(memory: str) -> None:
    request, cluster = decoder(512, 6, batch=12, precision="bf16"), processor(6, memory)
    found = search.search(request, cluster, whole=True)
    alone = search.search(request.changed(pin=Pin(shard=ShardPin(params=1, grads=1, optimizer=1))), cluster)
    assert found.whole == alone.options
    assert found.whole
    assert search.search(request, cluster) == replace(found, whole=())


def mixed(seed: int) -> tuple[Request, Cluster]:
    """The random case with machines of a second and sometimes a third kind beside the first."""
    draw = random.Random(1000 + seed)
    request, cluster = random_case(seed)
    others = draw.sample(["A100-80GB", "T4", "RTX 3090", "H100", "V100-32GB", "L4"], draw.choice([1, 2]))
    nodes = [msgspec.structs.replace(gpus(one).nodes[0], devices=draw.choice([1, 2])) for one in others]
    between = cluster.between or gpus(count=2).between
    request = request.changed(precision="fp16", global_batch=draw.choice([2, 3, 8]))
    return request, msgspec.structs.replace(cluster, nodes=(*cluster.nodes, *nodes), between=between)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 4), *(pytest.param(first, 12, marks=pytest.mark.slow) for first in range(4, 40, 12))]
)
def test_what_is_not_priced_could_not_have_been_better(first: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of device that others stand for, and parts of the cluster that cannot be fast enough."""
    cases = [mixed(seed) for seed in range(first, first + count)]
    quick = [search.search(*case) for case in cases]
    monkeypatch.setattr(search, "weakest", lambda request, on: on)
    monkeypatch.setattr(search, "least_seconds", lambda request, on: (0.0, 0.0))
    for case, less in zip(cases, quick, strict=True):
        every = search.search(*case)
        assert less.best() == every.best()
        assert less.priced <= every.priced
        assert (less.closest is None) == (every.closest is None)


@pytest.mark.slow
def test_a_thousand_devices_of_four_kinds_need_few_layouts() -> None:
    """At 200,000 layouts a second or more that is far less than importing PyTorch takes; without bounds millions."""
    kinds = [gpus(name, count=31).nodes[0] for name in ("H100", "A100-80GB", "A100-40GB", "L4")]
    cluster = msgspec.structs.replace(gpus(count=2), nodes=tuple(kinds))
    request = decoder(4096, 32, sequence=4096, batch=4096, precision="bf16", heads=32)
    begun = time.process_time()
    found = search.search(request, cluster)
    assert time.process_time() - begun < 10
    assert found.options
    assert found.priced < 600_000  # on many ranks in two passes


def test_machines_are_ranked_by_what_their_devices_sustain_not_by_their_peak() -> None:
    lasting, short = clusters.device("RTX 3090"), clusters.device("L4")
    assert lasting.flops["bf16"] < short.flops["bf16"]
    mixed = msgspec.structs.replace(gpus("L4", devices=1), nodes=gpus("L4").nodes + gpus("RTX 3090").nodes)
    ordered = search.fastest_first(decoder().changed(precision="bf16"), mixed)
    assert [table.device.name for table in ordered.nodes] == ["RTX 3090", "L4"]


def test_a_machine_behind_a_slow_link_is_left_out_where_it_would_slow_all_others() -> None:
    slow = clusters.loads(
        '[[nodes]]\ndevice = "T4"\nbetween = "1Mbit/s"\n[[nodes]]\ndevice = "T4"\ncount = 2\n'
        '[links]\nbetween = "100Gbit/s"'
    )
    found = search.search(decoder(batch=64, sequence=1024).changed(precision="fp16"), slow)
    best = found.best()
    assert best is not None
    assert int(best.layout.world) == 2
    assert all(table.between is None for table in best.cluster.nodes[:1])
