"""The codecs in anybody's FSDP2 model: `espalier.comm.fsdp.compress(model, gradients="int8", parameters="bf16")`.

FSDP2 keeps the parameters it moves in full precision on their owners, so that what is gathered may be rounded: the
owner, too, computes with what the others see.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from espalier.comm.base import Codec, Traffic, unbooked
from espalier.comm.c10d_arguments import residual_like
from espalier.comm.codecs import codec as codec_of
from espalier.comm.compressed_collectives import CodedCollectives
from espalier.comm.ddp import coded
from espalier.recipe.errors import UserError


def compress(model: nn.Module, *, gradients: str | Codec = "int8", parameters: str | Codec = "exact") -> None:
    """Lets every FSDP2 unit of `model` (changed in place) encode what it exchanges. All ranks call it alike.

    Args:
        model: after `fully_shard` on it and its blocks.
        gradients: codec of reduce-scatters, with error feedback where it is lossy.
        parameters: codec of all-gathers.

    Raises:
        UserError: nothing in the model is sharded, or there is no such codec.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise UserError("This model has no FSDP2 unit.", do="torch.distributed.fsdp.fully_shard(model) first")
    scatters = codec_of(gradients)
    gathers = codec_of(parameters)
    made: dict[Any, CodedCollectives] = {}
    for unit in units:
        if scatters.name != "exact":
            unit.set_custom_reduce_scatter(_Scatter(scatters, made))
        if gathers.name != "exact":
            unit.set_custom_all_gather(_Gather(gathers, made))


class _Room:
    """What FSDP2 asks of both. Has state: the group that encodes, shared by all units."""

    def __init__(self, codec: Codec, made: dict[Any, CodedCollectives]) -> None:
        self._codec = codec
        self._made = made

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _through(self, group: dist.ProcessGroup, kind: Traffic) -> CodedCollectives:
        key = (group, kind)
        if key not in self._made:
            self._made[key] = coded(self._codec, group, kind)
        return self._made[key]


class _Scatter(_Room, ReduceScatter):
    """The reduce-scatter of one unit. Has state: the residual."""

    def __init__(self, codec: Codec, made: dict[Any, CodedCollectives]) -> None:
        super().__init__(codec, made)
        self._residual: Tensor | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum or mean, by `op`."""
        through = self._through(group, Traffic.GRADIENTS)
        if self._residual is None and not self._codec.lossless:
            self._residual = residual_like(input_tensor, [self._codec])
        kind = getattr(op, "op", op)
        if kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UserError(f"FSDP2 asked for {op}, and codecs sum or average.", do="no gradient divide factor")
        task = through.reduce_scatter(output_tensor, input_tensor, self._residual, kind == dist.ReduceOp.AVG)(unbooked)
        return _given(task, async_op)


class _Gather(_Room, AllGather):
    """The all-gather of one unit."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Everybody's parameters, one's own as the others see them."""
        task = self._through(group, Traffic.PARAMETERS).all_gather(output_tensor, input_tensor)(unbooked)
        return _given(task, async_op)


def _given(task: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return task
    task.wait()
    return None
