"""What a collective costs: as its formula on plain links, never less on a slower one, nothing alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from asked import decoder, gpus, processor
from hypothesis import given
from hypothesis import strategies as st

from espalier.machine.cluster import Link
from espalier.plan import collective_time, step_time
from espalier.plan.axes.placement import ShardFactors, place
from espalier.plan.collective_time import Fleet, Operation
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import Layouts
from espalier.recipe import cost

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
operations = st.sampled_from(OPERATIONS)
sizes = st.floats(1, 1e12)
groups_of = st.sampled_from([(2, 1), (8, 1), (4, 2), (16, 1), (16, 8), (2, 8), (64, 1), (8, 16), (32, 4), (128, 1)])


def fleet(inside: Link, between: Link | None, nodes: int = 16) -> Fleet:
    return replace(collective_time.fleet(gpus(count=nodes), 8 * nodes), inside=inside, between=between)


def plain(**more: Any) -> Fleet:
    """Measured links, so that nothing is assumed of them: 100 and 10 GB/s, no latency and no launch."""
    return fleet(Link(bandwidth=1e11, measured=True), Link(bandwidth=1e10, measured=True, **more))


def taken(operation: Operation, size: float, ranks: int, stride: int, on: Fleet) -> float:
    return float(collective_time.seconds(operation, size, ranks, stride, on))


@given(operations, sizes, st.sampled_from([1, 2, 8, 64]))
def test_a_rank_alone_exchanges_nothing(operation: Operation, size: float, stride: int) -> None:
    if operation != "send":
        assert taken(operation, size, 1, stride, plain()) == 0
    assert taken(operation, 0.0, 8, stride, plain()) == 0


@given(operations, sizes)
def test_inside_a_node_it_is_the_ring_s_bytes_over_the_link(operation: Operation, size: float) -> None:
    wanted = cost.ring_bytes(operation, size, 8 if operation != "send" else 2) / 1e11
    assert taken(operation, size, 8, 1, replace(plain(), nodes=1, between=None)) == pytest.approx(wanted)


@given(sizes, groups_of.filter(lambda group: group != (16, 1)))
def test_an_all_reduce_is_a_scatter_and_a_gather(size: float, group: tuple[int, int]) -> None:
    scatter, gather, reduce = (
        taken(operation, size, *group, plain()) for operation in ("reduce_scatter", "all_gather", "all_reduce")
    )
    assert scatter == pytest.approx(gather)
    assert reduce == pytest.approx(scatter + gather)


def test_between_two_machines_gpus_send_a_tensor_across_once() -> None:
    """In a ring 15/8 of it; on a tree each of 14 hops inside and 2 between takes in a piece first."""
    first = collective_time.PIECE * (14 / 1e11 + 2 / 1e10)
    assert taken("all_reduce", 1e9, 16, 1, plain()) == pytest.approx(1e9 / 1e10 + first)
    assert taken("all_reduce", 1e6, 16, 1, plain()) == pytest.approx(15 / 8 * 1e6 / 1e10)  # shorter than two pieces
    cores = collective_time.fleet(processor(count=2, between="10Gbit/s"), 4)
    gather = taken("all_gather", 1e9, 4, 1, cores)
    assert taken("all_reduce", 1e9, 4, 1, cores) == pytest.approx(2 * gather, rel=1e-3)


@given(operations, sizes, groups_of, st.floats(1, 100))
def test_bytes_and_bandwidth_count_in_proportion(
    operation: Operation, size: float, group: tuple[int, int], factor: float
) -> None:
    faster = fleet(Link(bandwidth=factor * 1e11, measured=True), Link(bandwidth=factor * 1e10, measured=True))
    assert taken(operation, size, *group, faster) == pytest.approx(taken(operation, size, *group, plain()) / factor)
    if (operation, group) != ("all_reduce", (16, 1)):  # a tree also waits for its first pieces
        assert taken(operation, size * factor, *group, plain()) == pytest.approx(
            factor * taken(operation, size, *group, plain())
        )


def test_groups_side_by_side_divide_the_node_s_link() -> None:
    """Groups of one rank on each of 16 nodes: 8 of them on each link; a group of whole nodes has it alone."""
    alone, beside = taken("all_gather", 1e9, 128, 1, plain()), taken("all_gather", 1e9, 16, 8, plain())
    assert alone == pytest.approx(127 / 128 * 1e9 / 1e10)
    assert beside == pytest.approx(8 * 15 / 16 * 1e9 / 1e10)
    assert taken("send", 1e9, 1, 8, plain()) == pytest.approx(8 * 1e9 / 1e10)
    # Of stages of one rank, eight to a machine, the hand-over that leaves it sets the pace and has the link to itself.
    assert taken("send", 1e9, 1, 1, plain()) == pytest.approx(1e9 / 1e10)


def test_what_leaves_the_node_in_an_all_to_all_goes_through_its_link() -> None:
    """16 ranks on 2 nodes: each sends 8 of its 16 pieces away, 8 ranks through one link."""
    assert taken("all_to_all", 1e9, 16, 1, plain()) == pytest.approx(8 * 1e9 * 8 / 16 / 1e10)


# GB/s that leave each rank, on machines of 8 A800s with 4 x 200 Gbit/s between them (Buff's measurements).
@pytest.mark.parametrize(
    ("operation", "size", "ranks", "low", "high"),
    [
        ("all_gather", 2**32, 8, 149, 156), ("all_gather", 2**32, 128, 91, 97), ("all_gather", 2**26, 128, 42, 48),
        ("all_to_all", 2**30, 16, 23, 23), ("all_to_all", 2**30, 128, 10, 10),
    ],
)  # fmt: skip
def test_declared_links_give_what_was_measured(
    operation: Operation, size: int, ranks: int, low: float, high: float
) -> None:
    """Large tensors keep their bandwidth over many ranks; small ones lose half of it to the latency of each hop."""
    on = collective_time.fleet(gpus("A800", count=ranks // 8, between="800Gbit/s"), ranks)
    found = cost.ring_bytes(operation, size, ranks) / taken(operation, size, ranks, 1, on) / 1e9
    assert 0.91 * low < found < 1.1 * high


def test_a_tree_of_machines_spares_small_tensors_a_ring_s_hops() -> None:
    """25 MiB on 1,024 ranks: 2,046 hops of a ring against 14 up and down a tree."""
    on = collective_time.fleet(gpus(count=128, between="400Gbit/s"), 1024)
    assert taken("all_reduce", 25 * 2**20, 1024, 1, on) < 0.5 * taken("all_gather", 25 * 2**20, 1024, 1, on)
    assert taken("all_reduce", 2**34, 1024, 1, on) == pytest.approx(
        2 * taken("all_gather", 2**34, 1024, 1, on), rel=0.01
    )


def test_a_broadcast_of_gpus_is_a_chain_and_one_of_processors_a_tree() -> None:
    chain, tree = collective_time.fleet(gpus(count=16), 128), collective_time.fleet(processor(count=16), 16)
    hops = 112 * chain.inside.latency + 15 * chain.between.latency if chain.between is not None else 0.0
    assert taken("broadcast", 1.0, 128, 1, chain) == pytest.approx(hops + chain.between.launch, rel=1e-3)  # type: ignore[union-attr]
    assert float(collective_time.chained(128, chain)) == pytest.approx(127 * collective_time.CHAIN)
    assert float(collective_time.chained(16, tree)) == 0


@given(
    operations, st.floats(1, 1e10), groups_of, st.floats(1, 50), st.sampled_from(["inside", "between"]),
    st.sampled_from(["bandwidth", "latency", "launch"]),
)  # fmt: skip
def test_no_better_link_makes_a_collective_slower(
    operation: Operation, size: float, group: tuple[int, int], factor: float, level: str, what: str
) -> None:
    on = fleet(Link(bandwidth=1e11, latency=3e-6, launch=1e-5), Link(bandwidth=1e10, latency=1e-5, launch=2e-5))
    link = getattr(on, level)
    value = getattr(link, what)
    better = msgspec.structs.replace(link, **{what: value * factor if what == "bandwidth" else value / factor})
    improved = replace(on, inside=better) if level == "inside" else replace(on, between=better)
    assert taken(operation, size, *group, improved) <= taken(operation, size, *group, on) * (1 + 1e-12)


@given(operations, st.floats(1, 1e10), groups_of, st.floats(1, 100))
def test_more_bytes_never_take_less_time(
    operation: Operation, size: float, group: tuple[int, int], factor: float
) -> None:
    on = collective_time.fleet(gpus(count=16), 128)
    assert taken(operation, size * factor, *group, on) >= taken(operation, size, *group, on)


@given(operations, st.lists(st.tuples(sizes, groups_of), min_size=1, max_size=6))
def test_many_groups_at_once_equal_one_by_one(operation: Operation, asked: list[Any]) -> None:
    on = collective_time.fleet(gpus(count=16), 128)
    amounts, ranks, strides = (np.array(part) for part in zip(*((size, *group) for size, group in asked), strict=True))
    together = collective_time.seconds(operation, amounts, ranks, strides, on)
    alone = [taken(operation, size, ranks, stride, on) for size, (ranks, stride) in asked]
    assert together == pytest.approx(alone)


@pytest.mark.parametrize("factors", [f for f in product((1, 2, 4), repeat=3) if list(f) == sorted(f)], ids=str)
def test_processors_exchange_machine_by_machine_as_the_engine_does(factors: tuple[int, int, int]) -> None:
    """Two machines of two ranks: the planner's seconds of a triple are those of the axes the engine goes along."""
    near = Link(bandwidth=2e9, latency=1e-5, launch=4e-5, measured=True)
    far = Link(bandwidth=25e6, latency=2e-3, launch=1e-4, measured=True)
    request = decoder(layers=1, outside=0, bucket=f"{2**40}B")
    on = replace(collective_time.fleet(processor(count=2), 4), inside=near, between=far)
    params, grads, optimizer = factors
    layouts = Layouts(dp=4, threads=1, params=params, grads=grads, optimizer=optimizer)
    step = CostInputs(request, on, on.kinds[0], layouts)
    weights = step_time.weights(step)
    wanted = along_the_axes(4.0 * request.profile.trainable, factors, near, far)
    assert float(step_time.gradients(step)["seconds"] + weights["reduce_scatter"]) == pytest.approx(wanted["reduce"])
    assert float(step_time.refresh(step)) == pytest.approx(wanted["refresh"])
    assert float(2 * weights["all_gather"]) == pytest.approx(2 * wanted["gather"])


def ring(operation: str, size: float, ranks: int, link: Link, sharing: int) -> float:
    """Seconds of a ring of `ranks`, `sharing` of which push through one link: launch, hops, bytes."""
    hops = (ranks - 1) * (2 if operation == "all_reduce" else 1)
    sent = cost.ring_bytes(operation, size, ranks) * sharing
    return float(link.launch * (ranks > 1) + hops * link.latency + sent / link.bandwidth)


def along_the_axes(size: float, factors: tuple[int, int, int], near: Link, far: Link) -> dict[str, float]:
    """Seconds of exchanging one unit of `size` bytes among two machines of two ranks, axis by axis."""
    found = {"reduce": 0.0, "refresh": 0.0, "gather": 0.0}
    placement = place(ShardFactors(*factors), (0, 0, 1, 1))
    for axis, before, _ in placement.spans(0, int(size)):
        across = len({member // 2 for member in axis.members(0)}) > 1
        sharing = 2 // len({member for member in axis.members(0) if member < 2}) if across else 1
        group = (before.length, axis.size, far if across else near, sharing)
        scatter, gather = ring("reduce_scatter", *group), ring("all_gather", *group)
        if axis.state == "replicas":
            found["reduce"] += scatter + gather if axis != placement.axes[-1] else ring("all_reduce", *group)
            continue
        found["reduce"] += scatter
        found["gather" if axis.state == "params" else "refresh"] += gather
    return found


def test_between_machines_of_processors_each_sends_its_share_at_once() -> None:
    """Of 4 ranks on each of 2 machines every one sums a quarter with its counterpart: the whole crosses each way."""
    on = replace(
        collective_time.fleet(processor(cores=4, count=2), 8),
        inside=Link(bandwidth=1e12, measured=True),
        between=Link(bandwidth=1e8, measured=True),
    )
    assert taken("all_reduce", 1e8, 8, 1, on) == pytest.approx(1.0, rel=1e-3)
    assert taken("all_gather", 1e8, 8, 1, on) == pytest.approx(0.5, rel=1e-3)


def test_seats_fill_processors_evenly_and_gpus_in_order() -> None:
    assert [place.node for place in collective_time.seats(processor(count=2), 5)] == [0, 0, 0, 1, 1]
    assert [place.rank for place in collective_time.seats(gpus(count=2), 9)] == list(range(9))
