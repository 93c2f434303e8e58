from __future__ import annotations

import pytest

from many_ranks import Fault, strike


def test_only_the_named_rank_and_step_are_struck() -> None:
    faults = [Fault(rank=1, step=2, do="raise"), Fault(rank=0, step=5, do="raise")]
    for rank in range(3):
        for step in range(7):
            if (rank, step) in ((1, 2), (0, 5)):
                with pytest.raises(RuntimeError, match=f"rank {rank}, step {step}"):
                    strike(faults, rank, step)
            else:
                strike(faults, rank, step)
