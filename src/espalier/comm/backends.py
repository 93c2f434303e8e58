"""Backends of a Channel: Gloo, NCCL, and host staging for ranks that compute on different kinds of device.

Gloo carries host tensors for all operations and GPU tensors for few, and NCCL has no CPUs. So where CPUs and GPUs are
in one group, a GPU's tensors are copied to the host, sent, and copied back when they are waited for; ranks on CPUs send
theirs as they are.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import Work
from torch.utils._pytree import tree_map

from espalier.kernels import accelerator
from espalier.recipe.errors import UserError

_DEFAULT = timedelta(0)
_THREADS = 2
"""Of a group, for each device, that wait for its work: torch's own number."""
_PATIENCE = 2.0
"""Seconds that leaving the process waits for them."""


@dataclass(frozen=True)
class GroupRequest:
    """What one group is made from, and the global ranks in it."""

    store: Store
    rank: int
    size: int
    timeout: timedelta
    members: tuple[int, ...]
    name: str


class HostStaged:
    """The collective methods of `inner` (a Gloo group) for tensors on any device."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._inner, name)

        def staged(*arguments: Any) -> Any:
            copies: list[tuple[Tensor, Tensor]] = []

            def host(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                copy = value.detach().to("cpu", copy=True)
                copies.append((value, copy))
                return copy

            result = operation(*tree_map(host, arguments))
            return _Copied(result, copies) if isinstance(result, Work) else result

        return staged


class _Copied(Work):
    """A Work whose results are on the host until it is waited for. Has state: the copies to be made."""

    def __init__(self, work: Work, copies: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._copies = copies

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Waits for the host's result and copies it to the device."""
        done = self._work.wait(timeout) if timeout else self._work.wait()
        for device, host in self._copies:
            device.detach().copy_(host)
        self._copies = []
        return done

    def is_completed(self) -> bool:
        """Whether a wait would only copy."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it ended without error."""
        return self._work.is_success()

    def exception(self) -> Any:
        """The error of the host's operation, if any."""
        return self._work.exception()


def gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """A Gloo group whose connections this process serves in the one thread that serves all of them. torch gives each
    group a thread of its own, which wakes 100 times a second: 40 groups take a twentieth of a core while nothing is
    sent."""
    made: Any = ProcessGroupGloo
    options = made._Options()
    options._devices = list(_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", "")))
    options._timeout, options._threads = timeout, _THREADS * len(options._devices)
    return made(store, rank, size, options)


@functools.cache
def _devices(process: int, interfaces: str) -> tuple[Any, ...]:
    """As torch makes them, once in each process: of one that was forked, threads stayed behind."""
    names = [name for name in interfaces.split(",") if name]
    made: Any = ProcessGroupGloo
    return tuple(made.create_device(interface=name) for name in names) or (made.create_default_device(),)


@atexit.register
def rest() -> None:
    """Waits, a little, until no thread of C++ runs or waits to run, once this process has made a Gloo group.

    Such a thread lets go of a collective's tensors after it has woken who waits for that, and what Python knows of a
    tensor is let go under the interpreter's lock (`decref_pyobject`, c10/util/intrusive_ptr.h). Where the interpreter
    ends meanwhile, the thread ends in that lock, within a function that must not be left so: `std::terminate`.
    """
    looks = 0
    until = time.monotonic() + _PATIENCE
    while _devices.cache_info().currsize and looks < 2 and time.monotonic() < until:
        looks = 0 if _runs() else looks + 1
        time.sleep(0.001)  # they get the interpreter's lock


def _runs() -> bool:
    """Whether a thread that is not Python's is runnable; elsewhere than on Linux none is."""
    ours = {str(thread.native_id) for thread in threading.enumerate()}
    for folder in Path("/proc/self/task").glob("*"):
        if folder.name not in ours:
            try:
                state = (folder / "stat").read_bytes().rpartition(b") ")[2][:1]
            except OSError:
                continue  # it has ended
            if state in (b"R", b"D"):
                return True
    return False


def _gloo(asked: GroupRequest) -> dict[str, Any]:
    inner = gloo(PrefixStore("gloo", asked.store), asked.rank, asked.size, asked.timeout)
    return {"cpu": inner, "cuda": inner}


def _nccl(asked: GroupRequest) -> dict[str, Any]:
    if not (dist.is_nccl_available() and accelerator.available()):
        raise UserError("inner = 'nccl' needs a CUDA device and a PyTorch with NCCL.", do="use inner = 'gloo'")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = asked.timeout
    options.global_ranks_in_group = list(asked.members)
    options.group_name = dist.distributed_c10d.GroupName(asked.name)
    inner = ProcessGroupNCCL(PrefixStore("nccl", asked.store), asked.rank, asked.size, options)
    return {**_gloo(asked), "cuda": inner}


def _staged(asked: GroupRequest) -> dict[str, Any]:
    inner = _gloo(asked)["cpu"]
    return {"cpu": inner, "cuda": HostStaged(inner)}


INNER: dict[str, Callable[[GroupRequest], dict[str, Any]]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "staged": _staged,
}
