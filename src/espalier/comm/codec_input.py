"""Checks of codec input: what every codec requires of its values and bytes, and the errors it raises."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from espalier.recipe.errors import RunFailed, UserError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What the lossy codecs take; they compute in float32."""


def floats(tensor: Tensor, codec: str, stays: bool = False) -> Tensor:
    """[n] float32 values on the host (`stays`: on the tensor's device); beyond its range they become infinite. Raises
    UserError for other dtypes."""
    if tensor.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise UserError(
            f"Codec {codec!r} got {str(tensor.dtype).removeprefix('torch.')}.",
            why=f"it rounds real numbers: {names}",
            do="codec 'mpc' or 'split', which lose nothing, or 'exact'",
        )
    flat = tensor.detach().reshape(-1)
    if stays and flat.device.type != "cpu":
        return flat.float().contiguous()
    return _borrowed(flat.to("cpu", torch.float32).contiguous())


def bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] the same memory, where it is the host's and contiguous; `tensor` must live as long."""
    flat = _borrowed(tensor.detach().reshape(-1).cpu().contiguous())
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


class _Lent:
    """Memory of a tensor for NumPy, which keeps the tensor as long as it looks at it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        pointer = (tensor.data_ptr(), False)
        self.__array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": pointer, "version": 3}


def _borrowed(tensor: Tensor) -> Tensor:
    """`tensor`'s memory as another storage: the kernels look at it through NumPy, and a storage that NumPy has once
    seen can never be resized, which is how sharded parameters are let go."""
    if tensor.numel() == 0:
        return tensor
    return torch.from_numpy(np.asarray(_Lent(tensor))).view(tensor.dtype)


def check_length(wire: Tensor, expected: int, codec: str) -> None:
    """Raises RunFailed when so many bytes should have come and others did."""
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != expected:
        got = f"{wire.numel()} values of {str(wire.dtype).removeprefix('torch.')}"
        raise RunFailed(
            f"Codec {codec!r} expected {expected} bytes and got {got}.",
            why="the message is truncated, or belongs to another tensor",
        )


def shaped(values: Tensor, like: Tensor) -> Tensor:
    """[n] `values` in `like`'s shape, dtype and device."""
    return values.view(like.shape).to(like.device, like.dtype)
