"""How ranks find each other: `connect`, `disconnect`, and the torch backend `espalier` behind them.

With the backend registered, `new_group` and DeviceMesh make Channels too, sharing the ledger and the record of the
first one. `init_process_group("espalier", ...)` by foreign code works as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from espalier.comm import rendezvous_wait
from espalier.comm.backends import INNER, GroupRequest, gloo
from espalier.comm.base import Ledger, Traffic
from espalier.comm.channel import Channel, SharedRecords
from espalier.comm.flight_recorder import FlightRecorder
from espalier.comm.rendezvous_wait import Deadline
from espalier.kernels import accelerator
from espalier.recipe.errors import PeerLost, UserError, nearest
from espalier.recipe.units import show_seconds


def parallel_group(group: dist.ProcessGroup, kind: Traffic, limit: timedelta) -> ProcessGroupGloo:
    """A Gloo group of the ranks of any group, for encoded messages of one class. These ranks call it alike, others do
    not: its name counts the groups that were made of this one, not, as torch's `new_group` does, all that a rank knows.
    """
    store = group.get_group_store()
    rank = group.rank()
    number = store.add(f"espalier/{kind._value_}/{rank}", 1)
    return gloo(PrefixStore(f"espalier/{kind._value_} {number}", store), rank, group.size(), limit)


def connect(store: Store, rank: int, world: int, *, timeout: float, inner: str = "gloo") -> Channel:
    """Joins `world` ranks into torch's default group and returns it as a Channel.

    Args:
        store: where the ranks meet (a TCPStore, FileStore …). A restarted attempt needs a key space of its own, such
            as `PrefixStore(f"attempt{n}", store)`, or it meets the addresses of the dead one.
        rank: this process, 0 <= rank < world.
        world: the number of ranks.
        timeout: seconds; the deadline of this call and of every later wait.
        inner: `gloo`, `nccl` (CUDA tensors by NCCL, host tensors by Gloo), or `staged` (CUDA tensors through
            host memory, for groups of CPUs and GPUs).

    Raises:
        UserError: `inner` is unknown or not available here.
        PeerLost: not all ranks came in time; names those that did not.
    """
    if inner not in INNER:
        near = nearest(inner, INNER)
        raise UserError(f"inner is unknown: {inner!r}.", do=f"use {near!r}" if near else f"use one of {sorted(INNER)}")
    space = PrefixStore("ranks", store)
    deadline = Deadline(timeout, f"Rank {rank}")
    limit = timedelta(seconds=timeout)
    space.set(f"here/{rank}", "")
    space.set_timeout(limit)
    rendezvous_wait.present(space, [f"here/{other}" for other in range(world)], _where(store), deadline)
    if not dist.is_initialized():
        # Torch names groups by how many this process has made; one that stayed has made more than one that is new.
        dist.distributed_c10d._world.group_count = 0
    try:
        dist.init_process_group("espalier", store=space, rank=rank, world_size=world, timeout=limit, pg_options=inner)
    except RuntimeError as error:
        raise PeerLost(
            f"Rank {rank} waited {show_seconds(timeout)} for {world} ranks to connect: all came, but a connection "
            "between them failed.",
            why=str(error).strip().splitlines()[0],
            do="look at the logs of the other ranks; check that their hosts reach each other at every port",
        ) from None
    channel = dist.group.WORLD
    assert isinstance(channel, Channel)
    return channel


def _where(store: Any) -> str:
    """Where the store is, if that is known."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "host") else ""


def disconnect() -> None:
    """Leaves torch's default group and all others. The other ranks are told; nobody is waited for."""
    channel = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(channel, Channel):
        channel.line.watch.close()
    if channel is not None:
        dist.destroy_process_group()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Names what this rank does inside the block (`forward`, `backward` …) in the message of a failed wait.

    >>> with phase("backward"):
    ...     loss.backward()  # doctest: +SKIP
    """
    channel = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(channel, Channel):
        yield
        return
    watch = channel.line.watch
    before = watch.phase
    watch.phase = name
    yield
    watch.phase = before  # after an error the phase stays: it is where the rank was


def _create(options: Any, inner: Any) -> Channel:
    """What torch calls for each new group of backend `espalier`; `inner` is `pg_options`."""
    parent = dist.group.WORLD if dist.is_initialized() else None
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    name = str(options.group_id)
    limit = options.timeout
    asked = GroupRequest(options.store, options.group_rank, options.group_size, limit, members, name)
    if isinstance(parent, Channel):
        return Channel(asked, INNER[parent.line.inner](asked), parent.line)
    kind = inner or ("nccl" if accelerator.available() else "gloo")
    groups = INNER[kind](asked)  # first: it may fail, and the watch has a thread
    return Channel(
        asked, groups, SharedRecords(Ledger(), FlightRecorder(asked.store, members[asked.rank], members), kind)
    )


dist.Backend.register_backend("espalier", _create, extended_api=True, devices=["cpu", "cuda"])
