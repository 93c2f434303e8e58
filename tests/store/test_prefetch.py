"""Batches read ahead are the batches of the schedule in its order; no more than `depth` are under way."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import UserError
from espalier.store import Budget, MemoryRows, read_ahead

DATA = torch.randn(100, 5)


@given(sizes=st.lists(st.integers(0, 20), max_size=12), depth=st.integers(1, 4))
def test_every_batch_comes_in_its_turn(sizes: list[int], depth: int) -> None:
    schedule = [torch.randint(100, (size,)) for size in sizes]
    found = [batch.clone() for batch in read_ahead(MemoryRows(DATA), schedule, 20, depth)]
    assert len(found) == len(schedule)
    assert all(torch.equal(batch, DATA[ids]) for batch, ids in zip(found, schedule, strict=True))


def test_reading_goes_ahead_of_the_reader_by_the_depth() -> None:
    started = 0

    class Counting(MemoryRows):
        def read(self, ids: torch.Tensor, out: torch.Tensor) -> None:
            nonlocal started
            started += 1
            super().read(ids, out)

    batches = read_ahead(Counting(DATA), (torch.arange(10) for _ in range(50)), 10, depth=3)
    for number in range(1, 20):
        next(batches)
        assert started <= number + 3
    before = threading.active_count()
    batches.close()
    assert started <= 23
    assert threading.active_count() == before - 1


def test_buffers_come_from_the_budget_and_the_error_says_how_much_they_need() -> None:
    with pytest.raises(UserError, match="3 buffers of 10 rows takes 600 B"):
        next(read_ahead(MemoryRows(DATA), [torch.arange(10)], 10, budget=Budget(500)))
    budget = Budget(600)
    batches = read_ahead(MemoryRows(DATA), [torch.arange(10)] * 3, 10, budget=budget)
    next(batches)
    assert budget.free == 0
    batches.close()
    assert budget.free == 600


def test_errors_reach_the_reader() -> None:
    with pytest.raises(UserError, match="A batch has 11 rows") as error:
        list(read_ahead(MemoryRows(DATA), [torch.arange(11)], 10))
    assert "most = 11" in str(error.value)
    with pytest.raises(UserError, match="no row 100"):
        list(read_ahead(MemoryRows(DATA), [torch.tensor([100])], 10))
