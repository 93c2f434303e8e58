"""The planner says over how many ranks experts are spread, by links and memory, and which rank holds how many."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from tests.plan import asked

from espalier import recipe as config
from espalier.machine import cluster as clusters
from espalier.mechanisms.expert_parallel.state import ExpertParallelState
from espalier.plan import collective_time, decide, step_time
from espalier.plan.axes.experts import ExpertLoad, Routed, cost, expected, placed, sent_bytes
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import Layouts
from espalier.recipe.cost import ExpertSizes
from espalier.recipe.errors import UserError

EXPERTS = 16


def mixture(batch=16, width=256, layers=4, **more):
    """A decoder most of whose parameters are in experts."""
    plain = asked.decoder(width=width, layers=layers, batch=batch)
    each = 3.0 * width * 4 * width * EXPERTS
    total = plain.profile.parameters + int(layers * each)
    facts = {"expert_parallel": ExpertSizes(EXPERTS, 2, each)}
    return plain.changed(parameters=total, trainable=total, facts=facts, **more)


FOUR = config.Pin(ranks=4, pp=1)
WHOLE = config.Pin(ranks=4, pp=1, shard=config.ShardPin(params=1, grads=1, optimizer=1))


def decided(request, *cluster, **more):
    return decide.decide(request, asked.processor(*cluster, **more))


def test_spread_experts_where_their_gradients_cost_more_than_their_tokens():
    found = decided(mixture(pin=FOUR), count=4, between="1Gbit/s")
    assert found.plan.layout.ep > 1
    assert any("Experts are spread over" in why for why in found.plan.why)
    assert found.plan.predicted.terms["experts"] > 0
    assert found.plan.predicted.sent_bytes["experts"] > 0


def test_every_rank_holds_all_where_tokens_cost_more():
    few = mixture(batch=4096, pin=FOUR)
    found = decided(few, count=4, between="50Mbit/s")
    assert found.plan.layout.ep == 1
    assert any("with every expert on each rank, spread over" in why for why in found.plan.why)


@pytest.mark.slow
def test_the_choice_is_that_of_the_best_pin():
    for batch, between in ((16, "1Gbit/s"), (1024, "200Mbit/s")):
        request = mixture(batch=batch, pin=FOUR)
        free = decided(request, count=4, between=between)
        pinned = [
            decided(
                request.changed(pin=config.Pin(ranks=4, pp=1, ep=ep)), count=4, between=between
            ).plan.predicted.step_seconds
            for ep in (1, 2, 4)
        ]
        assert free.plan.predicted.step_seconds <= min(pinned) * 1.031


def test_memory_asks_for_ranks_where_one_cannot_hold_all():
    request = mixture(batch=64, memory=700e6, pin=WHOLE)
    found = decided(request, count=4, between="1Gbit/s")
    assert found.fits
    assert found.plan.layout.ep > 1
    assert any("Experts are spread over" in why and "with every expert on each rank" in why for why in found.plan.why)
    held = found.plan.predicted.memory_bytes
    everyone = request.changed(memory=None, pin=msgspec.structs.replace(WHOLE, ep=1))
    assert held["params"] < decided(everyone, count=4).plan.predicted.memory_bytes["params"]


def test_experts_wait_in_the_store_where_links_are_too_slow_for_their_tokens():
    request = mixture(batch=512, memory=900e6, free=1e12, pin=msgspec.structs.replace(WHOLE, ranks=2))
    found = decide.decide(request, named("1Mbit/s", "1Mbit/s"))
    told = " ".join(found.plan.why)
    assert found.plan.layout.ep == 1
    assert found.request.offload.optimizer != "device" or found.request.offload.parameters != "device"
    assert "with every expert on each rank and states that wait outside the devices, spread over" in told


def named(*links):
    """Two machines of one core, which both take part."""
    nodes = "".join(
        f'[[nodes]]\nname = "host{at}"\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\nbetween = "{link}"\n'
        '[[nodes.disks]]\npath = "/scratch"\nwrite = 1e9\nread = 1e9\niops = 1e4\n'
        for at, link in enumerate(links)
    )
    return clusters.loads(nodes + f'[links]\nbetween = "{links[0]}"\n')


def test_one_machine_is_not_asked():
    assert decided(mixture(), count=1).plan.layout.ep == 1


def test_ranks_with_faster_links_hold_more_experts_within_their_memory():
    assert placed((4.0, 4.0, 4.0, 1.0), [1.0] * 16) == (
        tuple(range(5)),
        tuple(range(5, 10)),
        tuple(range(10, 15)),
        (15,),
    )
    assert list(map(len, placed((4.0, 1.0), [1.0] * 10, [6, 9]))) == [6, 4]
    assert list(map(len, placed((1.0, 1.0, 1.0), [1.0] * 8))) == [3, 3, 2]
    assert list(map(len, placed((9.0, 1.0), [1.0] * 4))) == [4, 0]
    with pytest.raises(UserError, match="do not fit into memory for 7"):
        placed((1.0, 1.0), [1.0] * 8, [3, 4])


def test_placement_is_near_the_best_of_all():
    rng = np.random.default_rng(0)

    def slowest(held, rates, loads):
        return max(sum(loads[e] for e in one) / rate for one, rate in zip(held, rates, strict=True))

    for _ in range(40):
        rates, loads = rng.uniform(0.2, 1, 3), rng.uniform(0.1, 1, 6).tolist()
        every = (
            tuple(tuple(e for e in range(6) if code // 3**e % 3 == rank) for rank in range(3)) for code in range(3**6)
        )
        best = min(slowest(held, rates, loads) for held in every)
        assert slowest(placed(rates.tolist(), loads), rates, loads) <= 1.34 * best


def test_unequal_machines_of_a_plan_hold_unequal_numbers_of_experts():
    found = decide.decide(mixture(pin=config.Pin(ep=2, ranks=2, pp=1)), named("1Gbit/s", "100Mbit/s"))
    first, second = map(len, found.plan.state(ExpertParallelState).experts)
    assert first > second
    assert first + second == EXPERTS
    assert any("faster hold more" in why for why in found.plan.why)


def test_a_pass_takes_as_long_as_the_fuller_direction():
    load, routed = ExpertLoad(8, 4), [Routed(2, 10, 5, 20)]
    found = cost(load, routed, lambda operation, size, ranks, *_: size / ranks, 1.0)
    there, again = 2 * 4 * 2 + 4 * 5 + 10 * 32, 4 * 15 + 10 * 32
    assert found.seconds["experts"] == 2 * max(there, 640) + max(again, 640)
    assert found.sent["experts"] == sent_bytes(load, routed, 2.0)
    many = expected(np.array([10.0, 20.0]), 2, [3, 3])
    assert sent_bytes(load, many).shape == (2,)


@pytest.mark.parametrize(("sizes", "active"), [((3, 3), 2), ((1, 4, 2), 3), ((2, 2), 1), ((5, 1), 6)])
def test_expected_rows_are_the_mean_over_all_sets_of_experts(sizes, active):
    """A token goes to a rank once, however many of its experts are there; to each further one there is a reference."""
    owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    sets = list(itertools.combinations(owner, active))
    means = [
        [np.mean([chosen.count(rank) for chosen in sets]), np.mean([rank in chosen for chosen in sets])]
        for rank in range(len(sizes))
    ]
    for me in range(len(sizes)):
        others = [rank for rank in range(len(sizes)) if rank != me]
        for rank, routed in zip(others, expected(12, active, sizes, me), strict=True):
            entries, fresh = (12 * mean for mean in means[rank])
            assert routed == pytest.approx((sizes[rank], fresh, entries - fresh, 12 * means[me][0]))


def test_ranks_may_share_the_matrices_of_spread_experts():
    """Two groups of two hold the experts, and each rank half of its own: half the parameters, and the same tokens."""
    whole, cut = (
        decided(mixture(pin=config.Pin(ranks=2 * tp, pp=1, ep=2, tp=tp)), count=4, between="1Gbit/s").plan
        for tp in (1, 2)
    )
    assert (cut.layout.ep, cut.layout.tp, cut.layout.dp) == (2, 2, 2)
    assert cut.stages[0].tensor == 2
    assert cut.choices == whole.choices
    assert cut.predicted.memory_bytes["params"] < 0.6 * whole.predicted.memory_bytes["params"]
    assert cut.predicted.sent_bytes["experts"] == whole.predicted.sent_bytes["experts"]


def test_unequal_pipelines_hold_every_expert_on_each_rank():
    """Whatever the best equal layout does with experts: its stages' bytes are those of all experts."""
    nodes = "".join(f'[[nodes]]\ndevice = "cpu"\ncores = {cores}\nmemory = "8GiB"\n' for cores in (4, 1))
    unlike = clusters.loads(nodes + '[links]\nbetween = "1Gbit/s"\n')
    pin = config.Pin(pipelines="unequal")
    plans = [
        decide.decide(request.changed(pin=pin), unlike).plan
        for request in (mixture(batch=8), mixture(batch=8).changed(ep=2))
    ]
    assert all(plan.planner == "flashflex" and plan.layout.ep == 1 for plan in plans)
    first, second = (plan.predicted.memory_bytes["params"] for plan in plans)
    assert first == second


def test_rows_and_answers_in_turn_take_as_long_as_both() -> None:
    """Over a wire of a second a byte, which is given the whole tensor of an all-to-all of four ranks."""
    others = [Routed(0, 10.0, 0.0, 10.0)] * 3

    def taken(in_turn: bool) -> float:
        return float(cost(ExpertLoad(16, 2, in_turn=in_turn), others, lambda _, size, *__: size).seconds["experts"])

    assert taken(True) == pytest.approx(sent_bytes(ExpertLoad(16, 2), others) * 4 / 3)
    assert 0.5 < taken(False) / taken(True) < 0.6


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_states_of_experts_are_exchanged_among_the_ranks_that_share_them(ep):
    """Of a layer, in a micro-batch: experts among every `ep`-th rank, all else among all eight."""
    request = mixture().changed(ep=ep)
    on = collective_time.fleet(asked.gpus(count=2, devices=4), 8)
    step = CostInputs(request, on, on.kinds[0], Layouts(dp=8, params=8, grads=8, optimizer=8))
    assert sum(float(states.layer) for states, _ in step.parts) == pytest.approx(request.layer_parameters)
    assert sum(float(states.outside) for states, _ in step.parts) == request.profile.outside
    experts = request.experts.parameters / ep
    others = request.layer_parameters - experts

    def taken(operation):
        whole = step.wire(operation, step.storage.grads * others, 8, 1, "gradients")
        return float(whole + step.wire(operation, step.storage.grads * experts, 8 // ep, ep, "gradients"))

    seconds = step_time.weights(step)
    assert float(seconds["reduce_scatter"]) == pytest.approx(taken("reduce_scatter"), rel=1e-6)
    assert float(seconds["all_gather"]) == pytest.approx(taken("all_gather"), rel=1e-6)


def test_memory_asks_for_shards_of_gradients_and_parameters_beside_experts():
    pin = config.Pin(ranks=4, pp=1, tp=1, sp=1, ep=2, micro_batch=16, recompute="none")
    request = mixture(batch=64, layers=16, pin=pin)
    layouts, peaks = [(1, 1, 4), (1, 4, 4), (2, 4, 4), (4, 4, 4)], []
    for params, grads, optimizer in layouts:
        shard = config.ShardPin(params=params, grads=grads, optimizer=optimizer)
        plan = decided(request.changed(pin=msgspec.structs.replace(pin, shard=shard)), count=4).plan
        assert plan.layout.ep == 2
        sizes = plan.predicted.memory_bytes
        peaks.append(sizes["peak"] - sizes["staging"])  # which a plan can do without
    assert peaks == sorted(peaks, reverse=True)
    for before, least, shard in zip(peaks, peaks[1:], layouts[1:], strict=False):
        found = decided(request.changed(memory=(before + least) / 2), count=4)
        unit = found.plan.units[0]
        assert found.fits
        assert tuple(len(ranks) or 1 for ranks in (unit.params, unit.grads, unit.optimizer)) == shard
