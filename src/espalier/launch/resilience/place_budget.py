"""Failure budget of a place: a place is given up if its rank fails repeatedly and no other rank does. Pure, no torch.

After Acme (arXiv 2403.07648), section 6.1: faulty nodes are cordoned. Where we deviate: nothing but failures is asked,
since a device that kills its rank may answer every test; and what may be the data's fault (the same crash on another
rank once the place is gone) is not taken for a place's twice.
"""

from __future__ import annotations

import re

from espalier.train.failure import Failure, Kind

_BOUND: frozenset[Kind] = frozenset({"killed", "exit", "hang", "stopped", "lost"})
"""What a place can do to its rank without the code's help."""

_DEVICE = re.compile(r"(CUDA|HIP|cuDNN|CUBLAS|NCCL)\W*(error|failure|_STATUS)|AcceleratorError|Xid|uncorrectable", re.I)
"""Exceptions whose words tell of a device."""

LEAST = 2
"""Failures of one place without progress before it can be given up, however few restarts are allowed."""


def bound(failure: Failure) -> bool:
    """Whether `failure` can be the doing of the rank's place."""
    names_device = failure.kind == "exception" and _DEVICE.search(f"{failure.raised} {failure.what}") is not None
    return failure.rank >= 0 and (failure.kind in _BOUND or names_device)


class Blame:
    """Who failed since the run last got further. Has state: that, and how far the run was when a place was given up."""

    def __init__(self) -> None:
        self._failed: list[Failure] = []
        self._furthest = -1
        self._given_up_at: int | None = None

    def take(self, failure: Failure) -> None:
        """Counts `failure`."""
        if failure.step > self._furthest:
            self._furthest = failure.step
            self._failed.clear()
        self._failed.append(failure)

    def place(self) -> int | None:
        """The rank that alone failed since the run last got further; None where there is none, or where a place was
        given up since then already."""
        ranks = {failure.rank for failure in self._failed}
        if len(self._failed) < LEAST or len(ranks) > 1 or not all(map(bound, self._failed)):
            return None
        if self._given_up_at is not None and self._furthest <= self._given_up_at:
            return None
        return next(iter(ranks))

    def given_up(self) -> None:
        """The place is left out from now on; ranks are numbered anew."""
        self._given_up_at = self._furthest
        self._failed.clear()
