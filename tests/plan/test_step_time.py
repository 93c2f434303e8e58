"""Seconds of a step: they add up, arrays equal one by one, and a better machine is never worse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from asked import decoder, gpus, processor
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.machine.cluster import Cluster
from espalier.plan import collective_time, cost_inputs, step_time
from espalier.plan.decide import decide
from espalier.plan.layout_estimate import estimate, grid, price
from espalier.plan.layouts import ALGORITHMS, ARRAYS, MODES, Layouts, Limits, chains
from espalier.plan.layouts import grid as layouts
from espalier.plan.reference_models import MIXED
from espalier.plan.request import Request
from espalier.recipe import Pin, ShardPin
from espalier.recipe.cost import Anatomy

EXCHANGES = ("tensor", "sequence", "weights", "pipeline", "send", "all_reduce", "refresh")


def asked(batch: int = 48, **more: Any) -> Request:
    sizes = {"width": 512, "layers": 6, "sequence": 256, "storage": MIXED, "precision": "bf16"}
    return decoder(batch=batch, **{**sizes, **more})


def every(algorithm: str, mode: str, ranks: int, batch: int = 48, chunks: bool = False) -> Layouts:
    """All layouts on so many ranks; `chunks`: half of the staged ones in two pieces a stage."""
    limits = Limits(asked(batch).profile, Pin(schedule="1f1b"), modes=(mode,))
    found = next(iter(layouts(algorithm, ranks, 8, limits)))  # the others are of two stages on each rank
    if not chunks:
        return found
    numbers = {name: getattr(found, name) for name in ARRAYS}
    return Layouts(algorithm, mode, **{**numbers, "chunks": 1 + (found.pp > 1) * (np.arange(len(found)) % 2)})


chosen = st.tuples(st.sampled_from(ALGORITHMS), st.sampled_from(MODES), st.sampled_from([8, 16]))


@settings(max_examples=25)
@given(chosen, st.sampled_from([16, 48, 50]), st.randoms(use_true_random=False))
def test_layouts_at_once_equal_one_by_one(kind: tuple[str, str, int], batch: int, random: Any) -> None:
    """Also where some have a smaller last micro-batch and others have not."""
    request, on = asked(batch), collective_time.fleet(gpus(count=2), kind[2])
    found = every(*kind, batch, chunks=True)
    (together,) = price(request, on, found)
    for index in random.sample(range(len(found)), 5):
        (alone,) = price(request, on, found.at(index))
        assert {name: float(value) for name, value in alone.seconds.items()} == pytest.approx(
            {name: float(np.broadcast_to(value, len(found))[index]) for name, value in together.seconds.items()}
        )
        assert {name: float(value) for name, value in alone.memory_bytes.items()} == pytest.approx(
            {name: float(np.broadcast_to(value, len(found))[index]) for name, value in together.memory_bytes.items()}
        )


def test_stages_at_once_equal_one_by_one_where_last_micro_batches_differ() -> None:
    """25 samples of a replica in micro-batches of 1 to 25: some leave a smaller last one, some none."""
    request, on = asked(50), collective_time.fleet(gpus(count=2), 8)
    found = Layouts("data", "none", 2, pp=4, micro_batch=np.array([1, 2, 4, 5, 8, 25]))
    (together,) = price(request, on, found)
    alone = [float(price(request, on, found.at(index))[0].step) for index in range(len(found))]
    assert together.step == pytest.approx(alone)


@settings(max_examples=25)
@given(chosen, st.randoms(use_true_random=False))
def test_any_layout_s_parts_add_up(kind: tuple[str, str, int], random: Any) -> None:
    found = every(*kind, chunks=True)
    one = estimate(asked(), gpus(count=2), found.at(random.randrange(len(found))))
    assert sum(one.terms.values()) == pytest.approx(one.step_seconds)
    assert min(one.terms.values()) >= 0
    kinds = {name: size for name, size in one.memory_bytes.items() if name != "peak"}
    assert sum(kinds.values()) == pytest.approx(one.memory_bytes["peak"])
    assert min(kinds.values()) >= 0
    assert set(one.terms) <= set(one.sources)


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_exchanges_nothing(mode: str) -> None:
    one = estimate(asked(), gpus(), Layouts("data", mode, micro_batch=4))
    assert {name: one.terms[name] for name in EXCHANGES} == dict.fromkeys(EXCHANGES, 0.0)
    assert sum(one.sent_bytes.values()) == 0


def with_links(cluster: Cluster, level: str, factor: float) -> Cluster:
    if level == "between":
        assert cluster.between is not None
        faster = msgspec.structs.replace(cluster.between, bandwidth=cluster.between.bandwidth * factor)
        return msgspec.structs.replace(cluster, between=faster)
    node = cluster.nodes[0]
    inside = msgspec.structs.replace(node.inside, bandwidth=node.inside.bandwidth * factor)
    return msgspec.structs.replace(cluster, nodes=(msgspec.structs.replace(node, inside=inside),))


@settings(max_examples=30)
@given(chosen, st.floats(1, 100), st.sampled_from(["inside", "between"]), st.sampled_from(["gather", "broadcast"]))
def test_faster_links_slow_no_layout_down(kind: tuple[str, str, int], factor: float, level: str, refresh: str) -> None:
    slow = gpus(count=2, between="10Gbit/s")
    request, found = asked(refresh=refresh), every(*kind, chunks=True)
    before, after = (
        grid(request, collective_time.fleet(cluster, kind[2]), found)
        for cluster in (slow, with_links(slow, level, factor))
    )
    assert np.all(after.seconds <= before.seconds * (1 + 1e-12))


@settings(max_examples=20)
@given(chosen, st.lists(st.floats(0.02, 80), min_size=2, max_size=5))
def test_more_memory_never_makes_the_best_plan_slower(kind: tuple[str, str, int], gigabytes: list[float]) -> None:
    cluster, found, best = gpus(count=2), every(*kind), []
    for room in sorted(gigabytes):
        node = cluster.nodes[0]
        device = msgspec.structs.replace(node.device, memory=int((3 + room) * 1e9))
        changed = msgspec.structs.replace(cluster, nodes=(msgspec.structs.replace(node, device=device),))
        priced = grid(asked(), collective_time.fleet(changed, kind[2]), found)
        best.append(np.where(priced.over <= 0, priced.seconds, np.inf).min())
    assert best == sorted(best, reverse=True)


def shards(ranks: int, samples: int, cluster: Cluster, **more: Any) -> tuple[Any, Any]:
    """(factors [n, 3], seconds [n]) of all nested shards in plain data parallelism, one sample a micro-batch."""
    rows = chains(ranks, 8)
    params, grads, optimizer = rows.T
    found = Layouts("data", "none", ranks, params=params, grads=grads, optimizer=optimizer)
    priced = grid(asked(samples * ranks, **more), collective_time.fleet(cluster, ranks), found)
    return rows, priced.seconds


@pytest.mark.parametrize("between", ["10Gbit/s", "400Gbit/s"])
def test_more_micro_batches_favour_whole_parameters_and_gradients(between: str) -> None:
    """Sharded parameters and gradients are paid for in each micro-batch, sharded optimizer states once."""
    lost = []
    for samples in (1, 2, 4, 16, 64):
        rows, taken = shards(16, samples, gpus(count=2, between=between), sequence=2048)
        whole = (rows[:, 0] == 1) & (rows[:, 1] == 1)
        lost.append(taken[~whole].min() - taken[whole].min())
    assert lost == sorted(lost)
    assert lost[-1] > 0


def test_shards_of_optimizer_states_cost_the_same_whatever_the_micro_batches() -> None:
    def lost(samples: int) -> Any:
        rows, taken = shards(16, samples, gpus(count=2, between="10Gbit/s"))
        whole = (rows[:, 0] == 1) & (rows[:, 1] == 1)
        return taken[whole] - taken[whole][0]

    assert lost(4) == pytest.approx(lost(64), abs=1e-9)


@pytest.mark.parametrize("device", ["A100-80GB", "H100"])
def test_one_node_needs_no_shards_that_memory_does_not_ask_for(device: str) -> None:
    """AMSP: (1, 1, 1) where it fits. Shards spare nothing there but the optimizer's own time, which AMSP leaves out and
    which is lost among many micro-batches."""
    request = decoder(width=4096, layers=4, sequence=2048, batch=512, storage=MIXED, precision="bf16")
    rows = chains(8, 8)
    params, grads, optimizer = rows.T
    found = Layouts("data", "none", 8, params=params, grads=grads, optimizer=optimizer, micro_batch=4)
    (priced,) = price(request, collective_time.fleet(gpus(device), 8), found)
    assert priced.peak[0] <= priced.limit
    assert priced.step[0] <= 1.02 * priced.step.min()
    exchanged = sum(priced.seconds[name] for name in EXCHANGES)
    assert exchanged[0] == pytest.approx(exchanged.min(), abs=1e-3 * priced.step[0])


# --- when the weights of the next block are gathered ---------------------------------------------------------------


def starts(cluster: Cluster, layout: Layouts, **more: Any) -> tuple[dict[Any, float], float]:
    """Seconds of a layer by when the gather of the next begins, the fastest first; and those of the whole step."""
    kind = {"storage": MIXED, "precision": "bf16", **more}
    request = decoder(width=2048, layers=6, sequence=65_536, batch=8, **kind)
    on = collective_time.fleet(cluster, int(layout.world))
    step = step_time.CostInputs(request, on, on.kinds[0], layout)
    return step_time.prefetch(step, 1), float(sum(step_time.step_seconds(step, 1).values()))


def test_a_gather_waits_for_attention_where_both_need_the_same_links() -> None:
    """Eight ranks of one machine share sequences and weights. Of two machines, links between them carry weights only:
    then a gather has the whole block to hide behind."""
    inside, _ = starts(gpus(inside="100Gbit/s"), Layouts("isp", hp=8, params=8, grads=8, optimizer=8))
    assert next(iter(inside)) == "attention"
    across, _ = starts(gpus(count=2), Layouts("isp", dp=2, hp=8, params=16, grads=16, optimizer=16))
    assert next(iter(across)) == "block"
    assert list(inside)[-1] == list(across)[-1] == "none"
    assert starts(gpus(), Layouts("isp", hp=8))[0] == {}


def test_on_the_cores_of_one_processor_nothing_is_hidden_and_gathers_begin_with_the_block() -> None:
    layout = Layouts("isp", hp=4, params=4, grads=4, optimizer=4)
    found, _ = starts(processor(cores=4), layout, storage=None, precision="fp32")
    assert list(found) == ["block", "none", "attention"]
    assert min(found.values()) == pytest.approx(max(found.values()))


def test_a_step_is_priced_with_the_best_choice_and_with_a_pinned_one() -> None:
    cluster, layout = gpus(inside="100Gbit/s"), Layouts("isp", hp=8, params=8, grads=8, optimizer=8)
    free, taken = starts(cluster, layout)
    for start in ("block", "attention", "none"):
        found, pinned = starts(cluster, layout, pin=Pin(prefetch=start))
        assert list(found) == [start]
        assert pinned - taken == pytest.approx(6 * (found[start] - min(free.values())))


@pytest.mark.parametrize(("start", "told"), [(None, "slower"), ("none", "it was set")])
def test_the_plan_says_when_weights_are_gathered_and_what_the_others_lose(start: Any, told: str) -> None:
    pin = Pin(algorithm="isp", hp=8, shard=ShardPin(params=8), prefetch=start)
    plan = decide(decoder(width=2048, layers=6, sequence=65_536, batch=8, pin=pin), gpus(inside="50Gbit/s")).taken
    assert plan.prefetch == (start or "attention")
    (said,) = [one for one in plan.why if "are gathered" in one]
    assert told in said


def test_ranks_that_share_a_core_wait_for_it_at_each_exchange_in_a_layer() -> None:
    """Four exchanges each way in every layer, two for the table, two for the head and two all-reduces of the loss."""
    request = decoder(layers=3, batch=4, precision="fp32")
    layout = Layouts(algorithm="megatron", tp=2, micro_batch=4)
    alone, shared = (estimate(request, processor(cores), layout).terms["tensor"] for cores in (2, 1))
    assert shared - alone == pytest.approx((3 * 8 + 6) * cost_inputs.TURN)
    heads = Layouts(algorithm="isp", hp=2, micro_batch=4)
    alone, shared = (estimate(request, processor(cores), heads).terms["sequence"] for cores in (2, 1))
    assert shared - alone == pytest.approx(3 * 4 * cost_inputs.TURN)


def worked(ranks: int, cores: int, **more: Any) -> dict[str, float]:
    """Seconds by part on so many ranks of one thread, of a decoder whose layers' work is changed."""

    def anatomy(*given: Any) -> Anatomy:
        found = asked().profile.anatomy(*given)
        return replace(found, layer=replace(found.layer, **more))

    on = collective_time.fleet(processor(cores), ranks)
    request = asked().changed(anatomy=anatomy, storage=None, precision="fp32")
    step = cost_inputs.CostInputs(request, on, on.kinds[0], Layouts(dp=ranks, micro_batch=8))
    return {name: float(value) for name, value in step_time.step_seconds(step, 48 // ranks).items()}


def test_making_a_micro_batch_takes_time_where_no_core_is_left_for_it() -> None:
    plain, reading = worked(2, 2), worked(2, 2, reading=0.5)
    assert reading["launch"] - plain["launch"] == pytest.approx(0.5 * 6 * 3)  # of six layers in three micro-batches
    crowded = worked(4, 2, reading=0.5)["launch"] - worked(4, 2)["launch"]
    assert crowded == pytest.approx(0.5 * 6 * 2 * 2)  # two ranks share a core
    assert worked(2, 4, reading=0.5)["launch"] == pytest.approx(worked(2, 4)["launch"])


def test_backward_moves_what_the_workload_says_or_twice_as_much_as_forward() -> None:
    nothing, plain, same = (worked(2, 2, moved_back=one) for one in (0.0, None, 30.0 * 8 * 256 * 512 * 4))
    assert plain["backward"] - nothing["backward"] == pytest.approx(2 * (same["backward"] - nothing["backward"]))
    assert same["forward"] == plain["forward"]


@pytest.mark.parametrize("shared", [True, False])
def test_each_tensor_rank_sends_its_part_of_a_message_to_the_next_stage(shared: bool) -> None:
    """Also where every tensor rank has the whole value, as without sequence parallelism."""
    request = decoder(width=64, layers=4, sequence=128).changed(sequence_parallel=shared)
    on = collective_time.fleet(gpus(count=2), 16, 1)

    def sent(tp: int) -> float:
        layouts = Layouts("megatron", dp=8 // tp, tp=tp, pp=2)
        step = cost_inputs.CostInputs(request, on, on.kinds[0], layouts)
        return float(sum(step_time.pipeline(step, 1, 4).sent.values()))

    whole = 128 * 64 * 4.0
    assert sent(1) % whole == 0
    assert sent(1) > 0
    assert [sent(2), sent(4)] == [sent(1) / 2, sent(1) / 4]


def seconds_of(request: Request, layout: Layouts, cluster: Cluster | None = None) -> dict[str, float]:
    """Seconds by part of one layout on one machine of A100s."""
    (priced,) = price(request, collective_time.fleet(cluster or gpus(), int(layout.world)), layout)
    return {name: float(value) for name, value in priced.seconds.items()}


def test_adding_a_micro_batch_s_gradients_costs_their_bytes_but_for_the_first() -> None:
    request, bytes_each = asked(48), 2 * MIXED.grads + 2
    one = bytes_each * request.profile.trainable / (2039e9 * 0.75)
    for size in (48, 12, 3):
        added, fused = (
            seconds_of(request.changed(adds=adds), Layouts("data", micro_batch=size))["backward"]
            for adds in (True, False)
        )
        assert added - fused == pytest.approx((48 // size - 1) * one)


def test_a_stall_is_paid_at_every_hand_over() -> None:
    layout = Layouts("data", pp=4, micro_batch=3)
    sent = [seconds_of(asked(48).changed(stall=stall), layout)["send"] for stall in (0.0, 1.0)]
    assert sent[1] - sent[0] == pytest.approx(4 + 15 + 4)


def test_of_unequal_stages_the_slower_of_the_fullest_and_the_last_with_its_head_counts() -> None:
    request, layout = asked(48), Layouts("data", pp=2, micro_batch=48)
    equal = sum(seconds_of(request, layout)[name] for name in ("forward", "backward", "launch"))
    few, more = (
        sum(seconds_of(request.changed(stages=stages), layout)[name] for name in ("forward", "backward", "launch"))
        for stages in ((4, 2), (3, 3))
    )
    assert more == pytest.approx(equal)
    whole = sum(
        seconds_of(request, Layouts("data", micro_batch=48))[name] for name in ("forward", "backward", "launch")
    )
    layer = (whole - equal) / 3
    assert few == pytest.approx(max(4 * layer, equal - layer))


def test_a_host_waits_in_each_step_whose_loss_is_scaled() -> None:
    both = {name: seconds_of(asked(48, precision=name), Layouts("data"))["launch"] for name in ("bf16", "fp16")}
    assert both["fp16"] - both["bf16"] == pytest.approx(step_time.ONCE * 18e-6, rel=0.01)
