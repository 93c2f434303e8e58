"""Equal ranks fill the machines evenly and share the batch out whole."""

from __future__ import annotations

from asked import gpus, processor
from hypothesis import given
from hypothesis import strategies as st

from espalier.plan.seats import seats, shares


@given(st.integers(1, 1000), st.integers(1, 64))
def test_shares_cover_the_batch_and_differ_by_at_most_one(batch: int, ranks: int) -> None:
    cuts = shares(batch, ranks)
    sizes = [stop - start for start, stop in cuts]
    assert [i for start, stop in cuts for i in range(start, stop)] == list(range(batch))
    assert max(sizes) - min(sizes) <= 1


def test_seats_fill_processors_evenly_and_gpus_in_order() -> None:
    assert [place.node for place in seats(processor(count=2), 5)] == [0, 0, 0, 1, 1]
    assert [place.rank for place in seats(gpus(count=2), 9)] == list(range(9))
