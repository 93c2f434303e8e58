"""Slow links on purpose, in process: what a Channel sends takes as long as on a link of given latency and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work

from espalier.comm import Channel, Exact, Traffic, sent_bytes

_OPERATIONS = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "send": "send",
}
_DEFAULT = timedelta(0)


def slow(channel: Channel, *, latency: float = 0.0, bandwidth: float = float("inf")) -> None:
    """From now on everything `channel` sends leaves over one serial link.

    Args:
        channel: changed in place; call it on every rank.
        latency: seconds added to each operation.
        bandwidth: bytes per second of payload this rank can send. Operations queue behind each other.

    >>> def function(channel):
    ...     slow(channel, latency=0.01, bandwidth=1e6)  # 10 ms, 1 MB/s
    """
    link = _Link(channel.size(), latency, bandwidth)
    for kind in Traffic:
        channel.use(kind, link)


class _Link(Exact):
    """The exact codec over a slow carrier. Has state: until when the link is busy."""

    name = "exact over a slow link"

    def __init__(self, ranks: int, latency: float, bandwidth: float) -> None:
        self.ranks, self.latency, self.bandwidth = ranks, latency, bandwidth
        self.busy = 0.0

    def carrier(self, inner: Any) -> Any:
        """`inner` with delays."""
        return _Slow(inner, self)

    def book(self, operation: str, size: float) -> float:
        """The moment at which `size` bytes of payload have crossed the link."""
        sent = sent_bytes(_OPERATIONS[operation], size, self.ranks) if operation in _OPERATIONS else size
        self.busy = max(self.busy, time.monotonic()) + sent / self.bandwidth
        return self.busy + self.latency


class _Slow:
    def __init__(self, inner: Any, link: _Link) -> None:
        self._inner, self._link = inner, link

    def __getattr__(self, operation: str) -> Callable[..., Work]:
        def call(first: Any, *rest: Any) -> Work:
            work = getattr(self._inner, operation)(first, *rest)
            return _Delayed(work, self._link.book(operation, _size(first)))

        return call


class _Delayed(Work):
    def __init__(self, work: Work, until: float) -> None:
        super().__init__()
        self._work, self._until = work, until

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        self._work.wait(timeout)
        time.sleep(max(0.0, self._until - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        return time.monotonic() >= self._until and self._work.is_completed()


def _size(tensors: Any) -> float:
    """Bytes of the whole payload: the outputs of a gathering operation, the tensors of any other."""
    if isinstance(tensors, Tensor):
        return float(tensors.numel() * tensors.element_size())
    return sum(_size(tensor) for tensor in tensors) if isinstance(tensors, Iterable) else 0.0
