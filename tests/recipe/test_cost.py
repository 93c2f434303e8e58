"""The bytes of a collective are the ledger's, and costs add up by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.comm.base import sent_bytes
from espalier.recipe import cost

OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")


@given(st.integers(0, 2**40), st.integers(1, 4096), st.sampled_from(OPERATIONS))
def test_planned_bytes_are_the_ledger_s(size: int, ranks: int, operation: str) -> None:
    assert cost.ring_bytes(operation, size, ranks) == pytest.approx(sent_bytes(operation, size, ranks, root=True))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_alone_nothing_is_sent(operation: str) -> None:
    assert cost.ring_bytes(operation, 1e6, 1) == 0


def test_costs_add_by_name_and_repeat_without_holding_more() -> None:
    one = cost.Cost({"forward": 1.0}, {"params": 10.0}, {"gradients": 4.0}, {"forward": "a"})
    both = one + cost.Cost({"forward": 2.0, "backward": 3.0}, sources={"backward": "b"})
    assert both.seconds == {"forward": 3.0, "backward": 3.0}
    assert both.sources == {"forward": "a", "backward": "b"}
    thrice = one.times(3)
    assert (thrice.seconds, thrice.memory_bytes, thrice.sent) == (
        {"forward": 3.0},
        {"params": 10.0},
        {"gradients": 12.0},
    )
