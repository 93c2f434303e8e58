"""The codecs in anybody's DistributedDataParallel: `model.register_comm_hook(None, espalier.comm.ddp_hook("int8"))`.

Buckets are encoded, sent and added up in one ordered thread and a Gloo group of their own (hooks that begin a second
collective in a future's callback hang Gloo), with error feedback for each parameter. `exact`, and `auto` where links
are too fast for codecs, is the group's own all-reduce, as without a hook.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions, GradBucket

from espalier.comm import codecs
from espalier.comm.base import Codec, Spent, Traffic, sent_bytes, unbooked
from espalier.comm.c10d_arguments import residual_like
from espalier.comm.codecs import codec as codec_of
from espalier.comm.compressed_collectives import CodedCollectives
from espalier.comm.exact import Exact
from espalier.comm.rendezvous import parallel_group
from espalier.kernels import accelerator

TIMEOUT = 60.0
"""Seconds any wait for another rank may take."""
SAMPLE = 2**20
"""Values that `auto` sums up to see which way is faster: four pieces of four ranks. Plain, at 100 Mbit/s, 0.5 s."""
TRIALS = 2
"""Of each way, in turn; the faster one counts, as a first one pays for connections and caches."""


def ddp_hook(
    codec: str | Codec = "int8",
    *,
    group: dist.ProcessGroup | None = None,
    feedback: bool = True,
    timeout: float = TIMEOUT,
) -> Hook:
    """A communication hook for DistributedDataParallel. All ranks call it with the same codec.

    Args:
        codec: `int8`, `int4`, `int1`, `bf16`, `topk:0.01`, `zfp:8`, `split`, `mpc` …; `exact`: none. `auto`: `int8`
            where sums of 4 MiB, tried now, take less time by a fifth than without (`codecs.MARGIN`), else none.
        group: the ranks; None: torch's default group.
        feedback: what a lossy codec loses is added to the next gradient. Costs as much memory as the gradients.
        timeout: seconds; the deadline of every wait.

    Raises:
        UserError: there is no such codec, or ranks name different ones.

    >>> model.register_comm_hook(None, ddp_hook("int8"))  # doctest: +SKIP
    """
    process_group = group or dist.group.WORLD
    auto = codec == "auto"
    chosen = _Auto() if auto else codec_of(codec)
    through = coded(chosen, process_group, Traffic.GRADIENTS, timeout)
    if auto:
        through.close()  # it was there to ask whether all ranks say so
        through = coded(codec_of(codecs.AUTO[Traffic.GRADIENTS]), process_group, Traffic.GRADIENTS, timeout)
    if isinstance(chosen, Exact) and not (auto and pays(*_tried(through, process_group, feedback))):
        through.close()
        return Hook(None, process_group, feedback)
    return Hook(through, process_group, feedback)


class _Auto(Exact):
    """What ranks that ask for `auto` compare."""

    name = "auto"


def pays(plain: float, encoded: float) -> bool:
    """Whether sums that take `plain` seconds as they are and `encoded` seconds encoded are to be encoded."""
    return plain > codecs.MARGIN * encoded


def _tried(through: CodedCollectives, group: Any, feedback: bool) -> tuple[float, float]:
    """Seconds of a sum of `SAMPLE` values as they are and encoded, of the slowest rank; the same on all ranks."""
    on_gpu = accelerator.available() and accelerator.KIND in {device.type for device in group._device_types}
    device = accelerator.current() if on_gpu else accelerator.CPU
    draw = torch.Generator().manual_seed(group.rank())
    values = (torch.randn(SAMPLE, generator=draw) * 1e-3).to(device)
    residual = residual_like(values, [through.codec]) if feedback else None

    def seconds(way: Callable[[Tensor], Any]) -> float:
        copy = values.clone()
        group.barrier().wait()
        begin = time.perf_counter()
        way(copy)
        if on_gpu:
            accelerator.synchronize(device)
        return time.perf_counter() - begin

    ways = (
        lambda x: group.allreduce([x]).wait(),
        lambda x: through.all_reduce(x, residual, True)(unbooked).wait(),
    )
    took = torch.tensor([[seconds(way) for way in ways] for _ in range(TRIALS)], dtype=torch.float64).amin(0).to(device)
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([took], options).wait()
    plain, encoded = took.tolist()
    return plain, encoded


def coded(codec: Codec, group: dist.ProcessGroup | None, kind: Traffic, timeout: float = TIMEOUT) -> CodedCollectives:
    """Encoded collectives of the ranks of `group` (None: the default one). All of them call it."""
    process_group = group or dist.group.WORLD
    assert process_group is not None, "torch.distributed has no default group yet"
    members = tuple(getattr(process_group, "members", None) or dist.get_process_group_ranks(process_group))
    limit = timedelta(seconds=timeout)
    place = (process_group.rank(), len(members))
    return CodedCollectives(
        codec, parallel_group(process_group, kind, limit), place, kind._value_, members, lambda: limit
    )


class Hook:
    """What `ddp_hook` returns. Has state: the residual of each parameter, which `state_dict` saves.

    Attributes:
        codec: the name of what encodes; `exact` where nothing does.
        sent: bytes that this rank sent so far.
    """

    def __init__(self, through: CodedCollectives | None, group: Any, feedback: bool) -> None:
        self._coded = through
        self._group = group
        self._feedback = feedback and through is not None and not through.codec.lossless
        self.codec = "exact" if through is None else through.codec.name
        self._buckets: dict[tuple[int, ...], Tensor] = {}
        self._parts: dict[int, Tensor] = {}
        self.sent = 0
        self.__name__ = self.__qualname__ = f"espalier.comm.ddp_hook({self.codec!r})"  # torch logs it

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of the bucket over all ranks. `state` is not looked at."""
        buffer = bucket.buffer()
        if self._coded is None:
            return self._plain(buffer)
        residual = self._residual(self._coded.codec, bucket.parameters(), buffer) if self._feedback else None

        def arrived(done: Any) -> Tensor:
            done.value()  # raises what went wrong
            return buffer

        task = self._coded.all_reduce(buffer, residual, True)(self._booked)
        return task.get_future().then(arrived)

    def _plain(self, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
        ranks = self._group.size()
        self.sent += int(sent_bytes("all_reduce", buffer.nbytes, ranks))
        work = self._group.allreduce([buffer.div_(ranks)])
        return work.get_future().then(lambda done: done.value()[0])

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's residuals by the names of `model`'s parameters; save one for each rank."""
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        return {named[key]: part.clone() for key, part in self._parts.items()}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state_dict` gave on this rank."""
        self._buckets = {}
        self._parts = {
            id(parameter): state[name].clone() for name, parameter in model.named_parameters() if name in state
        }

    def _booked(self, spent: Spent) -> None:
        self.sent += int(spent.sent)

    def _residual(self, codec: Codec, parameters: list[Tensor], buffer: Tensor) -> Tensor:
        """Of a bucket. DDP rebuilds its buckets after the first step; residuals go with their parameters."""
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._buckets:
            whole = self._buckets[key] = residual_like(buffer, [codec])
            for parameter, part in zip(
                parameters, whole.split([bucket_parameter.numel() for bucket_parameter in parameters]), strict=True
            ):
                if id(parameter) in self._parts:
                    part.copy_(self._parts[id(parameter)])
                self._parts[id(parameter)] = part
        return self._buckets[key]


# DistributedDataParallel compares the types themselves, not their names.
Hook.__call__.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})
