"""Collectives cost what the ring algorithms say, to the byte and to the microsecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier import cost
from espalier.cluster import Link
from espalier.comm.base import sent_bytes

LINK = Link(bandwidth=1e9, latency=1e-5, launch=1e-4)
RINGS = {
    "all_reduce": cost.all_reduce,
    "all_gather": cost.all_gather,
    "reduce_scatter": cost.reduce_scatter,
    "all_to_all": cost.all_to_all,
    "broadcast": cost.broadcast,
}
sizes = st.integers(0, 2**40)
counts = st.integers(1, 4096)


def test_seconds_by_hand() -> None:
    """Four ranks, 1 MB, 1 GB/s, 10 µs a hop, 100 µs a call."""
    assert cost.all_reduce(1e6, 4, LINK) == pytest.approx(1e-4 + 6e-5 + 1.5e-3)
    assert cost.all_gather(1e6, 4, LINK) == pytest.approx(1e-4 + 3e-5 + 0.75e-3)
    assert cost.reduce_scatter(1e6, 4, LINK) == pytest.approx(1e-4 + 3e-5 + 0.75e-3)
    assert cost.all_to_all(1e6, 4, LINK) == pytest.approx(1e-4 + 3e-5 + 0.75e-3)
    assert cost.broadcast(1e6, 4, LINK) == pytest.approx(1e-4 + 2e-5 + 1e-3)
    assert cost.send(1e6, LINK) == pytest.approx(1e-4 + 1e-5 + 1e-3)


def test_groups_that_share_a_link_divide_its_bandwidth() -> None:
    assert cost.all_reduce(1e6, 4, LINK, sharing=8) == pytest.approx(1e-4 + 6e-5 + 8 * 1.5e-3)


@given(sizes, counts, st.sampled_from(sorted(RINGS)))
def test_planned_bytes_are_the_ledger_s(size: int, ranks: int, operation: str) -> None:
    assert cost.ring_bytes(operation, size, ranks) == pytest.approx(sent_bytes(operation, size, ranks, root=True))


@pytest.mark.parametrize("operation", sorted(RINGS))
def test_alone_nothing_is_sent_or_waited_for(operation: str) -> None:
    assert RINGS[operation](1e6, 1, LINK) == 0
    assert cost.ring_bytes(operation, 1e6, 1) == 0


@given(sizes, counts, st.sampled_from(sorted(RINGS)), st.floats(1, 100))
def test_a_better_link_is_never_slower(size: int, ranks: int, operation: str, factor: float) -> None:
    seconds = RINGS[operation](size, ranks, LINK)
    for better in (
        Link(bandwidth=LINK.bandwidth * factor, latency=LINK.latency, launch=LINK.launch),
        Link(bandwidth=LINK.bandwidth, latency=LINK.latency / factor, launch=LINK.launch),
        Link(bandwidth=LINK.bandwidth, latency=LINK.latency, launch=LINK.launch / factor),
    ):
        assert RINGS[operation](size, ranks, better) <= seconds


@given(st.integers(1, 2**40), st.integers(2, 4096))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: int, ranks: int) -> None:
    once = Link(bandwidth=1e9, latency=1e-5)
    both = cost.reduce_scatter(size, ranks, once) + cost.all_gather(size, ranks, once)
    assert cost.all_reduce(size, ranks, once) == pytest.approx(both)


@pytest.mark.parametrize("operation", sorted(RINGS))
def test_arrays_price_a_grid_at_once(operation: str) -> None:
    sizes, ranks = np.array([[1e3], [1e6]]), np.array([1, 2, 8])
    grid = RINGS[operation](sizes, ranks, LINK)
    assert grid.shape == (2, 3)
    for i, size in enumerate(sizes[:, 0]):
        assert grid[i] == pytest.approx([RINGS[operation](size, int(n), LINK) for n in ranks])


def test_costs_add_by_name_and_repeat_without_holding_more() -> None:
    one = cost.Cost({"forward": 1.0}, {"params": 10.0}, {"gradients": 4.0}, {"forward": "a"})
    both = cost.total([one, cost.Cost({"forward": 2.0, "backward": 3.0}, sources={"backward": "b"})])
    assert both.seconds == {"forward": 3.0, "backward": 3.0}
    assert both.sources == {"forward": "a", "backward": "b"}
    thrice = one.times(3)
    assert (thrice.seconds, thrice.held, thrice.sent) == ({"forward": 3.0}, {"params": 10.0}, {"gradients": 12.0})
