"""Many ranks as threads of one process, about 20 ms: for logic, not for timing or failures.

The threads meet in a `Room`; every operation is two barriers with a copy between them, reductions go in rank order,
so results are exact and repeatable.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import Work

from espalier import comm
from espalier.comm.backends import INNER, GroupRequest

ReduceOp = dist.ReduceOp
_DEFAULT = timedelta(0)


def ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """Runs `function(channel, *args)` on `n` threads and returns their results in order of rank.

    `channel` is a Channel with a ledger of its own; DeviceMesh and DTensor work inside. Threads share the process:
    random seeds, default dtypes and files are common to all ranks.

    Raises:
        TimeoutError: some rank did not end within `timeout` seconds.
        Exception: the first exception of a rank, as it was.

    >>> import torch.distributed as dist
    >>> def total(channel):
    ...     value = torch.tensor([channel.rank() + 1.0])
    ...     dist.all_reduce(value)
    ...     return value.item()
    >>> ranks(4, total)
    [10.0, 10.0, 10.0, 10.0]
    """
    results = [None] * n
    errors = []
    store = HashStore()
    building = _Building(n, timeout)

    def run(rank: int) -> None:
        _BUILDING.here = building
        try:
            channel = comm.connect(store, rank, n, timeout=timeout, inner="threads")
            results[rank] = function(channel, *args)
        except BaseException as error:
            errors.append((rank, error))
            building.abort()
        finally:
            comm.disconnect()

    with _worlds():
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if errors:
        rank, error = next(
            (item for item in errors if not isinstance(item[1], threading.BrokenBarrierError)), errors[0]
        )
        error.add_note(f"raised in rank {rank} of {n}")
        raise error
    if late:
        raise TimeoutError(f"ranks {late} of {n} did not end within {timeout:g} s")
    return results


class Room:
    """Where the ranks of one group meet. Has state."""

    def __init__(self, size: int, timeout: float) -> None:
        self.timeout = timeout
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size
        self._mail: dict[tuple[int, int, int], queue.SimpleQueue[list[Tensor]]] = {}
        self._lock = threading.Lock()

    def meet(self) -> None:
        """Waits for all ranks."""
        self._barrier.wait(self.timeout)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """All ranks' values. Call `meet` once you no longer read them."""
        self._slots[rank] = value
        self.meet()
        return list(self._slots)

    def box(self, source: int, target: int, tag: int) -> queue.SimpleQueue[list[Tensor]]:
        """The messages on their way from `source` to `target`."""
        with self._lock:
            return self._mail.setdefault((source, target, tag), queue.SimpleQueue())

    def abort(self) -> None:
        """Makes every rank's wait fail."""
        self._barrier.abort()


class ThreadGroup:
    """The operations of a group whose ranks are threads: the same methods as torch's Gloo group."""

    def __init__(self, room: Room, rank: int, size: int) -> None:
        self._room = room
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """This thread's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Ranks in the group."""
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes how long ranks wait for each other."""
        self._room.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Nothing to close."""

    def _collect(self, value: Any, use: Callable[[list[Any]], list[Tensor]], into: Sequence[Tensor]) -> Work:
        """Every rank's `value` through `use` (which copies) into this rank's tensors, once all have read."""
        with torch.no_grad():
            result = use(self._room.exchange(self._rank, value))
            self._room.meet()
            for target, source in zip(into, result, strict=True):
                target.detach().copy_(source.view(target.shape))
        return _Later(lambda _: None)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """In rank order, so every rank gets the same bits."""
        return self._collect(tensors, lambda all_: _reduced(all_, opts.reduceOp), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """To the root only."""
        root = self._rank == opts.rootRank
        return self._collect(
            tensors, lambda all_: _reduced(all_, opts.reduceOp) if root else [], tensors if root else []
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """From the root."""
        return self._collect(tensors, lambda all_: [tensor.clone() for tensor in all_[opts.rootRank]], tensors)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self._collect(input, lambda all_: [torch.cat([part.reshape(-1) for part in all_])], [output])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Parts as lists."""
        flat = [part for parts in outputs for part in parts]
        return self._collect(
            inputs, lambda all_: [every[i].clone() for i in range(len(inputs)) for every in all_], flat
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """To the root only."""
        into = outputs[0] if self._rank == opts.rootRank else []
        return self._collect(inputs, lambda all_: [every[0].clone() for every in all_] if into else [], into)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """From the root's list."""
        return self._collect(inputs, lambda all_: [all_[opts.rootRank][0][self._rank].clone()], outputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> Work:
        """Parts of dim 0."""
        sizes = input_splits or [input.size(0) // self._size] * self._size
        return self._collect(
            input.split(sizes), lambda all_: [torch.cat([parts[self._rank] for parts in all_])], [output]
        )

    def barrier(self, opts: Any) -> Work:
        """Meets once."""
        self._room.meet()
        return _Later(lambda _: None)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Leaves copies in the receiver's box."""
        self._room.box(self._rank, peer, tag).put([tensor.detach().clone() for tensor in tensors])
        return _Later(lambda _: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Takes the oldest message when waited for."""
        box = self._room.box(peer, self._rank, tag)

        def take(seconds: float) -> None:
            try:
                message = box.get(timeout=seconds or self._room.timeout)
            except queue.Empty:
                raise RuntimeError(f"Timed out waiting for a message from rank {peer}") from None
            for target, source in zip(tensors, message, strict=True):
                target.detach().copy_(source)

        return _Later(take)


class _Later(Work):
    """A Work that is done when first waited for."""

    def __init__(self, act: Callable[[float], None]) -> None:
        super().__init__()
        self._act: Callable[[float], None] | None = act

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Does what is left to do."""
        if self._act is not None:
            self._act(timeout.total_seconds())
            self._act = None
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._act is None


def _reduced(all_: list[list[Tensor]], op: Any) -> list[Tensor]:
    steps: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    step = steps[getattr(op, "op", op)]
    totals = [tensor.clone() for tensor in all_[0]]
    for every in all_[1:]:
        totals = [step(total, tensor) for total, tensor in zip(totals, every, strict=True)]
    return totals


class _Building:
    """The rooms of one call of `ranks`. Has state."""

    def __init__(self, n: int, timeout: float) -> None:
        self.n = n
        self.timeout = timeout
        self._rooms: dict[tuple[str, tuple[int, ...]], Room] = {}
        self._lock = threading.Lock()

    def room(self, asked: GroupRequest) -> Room:
        with self._lock:
            return self._rooms.setdefault((asked.name, asked.members), Room(asked.size, self.timeout))

    def abort(self) -> None:
        with self._lock:
            for room in self._rooms.values():
                room.abort()


class _World(threading.local):
    """What torch.distributed keeps per process, here kept per thread."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.group_count = 0
        self.comms: list[Any] = []


_BUILDING = threading.local()


def _threads(asked: GroupRequest) -> dict[str, Any]:
    return {"cpu": ThreadGroup(_BUILDING.here.room(asked), asked.rank, asked.size)}


INNER["threads"] = _threads


@contextmanager
def _worlds() -> Iterator[None]:
    before = dist.distributed_c10d._world
    hook = sys.excepthook
    dist.distributed_c10d._world = _World()  # type: ignore[assignment]
    c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        dist.distributed_c10d._world = before
        sys.excepthook = hook  # every init_process_group wraps it in one more "[rank0]:"
