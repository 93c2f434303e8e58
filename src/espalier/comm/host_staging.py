"""Host staging: groups whose ranks compute on different kinds of device pass every tensor through host memory.

Gloo carries host tensors for all operations and GPU tensors for few, and NCCL has no CPUs. So a GPU's tensors are
copied to the host, sent, and copied back when they are waited for; ranks on CPUs send theirs as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._pytree import tree_map

_DEFAULT = timedelta(0)


class Staged:
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
        self._work, self._copies = work, copies

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
