"""A collective under way: its wait has a deadline, and a failed wait says who is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from espalier.comm.flight_recorder import FlightRecorder, RecordedCollective

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

_DEFAULT = timedelta(0)


class Pending(Work):
    """The Work a Channel returns. Has state: whether it was waited for.

    Args:
        works: the inner group's works, all of which must end.
        entry: the record of this collective; its `done` is set here.
        watch: composes the message of a failure.
        limit: the deadline of a wait that names none; None where the inner group keeps it by itself (NCCL).
        finish: what is left to do on this rank once the bytes are here; run exactly once.
    """

    def __init__(
        self,
        works: Sequence[Work],
        entry: RecordedCollective,
        watch: FlightRecorder,
        limit: timedelta | None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._works, self._entry, self._watch, self._limit = works, entry, watch, limit
        self._finish = finish
        self._finishing = threading.Lock() if finish else None

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Returns when the result is there. Raises PeerLost at the deadline or when a peer is gone."""
        limit = timeout or self._limit
        try:
            for work in self._works:
                if limit is None:
                    work.wait()
                else:
                    self._within(work, limit, extends=not timeout)
        except RuntimeError as error:
            raise self._watch.failure(self._entry, str(error)) from None
        self._complete()
        return True

    def _within(self, work: Work, limit: timedelta, extends: bool) -> None:
        """Waits for `work`; the deadline begins anew where others compute. A message that was waited for in vain has
        closed its connection."""
        extends = extends and self._entry.key == self._entry.group
        while True:
            try:
                work.wait(limit)
                return
            except RuntimeError:
                if not extends or work.is_completed() or not self._watch.computes():
                    raise

    def is_completed(self) -> bool:
        """Whether a wait would return at once."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether it ended without error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """The first error of the inner works, if any."""
        return next((work.exception() for work in self._works if not work.is_success()), None)

    def result(self) -> list[Tensor]:
        """The result tensors, where the inner group offers them."""
        self.wait()
        return [tensor for work in self._works for tensor in work.result()]

    def source_rank(self) -> int:
        """The sender of a message received from anybody."""
        return self._works[0].source_rank()

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()

    def synchronize(self) -> None:
        """Orders later operations after this one; a plain wait on CPU."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of the result tensors. It fails with the inner group's own error; only `wait` explains it."""
        from torch.futures import collect_all

        futures = [work.get_future() for work in self._works]
        if self._finish is None and len(futures) == 1:
            return futures[0]
        return collect_all(futures).then(self._finished_value)

    def _finished_value(self, done: Future[list[Any]]) -> list[Any]:
        values = [future.value() for future in done.value()]  # raises the first error
        self._complete()
        return values

    def _complete(self) -> None:
        if self._finishing is not None:
            with self._finishing:
                if self._finish is not None:
                    self._finish()
                    self._finish = None
        self._entry.done = True
