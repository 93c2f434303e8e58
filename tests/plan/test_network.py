"""What a collective costs: as its formula on plain links, never less on a slower one, nothing alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from asked import gpus
from hypothesis import given
from hypothesis import strategies as st

from espalier import cost
from espalier.cluster import Link
from espalier.plan import network
from espalier.plan.network import Fleet, Operation

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
operations = st.sampled_from(OPERATIONS)
sizes = st.floats(1, 1e12)
groups = st.sampled_from([(2, 1), (8, 1), (4, 2), (16, 1), (16, 8), (2, 8), (64, 1), (8, 16), (32, 4), (128, 1)])


def fleet(inside: Link, between: Link | None, nodes: int = 16) -> Fleet:
    return replace(network.fleet(gpus(count=nodes), 8 * nodes), inside=inside, between=between)


def plain(**more: Any) -> Fleet:
    """Measured links, so that nothing is assumed of them: 100 and 10 GB/s, no latency and no launch."""
    return fleet(Link(bandwidth=1e11, measured=True), Link(bandwidth=1e10, measured=True, **more))


def taken(operation: Operation, size: float, ranks: int, stride: int, on: Fleet) -> float:
    return float(network.seconds(operation, size, ranks, stride, on))


@given(operations, sizes, st.sampled_from([1, 2, 8, 64]))
def test_a_rank_alone_exchanges_nothing(operation: Operation, size: float, stride: int) -> None:
    if operation != "send":
        assert taken(operation, size, 1, stride, plain()) == 0
    assert taken(operation, 0.0, 8, stride, plain()) == 0


@given(operations, sizes)
def test_inside_a_node_it_is_the_ring_s_bytes_over_the_link(operation: Operation, size: float) -> None:
    wanted = cost.ring_bytes(operation, size, 8 if operation != "send" else 2) / 1e11
    assert taken(operation, size, 8, 1, replace(plain(), nodes=1, between=None)) == pytest.approx(wanted)


@given(sizes, groups)
def test_an_all_reduce_is_a_scatter_and_a_gather(size: float, group: tuple[int, int]) -> None:
    scatter, gather, reduce = (
        taken(operation, size, *group, plain()) for operation in ("reduce_scatter", "all_gather", "all_reduce")
    )
    assert scatter == pytest.approx(gather)
    assert reduce == pytest.approx(scatter + gather)


@given(operations, sizes, groups, st.floats(1, 100))
def test_bytes_and_bandwidth_count_in_proportion(
    operation: Operation, size: float, group: tuple[int, int], factor: float
) -> None:
    assert taken(operation, size * factor, *group, plain()) == pytest.approx(
        factor * taken(operation, size, *group, plain())
    )
    faster = fleet(Link(bandwidth=factor * 1e11, measured=True), Link(bandwidth=factor * 1e10, measured=True))
    assert taken(operation, size, *group, faster) == pytest.approx(taken(operation, size, *group, plain()) / factor)


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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_declared_network_is_slower_the_more_ranks_it_joins(operation: Operation) -> None:
    declared = fleet(Link(bandwidth=1e11), Link(bandwidth=1e10), nodes=128)
    shares = [
        taken(operation, 1e9, ranks, 1, declared) / taken(operation, 1e9, ranks, 1, measured_as(declared))
        for ranks in (16, 32, 64, 256, 512, 1024)
    ]
    if operation == "all_to_all":  # 23 and 10 GB/s at 16 and 128 ranks
        assert shares[0] == pytest.approx(4)
        assert shares == sorted(shares)
    elif operation != "send":
        assert shares == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])


def measured_as(on: Fleet) -> Fleet:
    assert on.between is not None
    return replace(on, between=msgspec.structs.replace(on.between, measured=True))


@given(
    operations, st.floats(1, 1e10), groups, st.floats(1, 50), st.sampled_from(["inside", "between"]),
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


@given(operations, st.floats(1, 1e10), groups, st.floats(1, 100))
def test_more_bytes_never_take_less_time(
    operation: Operation, size: float, group: tuple[int, int], factor: float
) -> None:
    on = network.fleet(gpus(count=16), 128)
    assert taken(operation, size * factor, *group, on) >= taken(operation, size, *group, on)


@given(operations, st.lists(st.tuples(sizes, groups), min_size=1, max_size=6))
def test_many_groups_at_once_equal_one_by_one(operation: Operation, asked: list[Any]) -> None:
    on = network.fleet(gpus(count=16), 128)
    amounts, ranks, strides = (np.array(part) for part in zip(*((size, *group) for size, group in asked), strict=True))
    together = network.seconds(operation, amounts, ranks, strides, on)
    alone = [taken(operation, size, ranks, stride, on) for size, (ranks, stride) in asked]
    assert together == pytest.approx(alone)
