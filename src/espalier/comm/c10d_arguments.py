"""Arguments of c10d calls: tensors, lists of tensors, options and reductions, in the forms torch passes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.comm.base import Codec, check_feedback, current_residual, stays

ReduceOp = dist.ReduceOp

# Sum of `rows` [ranks, elements] into `out` [elements], for the reductions that a reduce-scatter can do by itself.
REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    ReduceOp.AVG: lambda rows: rows.sum(0, dtype=rows.dtype) / len(rows),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
}


def type_of(backend: Any) -> dist.ProcessGroup.BackendType:
    """What torch calls a backend."""
    return getattr(dist.ProcessGroup.BackendType, backend.name().upper(), dist.ProcessGroup.BackendType.CUSTOM)


def residual_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The residual of the enclosing block, which belongs to one tensor."""
    return current_residual() if len(tensors) == 1 else None


def residual_like(tensor: Tensor, codecs: Iterable[Codec]) -> Tensor:
    """Zeros [n] for what is lost of a tensor of n values: float32 (float64 for float64), on its device where one of
    `codecs` encodes it there, else on the host. Raises UserError for a codec with which feedback diverges."""
    codecs = list(codecs)
    for codec in codecs:
        check_feedback(codec)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    there = any(stays(codec, tensor.device.type) for codec in codecs)
    return torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device if there else "cpu")


def shares(tensor: Tensor, splits: Any, ranks: int) -> list[Tensor]:
    """Each rank's part of a tensor, by `splits` of dim 0; equal parts where there are none (`split` would make one part
    of an empty tensor)."""
    return list(tensor.detach().split(list(splits)) if splits else tensor.detach().tensor_split(ranks))


def averages(options: Any) -> bool:
    """Whether options ask for a mean."""
    return bool(getattr(options.reduceOp, "op", options.reduceOp) == ReduceOp.AVG)


def many(tensors: Any) -> list[Tensor]:
    """A tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def payload(tensors: Sequence[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.nbytes for tensor in tensors)


def wire_size(codec: Codec, tensors: Sequence[Tensor]) -> float:
    """Bytes of all of them as `codec` writes them."""
    return sum(codec.wire_bytes(tensor.numel(), tensor.element_size()) for tensor in tensors)


def reducing(kind: Any, given: Any) -> Any:
    """Options of class `kind` for `given`: options of any reducing operation, a ReduceOp, or None (SUM)."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = getattr(given, "reduceOp", given)
    return options


def is_connection(message: str) -> bool:
    """Whether an error of a group tells of a lost peer."""
    return any(
        word in message.lower()
        for word in ("connect", "closed", "timed out", "timeout", "broken pipe", "reset by peer")
    )
