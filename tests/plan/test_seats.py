"""Equal ranks fill the machines evenly."""

from __future__ import annotations

from asked import gpus, processor

from espalier.plan.seats import seats


def test_seats_fill_processors_evenly_and_gpus_in_order() -> None:
    assert [place.node for place in seats(processor(count=2), 5)] == [0, 0, 0, 1, 1]
    assert [place.rank for place in seats(gpus(count=2), 9)] == list(range(9))
