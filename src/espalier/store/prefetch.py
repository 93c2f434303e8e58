"""Pipeline: stages in threads of their own, joined by bounded queues; results come in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from espalier.recipe.resource import Resource

DEPTH = 2
"""Items that wait between two stages (arXiv 2405.05231, section 6)."""


class _Closed(Exception):
    """The queue takes and gives nothing any more."""


class _End:
    """What follows the last item: the error that ended the stage, None where it was the last."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class BoundedQueue:
    """First in, first out; `put` waits while it is full. Resource it ends all waits."""

    def __init__(self, depth: int) -> None:
        self._items: deque[Any] = deque()
        self._depth = depth
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: Any) -> None:
        """Appends. Raises _Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if self._closed:
                raise _Closed
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Any:
        """The oldest item. Raises _Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if self._closed:
                raise _Closed
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Whoever waits, or comes, gets _Closed."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class PrefetchPipeline(Resource, Iterator[Any]):
    """What the last of `stages` makes of each item. Has state: a thread for each stage until it is closed.

    An error in a stage is raised by `next` after the results of the items before it.

    Attributes:
        stalled: seconds that `next` waited in all.
    """

    def __init__(self, items: Iterable[Any], stages: Sequence[Callable[[Any], Any]], depth: int = DEPTH) -> None:
        self.stalled = 0.0
        self._queues = [BoundedQueue(depth) for _ in stages]
        source: Callable[[], Iterator[Any]] = lambda: iter(items)  # noqa: E731 - the first stage has no queue before it
        self._threads = []
        for number, (stage, queue) in enumerate(zip(stages, self._queues, strict=True)):
            work = threading.Thread(
                target=_work, args=(source, stage, queue), name=f"reader-{number}-{stage.__name__}", daemon=True
            )
            self._threads.append(work)
            work.start()
            source = _taken(queue)

    def __next__(self) -> Any:
        """The next result. Raises what a stage raised."""
        begun = time.perf_counter()
        try:
            item = self._queues[-1].get()
        except _Closed:
            raise StopIteration from None
        finally:
            self.stalled += time.perf_counter() - begun
        if not isinstance(item, _End):
            return item
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Ends all stages and waits for them. May be called twice."""
        for queue in self._queues:
            queue.close()
        for thread in self._threads:
            thread.join()


def _taken(queue: BoundedQueue) -> Callable[[], Iterator[Any]]:
    def items() -> Iterator[Any]:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    return items


def _work(source: Callable[[], Iterator[Any]], stage: Callable[[Any], Any], queue: BoundedQueue) -> None:
    try:
        try:
            for item in source():
                queue.put(stage(item))
                del item  # what it holds is the next stage's
            queue.put(_End(None))
        except _Closed:
            raise
        except BaseException as error:  # the caller's to see
            queue.put(_End(error))
    except _Closed:
        return
