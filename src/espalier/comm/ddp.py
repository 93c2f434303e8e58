"""The codecs in anybody's DistributedDataParallel: `model.register_comm_hook(None, espalier.comm.ddp_hook("int8"))`.

Buckets are encoded, sent and added up in one ordered thread and a Gloo group of their own (hooks that begin a second
collective in a future's callback hang Gloo), with error feedback for each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from espalier.comm.base import Codec, Spent, Traffic
from espalier.comm.codecs import codec as codec_of
from espalier.comm.coded import Coded
from espalier.comm.given import residual_like
from espalier.comm.rendezvous import beside

TIMEOUT = 60.0
"""Seconds any wait for another rank may take."""


def ddp_hook(
    codec: str | Codec = "int8",
    *,
    group: dist.ProcessGroup | None = None,
    feedback: bool = True,
    timeout: float = TIMEOUT,
) -> Hook:
    """A communication hook for DistributedDataParallel. All ranks call it with the same codec.

    Args:
        codec: `int8`, `int4`, `int1`, `bf16`, `topk:0.01`, `zfp:8`, `split`, `mpc` …
        group: the ranks; None: torch's default group.
        feedback: what a lossy codec loses is added to the next gradient. Costs as much memory as the gradients.
        timeout: seconds; the deadline of every wait.

    Raises:
        UserError: there is no such codec, or ranks name different ones.

    >>> model.register_comm_hook(None, ddp_hook("int8"))  # doctest: +SKIP
    """
    return Hook(coded(codec_of(codec), group, Traffic.GRADIENTS, timeout), feedback)


def coded(codec: Codec, group: dist.ProcessGroup | None, kind: Traffic, timeout: float = TIMEOUT) -> Coded:
    """Encoded collectives of the ranks of `group` (None: the default one). All of them call it."""
    found = group or dist.group.WORLD
    assert found is not None, "torch.distributed has no default group yet"
    members = tuple(getattr(found, "members", None) or dist.get_process_group_ranks(found))
    limit = timedelta(seconds=timeout)
    place = (found.rank(), len(members))
    return Coded(codec, beside(found, kind, limit), place, kind._value_, members, lambda: limit)


class Hook:
    """What `ddp_hook` returns. Has state: the residual of each parameter, which `state_dict` saves.

    Attributes:
        sent: bytes that this rank sent so far.
    """

    def __init__(self, through: Coded, feedback: bool) -> None:
        self._coded = through
        self._feedback = feedback and not through.codec.lossless
        self._buckets: dict[tuple[int, ...], Tensor] = {}
        self._parts: dict[int, Tensor] = {}
        self.sent = 0
        self.__name__ = self.__qualname__ = f"espalier.comm.ddp_hook({through.codec.name!r})"  # torch logs it

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of the bucket over all ranks. `state` is not looked at."""
        buffer = bucket.buffer()
        residual = self._residual(bucket.parameters(), buffer) if self._feedback else None

        def arrived(done: Any) -> Tensor:
            done.value()  # raises what went wrong
            return buffer

        task = self._coded.all_reduce(buffer, residual, True)(self._booked)
        future: torch.futures.Future[Tensor] = task.get_future().then(arrived)
        return future

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's residuals by the names of `model`'s parameters; save one for each rank."""
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        return {named[key]: part.clone() for key, part in self._parts.items()}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` gave on this rank."""
        self._buckets = {}
        self._parts = {id(one): state[name].clone() for name, one in model.named_parameters() if name in state}

    def _booked(self, spent: Spent) -> None:
        self.sent += int(spent.sent)

    def _residual(self, parameters: list[Tensor], buffer: Tensor) -> Tensor:
        """Of a bucket. DDP rebuilds its buckets after the first step; residuals go with their parameters."""
        key = tuple(id(one) for one in parameters)
        if key not in self._buckets:
            whole = self._buckets[key] = residual_like(buffer, [self._coded.codec])
            for one, part in zip(parameters, whole.split([one.numel() for one in parameters]), strict=True):
                if id(one) in self._parts:
                    part.copy_(self._parts[id(one)])
                self._parts[id(one)] = part
        return self._buckets[key]


# DistributedDataParallel compares the types themselves, not their names.
Hook.__call__.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})
