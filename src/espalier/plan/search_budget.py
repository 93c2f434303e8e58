"""Search budget: seconds of one core that a decision may search for, and what its plan says where they end it.

No torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from espalier.plan.layouts import Layouts

CLOCK = time.thread_time


class SearchBudget:
    """The budget of one decision. Has state: how many layouts were priced, and left out because the seconds were over.

    Which layouts are priced depends on the machine only once something is left out.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self.priced = self.left_out = 0
        self._end = CLOCK() + seconds

    def allowed(self, batches: Iterable[Layouts], fits: Callable[[], bool]) -> Iterator[Layouts]:
        """The batches until the seconds are over, and from then on while nothing `fits` yet."""
        for batch in batches:
            if CLOCK() >= self._end and fits():
                self.left_out += len(batch)
            else:
                self.priced += len(batch)
                yield batch

    def words(self) -> tuple[str, ...]:
        """What the search left out, and how to allow more; nothing where it ended by itself."""
        if not self.left_out:
            return ()
        total = self.priced + self.left_out
        return (
            f"The search stopped after plan.seconds = {self.seconds:g}, with {math.floor(100 * self.priced / total)}% "
            f"of {total:,} candidate layouts priced; a higher plan.seconds prices more of them. "
            "Another machine may answer differently.",
        )


_CURRENT: ContextVar[SearchBudget | None] = ContextVar("budget", default=None)


def current() -> SearchBudget:
    """That of the decision at hand; outside all decisions one without end."""
    return _CURRENT.get() or SearchBudget()


@contextmanager
def started(seconds: float) -> Iterator[SearchBudget | None]:
    """A budget for all searches inside; None inside a decision that has one, from which these then take."""
    if _CURRENT.get() is not None:
        yield None
        return
    budget = SearchBudget(seconds)
    token = _CURRENT.set(budget)
    try:
        yield budget
    finally:
        _CURRENT.reset(token)
