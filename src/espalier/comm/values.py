"""What every codec asks of its values and of its bytes, and says when they are not that."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.errors import RunFailed, UserError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What the lossy codecs take; they compute in float32."""


def floats(tensor: Tensor, codec: str) -> Tensor:
    """[n] float32 values on the host; beyond its range they become infinite. Raises UserError for other dtypes."""
    if tensor.dtype not in FLOATS:
        names = ", ".join(str(one).removeprefix("torch.") for one in FLOATS)
        raise UserError(
            f"Codec {codec!r} got {str(tensor.dtype).removeprefix('torch.')}.",
            why=f"it rounds real numbers: {names}",
            do="codec 'mpc' or 'split', which lose nothing, or 'exact'",
        )
    return tensor.detach().reshape(-1).to("cpu", torch.float32).contiguous()


def bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] the same memory."""
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def check_length(wire: Tensor, expected: int, codec: str) -> None:
    """Raises RunFailed when so many bytes should have come and others did."""
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != expected:
        got = f"{wire.numel()} values of {str(wire.dtype).removeprefix('torch.')}"
        raise RunFailed(
            f"Codec {codec!r} expected {expected} bytes and got {got}.", why="the message was cut, or is another one's"
        )


def aligned(wire: Tensor) -> Tensor:
    """`wire`, copied where it does not begin at a multiple of 8 bytes."""
    return wire.clone() if wire.data_ptr() % 8 or not wire.is_contiguous() else wire


def shaped(values: Tensor, like: Tensor) -> Tensor:
    """[n] `values` in `like`'s shape, dtype and device."""
    return values.view(like.shape).to(like.device, like.dtype)
